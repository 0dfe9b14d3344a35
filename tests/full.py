"""How much of what is tried at random, or in many sizes, is tried: a part of it on every day, all of it in CI (`.ci/run`)."""

import os
from typing import Final

FULL: Final = os.environ.get("FULL_TESTS") == "1"  # the one place where it is read


def examples(daily: int, full: int) -> int:
    """Return how many examples to try: those of every day find most; CI tries the full number."""
    return full if FULL else daily
