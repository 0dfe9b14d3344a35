"""What is learnt: tasks, one file each, by their names in `--set task=…`."""

from typing import Final

from deepex.errors import UnknownName
from deepex.task.classify import Classify
from deepex.task.reconstruct import Reconstruct
from deepex.task.task import Task

TASKS: Final[dict[str, type[Task]]] = {"classify": Classify, "reconstruct": Reconstruct}


def task_kind(name: str) -> type[Task]:
    """Look up a kind of task."""
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    return TASKS[name]


def make_task(name: str) -> Task:
    """Make a task."""
    return task_kind(name)()
