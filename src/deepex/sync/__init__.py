"""When (period rules) and how (agreements, strategies, momentum) replicas agree."""

from deepex.sync.agreement import Agreement, InPlace, KeptState, SharedArenaMean
from deepex.sync.config import SyncConfig
from deepex.sync.drift import Drift
from deepex.sync.momentum import MomentumPolicy, make_momentum
from deepex.sync.period import PeriodRule, Seen, parse_period, stretches
from deepex.sync.strategy import ReplicaSet, Strategy, make_strategy
from deepex.sync.synced_slice import SyncedSlice

__all__ = [
    "Agreement",
    "Drift",
    "InPlace",
    "KeptState",
    "MomentumPolicy",
    "PeriodRule",
    "ReplicaSet",
    "Seen",
    "SharedArenaMean",
    "Strategy",
    "SyncConfig",
    "SyncedSlice",
    "make_momentum",
    "make_strategy",
    "parse_period",
    "stretches",
]
