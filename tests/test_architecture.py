"""The order of the packages in DESIGN.md, held by walking every import of src/deepex, also those inside functions."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import deepex

SOURCE = Path(deepex.__file__).parent

# What stands to the left of each package, level by level; packages of one level do not import each other.
RUNNING = (
    {"errors"},
    {"record"},
    {"machine"},
    {"comm"},
    {"arena", "task", "data"},
    {"sync"},
    {"step"},
    {"training"},
    {"recipes"},
    {"study", "capture", "couple"},
    {"cli"},
)
READING = ({"errors"}, {"record"}, {"speedup"}, {"trace"}, {"perf"}, {"report"}, {"cli"})
READING_USERS = {"study", "couple"}  # of the running half, besides cli
NETS_USERS = {"recipes", "capture", "couple", "study", "cli"}  # recipes join networks and training
WITHOUT_TORCH_AND_MPI = ("errors", "record", "speedup", "trace", "perf", "report")

# Environment variables are for comm/ (launchers) and cli/. Whoever else touches os.environ is named here with the reason.
ENVIRONMENT_EXCEPTIONS = {
    "training/run.py": "hands os.environ on to machine's describe, keep_heap and keep_compiled; reads no key itself",
    "study/frameworks/program.py": "a program that a launcher starts, as a verb is: hands os.environ on to find_place, describe, "
    "keep_heap and to the framework, which sets there what its libraries read while they are loaded",
}

PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
PICKLING_CALLS = {
    "torch.save",
    "torch.load",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


class Import(NamedTuple):
    """Module `module` of deepex imports `target` (a full dotted name) at `line`."""

    module: str
    target: str
    line: int

    @property
    def importer(self) -> str:
        return package_of(self.module)

    @property
    def package(self) -> str | None:
        """The package of deepex that is imported; None for a third party's, "" for deepex itself."""
        return package_of(self.target) if self.target.split(".")[0] == "deepex" else None

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def package_of(module: str) -> str:
    """The first name below deepex: `deepex.comm.mpi` and `deepex.comm` are both `comm`; `deepex` itself is ""."""
    return [*module.split("."), ""][1]


@cache
def files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_module(name: str) -> bool:
    """Also true for a package that has lost its `__init__.py`."""
    relative = SOURCE.parent.joinpath(*name.split("."))
    return relative.with_suffix(".py").is_file() or relative.is_dir()


def imports_of(module: str, node: ast.Module) -> list[Import]:
    """Every import, wherever it stands; `from deepex import nets` is an import of deepex.nets."""
    found = []
    for item in ast.walk(node):
        if isinstance(item, ast.Import):
            found += [Import(module, alias.name, item.lineno) for alias in item.names]
        elif isinstance(item, ast.ImportFrom):
            base = item.module or ""
            for alias in item.names:
                full = f"{base}.{alias.name}"
                found.append(Import(module, full if base.startswith("deepex") and is_module(full) else base, item.lineno))
        elif isinstance(item, ast.Call) and called_name(item).endswith("import_module") and item.args:
            name = literal_start(item.args[0])
            if name:
                found.append(Import(module, name.rstrip("."), item.lineno))
    return found


def called_name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def literal_start(node: ast.expr) -> str:
    """The text that a string or an f-string begins with; empty where it is only known when the program runs."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for module, path in files().items() for found in imports_of(module, tree(path)))


def allowed(importer: str) -> set[str]:
    """What `importer` may import besides itself."""
    left: set[str] = set()
    for order in (RUNNING, READING):
        for level, packages in enumerate(order):
            if importer in packages:
                left |= set().union(*order[:level])
    if importer == "nets":
        left = {"errors"}
    return left | ({"nets"} if importer in NETS_USERS else set())


def broken(imports: tuple[Import, ...]) -> list[str]:
    """Imports between packages that point the wrong way. The root only resolves names, so it is checked on its own."""
    return [
        str(found)
        for found in imports
        if found.importer not in ("", "__main__")
        and found.package not in (None, found.importer)
        and found.package not in allowed(found.importer)
    ]


def test_every_package_is_one_of_the_design() -> None:
    known = {"", "__main__", "nets"}.union(*RUNNING, *READING)
    assert {package_of(module) for module in files()} <= known


def test_imports_point_to_the_left() -> None:
    assert broken(all_imports()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("deepex.record.run", "from deepex.machine import describe"),
        ("deepex.data.feeds.feed", "from deepex.sync.when import read_period"),
        ("deepex.sync.when.rule", "import deepex.step.eager"),
        ("deepex.step.eager", "from deepex import nets"),
        ("deepex.step.eager", "def f():\n    from deepex.nets.lenet import lenet"),
        ("deepex.nets.lenet", "from deepex.record import PHASES"),
        ("deepex.speedup.measure", "from deepex.training.config import RunConfig"),
        ("deepex.speedup.measure", "from deepex.perf import predict"),
        ("deepex.arena.arena", "from deepex.sync.synced_slice import SyncedSlice"),
        ("deepex.task.base", "from deepex.data.manifest import Manifest"),
        ("deepex.step.runner", "from deepex.training.config import RunConfig"),
        ("deepex.comm.mpi", "from importlib import import_module\nimport_module('deepex.training.session')"),
        ("deepex.comm.mpi", "import importlib\nimportlib.import_module(f'deepex.cli.{verb}')"),
        ("deepex.errors", "from deepex.record import files"),
        ("deepex.step.eager", "from deepex import train"),
        ("deepex.report.page", "from deepex.recipes import recipe"),
    ],
)
def test_the_walk_finds_what_points_the_wrong_way(module: str, line: str) -> None:
    assert broken(tuple(imports_of(module, ast.parse(line))))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("deepex.comm.together", "from deepex import errors"),
        ("deepex.cli.show", "from deepex.speedup import compare"),
        ("deepex.recipes.network", "from deepex import nets"),
        ("deepex.step.eager", "import torch\nfrom deepex.arena.arena import Arena"),
        ("deepex.cli", "from importlib import import_module\nimport_module(f'deepex.cli.{name}')"),
    ],
)
def test_the_walk_lets_the_right_way_pass(module: str, line: str) -> None:
    assert not broken(tuple(imports_of(module, ast.parse(line))))


def test_nets_import_torch_and_errors_alone() -> None:
    third_party = {f.target.split(".")[0] for f in all_imports() if f.importer == "nets"} - set(sys.stdlib_module_names)
    assert third_party == {"torch", "deepex"}
    assert {f.package for f in all_imports() if f.importer == "nets"} <= {None, "nets", "errors"}


def test_training_never_imports_nets() -> None:
    assert [str(f) for f in all_imports() if f.importer == "training" and f.package == "nets"] == []


def test_no_two_packages_import_each_other() -> None:
    pairs = {(f.importer, f.package) for f in all_imports() if f.package not in (None, f.importer)}
    assert [pair for pair in pairs if pair[::-1] in pairs] == []


def circles(table: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, round about too: what each can reach of those that reach it."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in table.get(todo.pop(), set()) - seen:
                seen.add(target)
                todo.append(target)
        return seen

    reach = {module: reached(module) for module in table}
    found = {frozenset({other for other in reach[module] if module in reach.get(other, set())}) for module in table}
    return [set(some) for some in found if some]


def test_no_two_files_import_each_other() -> None:
    table: dict[str, set[str]] = {}
    for found in all_imports():
        if found.target in files() and found.importer and found.target != found.module:  # the root only resolves names
            table.setdefault(found.module, set()).add(found.target)
    assert circles(table) == []


def test_the_walk_finds_circles_round_about_too() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


CORE = {"record", "machine", "comm", "arena", "task", "data", "sync", "step", "training"}


def public_names(module: str, node: ast.Module) -> list[str]:
    """The classes of a module, and the names that it gives to types, as far as they are public."""
    names = [item.name for item in node.body if isinstance(item, ast.ClassDef)]
    names += [item.targets[0].id for item in node.body if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)]
    return [name for name in names if name[0].isupper() and not name.isupper()]


def test_no_class_name_of_the_core_stands_for_two() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in files().items():
        for name in public_names(module, tree(path)) if package_of(module) in CORE else ():
            homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_the_root_imports_for_type_checkers_only() -> None:
    """Names are resolved on use; an import that runs would make `import deepex` slow."""
    node = tree(SOURCE / "__init__.py")
    guarded = {
        id(item)
        for block in node.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for item in ast.walk(block)
    }
    running = [item for item in ast.walk(node) if isinstance(item, ast.ImportFrom | ast.Import) and id(item) not in guarded]
    modules = [alias.name for item in running if isinstance(item, ast.Import) for alias in item.names]
    modules += [item.module or "" for item in running if isinstance(item, ast.ImportFrom)]
    assert {name.split(".")[0] for name in modules} <= set(sys.stdlib_module_names)


def reached_from(module: str) -> set[str]:
    """Every module that importing or using `module` can load: its imports, theirs, and the packages on the way."""
    table: dict[str, set[str]] = {}
    for found in all_imports():
        table.setdefault(found.module, set()).add(found.target)
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.startswith("deepex."):
            todo += [part for part in (name.rpartition(".")[0],) if part != "deepex"]
            todo += table.get(name, set())
    return seen


@pytest.mark.parametrize("module", [m for m in files() if package_of(m) in WITHOUT_TORCH_AND_MPI])
def test_the_reading_half_reaches_no_torch_and_no_mpi(module: str) -> None:
    assert {name.split(".")[0] for name in reached_from(module)} & {"torch", "mpi4py"} == set()


def test_reaching_is_transitive() -> None:
    assert {"torch", "mpi4py"} <= {name.split(".")[0] for name in reached_from("deepex.recipes")}


def test_nothing_is_called_utils_common_or_helpers() -> None:
    names = {part for module in files() for part in module.split(".")}
    assert names & {"utils", "util", "common", "helpers", "helper", "misc"} == set()


@pytest.mark.parametrize("directory", sorted({path.parent for path in files().values()}), ids=lambda d: d.name)
def test_every_package_says_what_it_is(directory: Path) -> None:
    init = directory / "__init__.py"
    assert init.is_file(), f"{directory} holds modules but no __init__.py"
    assert ast.get_docstring(tree(init)), f"{init} has no docstring"


@pytest.mark.parametrize("module", files())
def test_every_module_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(tree(files()[module]))


def touches_environment(node: ast.Module) -> list[int]:
    lines = []
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and ast.unparse(item) in {"os.environ", "os.environb", "os.getenv", "os.getenvb"}:
            lines.append(item.lineno)
        if isinstance(item, ast.ImportFrom) and item.module == "os":
            lines += [item.lineno for alias in item.names if alias.name in {"environ", "environb", "getenv", "getenvb"}]
    return lines


@pytest.mark.parametrize("line", ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ"])
def test_the_walk_finds_the_environment(line: str) -> None:
    assert touches_environment(ast.parse(line))


def test_the_environment_is_read_in_comm_and_cli_only() -> None:
    readers = {
        path.relative_to(SOURCE).as_posix()
        for module, path in files().items()
        if package_of(module) not in ("comm", "cli") and touches_environment(tree(path))
    }
    assert readers == set(ENVIRONMENT_EXCEPTIONS), "name a new reader with its reason, or strike out one that is gone"


def pickles(module: str, node: ast.Module) -> list[str]:
    found = [str(i) for i in imports_of(module, node) if i.target.split(".")[0] in PICKLING_MODULES]
    for item in ast.walk(node):
        if isinstance(item, ast.ImportFrom) and item.module == "torch":
            found += [f"torch.{alias.name}" for alias in item.names if alias.name in {"save", "load"}]
        if isinstance(item, ast.Attribute):
            text = ast.unparse(item)
            found += [text] if text in PICKLING_CALLS or item.attr in PICKLING_CALLS else []
        if isinstance(item, ast.keyword) and item.arg == "allow_pickle" and ast.unparse(item.value) != "False":
            found.append(ast.unparse(item))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "def f():\n    from pickle import dumps",
        "torch.save(a, b)",
        "from torch import load",
        "np.load(f, allow_pickle=True)",
        "dist.all_gather_object(a, b)",
    ],
)
def test_the_walk_finds_pickling(line: str) -> None:
    assert pickles("deepex.step.eager", ast.parse(line))


def test_nothing_pickles() -> None:
    assert [(module, found) for module, path in files().items() for found in pickles(module, tree(path))] == []


def test_no_import_is_relative() -> None:
    relative = [
        f"{path}:{item.lineno}"
        for path in files().values()
        for item in ast.walk(tree(path))
        if isinstance(item, ast.ImportFrom) and item.level
    ]
    assert relative == []


def loaded_after(program: str) -> set[str]:
    """The top-level packages in sys.modules of a fresh interpreter that ran `program`."""
    tail = "\nimport json, sys\nprint(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", program + tail], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"}
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"torch", "mpi4py", "numpy", "safetensors", "h5py"}


def test_importing_deepex_loads_nothing_heavy() -> None:
    assert loaded_after("import deepex; dir(deepex)") & (HEAVY | {"typer", "rich"}) == set()


def test_a_name_is_loaded_on_first_use_only(make_data: Callable[[int], Path], tmp_path: Path) -> None:
    """One interpreter: RunDirectory stays light, then `train` brings torch, and a run nothing more: a compiler takes seconds."""
    program = f"""
import sys, deepex
deepex.RunDirectory
assert "torch" not in sys.modules, "RunDirectory loaded torch"
assert callable(deepex.train)
assert deepex.train is sys.modules["deepex.recipes"].train
from deepex.comm.solo import SoloCommunicator
keys = {{"data": {str(make_data(64))!r}, "epochs": 1, "batch": 32, "validate": "none", "device": "cpu", "threads": 1}}
config = deepex.recipe("fashion", keys)
deepex.train(config, SoloCommunicator(), out={str(tmp_path / "run")!r})
assert not {{"torch._dynamo", "torch._inductor", "sympy"}} & set(sys.modules)
"""
    loaded = loaded_after(program)
    assert "torch" in loaded
    assert "mpi4py" not in loaded, "MPI is loaded when a communicator is built, not before"


def test_every_public_name_resolves() -> None:
    assert dir(deepex) == sorted(deepex.__all__)
    assert all(getattr(deepex, name).__name__ == name for name in deepex.__all__)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'deepex' has no attribute 'trian'") as caught:
        _ = deepex.trian
    assert all(name in str(caught.value) for name in deepex.__all__)


def test_the_reading_half_runs_without_torch_and_mpi() -> None:
    assert (
        loaded_after("import deepex.record, deepex.speedup, deepex.report, deepex.cli.show, deepex.cli.report")
        & {"torch", "mpi4py", "numpy"}
        == set()
    )


def test_help_loads_nothing_heavy() -> None:
    """`-X importtime` names every module that the interpreter loads, on standard error."""
    command = [sys.executable, "-X", "importtime", "-m", "deepex", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in loaded
    assert "train" in done.stdout
    assert loaded & HEAVY == set()


def test_the_help_of_every_verb_loads_nothing_heavy() -> None:
    program = """
from typer.testing import CliRunner
from deepex.cli import app
for verb in (["train"], ["show"], ["report"], ["doctor"], ["data"], ["data", "pack"], ["study"], ["study", "strong"]):
    result = CliRunner().invoke(app, [*verb, "--help"])
    assert "Usage" in result.output, (verb, result.output, result.exception)
"""
    assert loaded_after(program) & HEAVY == set()
