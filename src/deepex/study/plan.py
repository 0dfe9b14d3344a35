"""From a kind of study to its plan: every variant as often as is asked, in turns.

    request = Request(recipe="fashion", settings=("batch=16",), repeats=3, epochs=4)
    subject = open_subject(request)
    runs = make_plan(Strong(ranks=(1, 2, 4)), subject, request)

The turns go forth and back (A B C, C B A, A B C), so that a machine that slows down or warms up does it to all alike. Each repeat
has a seed of its own, because what is learnt differs from seed to seed by more than times do; where the seed is what is studied,
repeats differ in nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import torch

from deepex.data.find import open_dataset
from deepex.errors import ConfigError
from deepex.machine.hardware import describe_cpu
from deepex.recipes import find_config
from deepex.record import PlannedRun, Target
from deepex.record.table import parse_assignments
from deepex.study.kinds import Kind, Subject, Variant
from deepex.study.trust import check_commands
from deepex.task import task_kind

_LONGEST_NAME: Final = 120  # before it is shortened: a directory's name has 255 bytes at most
_EPOCHS: Final = 4  # the first warms up, three are measured


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asks of any kind of study: of what, how often, how long, and to which targets."""

    recipe: str
    settings: tuple[str, ...] = ()
    repeats: int = 3
    epochs: int | None = None
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}; it must be at least 1, and 3 or more give an interval")
        for text in self.targets:
            Target.parse(text)


def open_subject(request: Request) -> Subject:
    """Read the configuration and look at its dataset."""
    changes = parse_assignments(request.settings)
    config = find_config(request.recipe, changes)
    for text in request.targets:
        Target.parse(text).check(task_kind(config.task).measures, config.task)
    samples = config.samples or open_dataset(config.data, config.data_options).part("train").count
    cores = int(describe_cpu()["num_cores_usable"] or 1)
    return Subject(
        recipe=request.recipe,
        config=config,
        samples=samples,
        cores=cores,
        gpus=torch.cuda.device_count(),
        chosen=frozenset(changes),
    )


def make_plan(kind: Kind, subject: Subject, request: Request) -> list[PlannedRun]:
    """Every run, in the order in which they are run."""
    variants, common = kind.variants(subject), _common(kind, subject, request)
    turns: list[tuple[int, Variant]] = []
    for repeat in range(1, request.repeats + 1):
        turns += [(repeat, variant) for variant in (variants if repeat % 2 else variants[::-1])]
    plan = [_planned(request, variant, repeat, common, seed=subject.config.seed) for repeat, variant in turns]
    check_commands(plan)
    _check_names(plan)
    return plan


def hardest(targets: Sequence[str]) -> str | None:
    """The target at which a run may stop; none, if they are of different measures."""
    parsed = [Target.parse(text) for text in targets]
    if len({(target.part, target.measure) for target in parsed}) != 1:
        return None
    return str(max(parsed, key=lambda target: target.value if target.rises else -target.value))


def _common(kind: Kind, subject: Subject, request: Request) -> dict[str, Any]:
    """The settings of all runs: how long they train, how steps are run, and that they keep no more than one checkpoint."""
    config, target = subject.config, hardest(request.targets) or subject.config.target
    whole = config.epochs if target or kind.trains_to_target or "epochs" in subject.chosen else min(config.epochs, _EPOCHS)
    settings: dict[str, Any] = {"epochs": request.epochs or whole, "checkpoint.keep": 1, **subject.step}
    return settings | ({"target": target} if target else {})


def _planned(request: Request, variant: Variant, repeat: int, common: dict[str, Any], *, seed: int) -> PlannedRun:
    settings = {"seed": seed + repeat - 1, **common, **variant.settings}
    own = [text for text in request.settings if text.partition("=")[0].strip() not in settings]
    texts = [*own, *(f"{key}={_text(value)}" for key, value in settings.items())]
    words = [request.recipe, *(word for text in texts for word in ("--set", text))] if variant.trains else []
    return PlannedRun(
        name=_name(variant.varied, repeat),
        varied=variant.varied,
        repeat=repeat,
        ranks=variant.ranks,
        command=(*variant.program, *words),
        before=variant.before,
        estimate_seconds=variant.estimate_seconds,
    )


def _name(varied: dict[str, Any], repeat: int) -> str:
    """A name that says what is varied, fit for a file: `ranks-4_repeat-2`."""
    words = "_".join(f"{key}-{_text(value)}" for key, value in varied.items() if value != "")
    if len(words) > _LONGEST_NAME:
        words = f"{words[:_LONGEST_NAME]}-{sha256(words.encode()).hexdigest()[:8]}"
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{words}_repeat-{repeat}" if words else f"repeat-{repeat}")


def _check_names(plan: Sequence[PlannedRun]) -> None:
    """Two runs of one name would write into one directory, and each be taken for the other."""
    seen: dict[str, PlannedRun] = {}
    for planned in plan:
        same = seen.setdefault(planned.name, planned)
        if same is not planned:
            raise ConfigError(
                f"two runs would be named {planned.name}: {same.varied} and {planned.varied}; give each value once, and values "
                "that differ in more than signs"
            )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
