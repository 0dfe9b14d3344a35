"""What each kind of study varies, one file each."""

from deepex.study.kinds.base import Kind, Subject, Variant
from deepex.study.kinds.frameworks import Frameworks
from deepex.study.kinds.storage import Storage
from deepex.study.kinds.strong import Strong
from deepex.study.kinds.sync import Sync
from deepex.study.kinds.threads import Threads
from deepex.study.kinds.transfer import Transfer
from deepex.study.kinds.variability import Variability
from deepex.study.kinds.weak import Weak

__all__ = [
    "Frameworks",
    "Kind",
    "Storage",
    "Strong",
    "Subject",
    "Sync",
    "Threads",
    "Transfer",
    "Variability",
    "Variant",
    "Weak",
]
