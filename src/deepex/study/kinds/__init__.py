"""What each kind of study varies, one file each."""

from typing import Final

from deepex.study.kinds.base import Kind, Subject, Variant
from deepex.study.kinds.strong import Strong
from deepex.study.kinds.sync import Sync
from deepex.study.kinds.threads import Threads
from deepex.study.kinds.variability import Variability
from deepex.study.kinds.weak import Weak

__all__ = ["KINDS", "Kind", "Strong", "Subject", "Sync", "Threads", "Variability", "Variant", "Weak"]

KINDS: Final[dict[str, type[Kind]]] = {kind.name: kind for kind in (Strong, Weak, Sync, Threads, Variability)}
