"""The targets of a study that has run: those asked for, the recipe's, or one that is chosen from what the runs reached."""

from collections import defaultdict

from deepex.record import EpochRecord, StudyDirectory
from deepex.speedup.target import common_target


def settle_targets(study: StudyDirectory) -> None:
    """Note in `study.json` what learning is measured to, and why; what was asked for stays."""
    if study.state.get("targets") and not study.state.get("targets_reason", "").startswith("chosen"):
        return
    runs: dict[str, list[list[EpochRecord]]] = defaultdict(list)
    own = set()
    for planned, run in study.trained():
        runs[str(planned.varied)].append(run.epochs())
        own.add(run.config.get("target"))
    if own and None not in own:
        study.set_state(targets=sorted(map(str, own)), targets_reason="the recipe's")
        return
    if target := common_target(list(runs.values())):
        study.set_state(targets=[target], targets_reason="chosen from the runs: what every setting that learnt came to")
