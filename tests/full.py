"""How much of what is tried at random, or in many sizes, is tried: a part of it on every day, all of it in CI (`.ci/run`)."""

import os
from typing import Final, TypeVar

import pytest

T = TypeVar("T")

FULL: Final = os.environ.get("FULL_TESTS") == "1"  # the one place where it is read
in_full = pytest.mark.skipif(not FULL, reason="CI tries it, and FULL_TESTS=1")


def examples(daily: T, full: T) -> T:
    """Return what to try: a number of examples or a list of cases. Those of every day find most; CI tries all."""
    return full if FULL else daily
