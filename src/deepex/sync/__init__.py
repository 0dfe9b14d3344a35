"""When (period rules) and how (agreements, strategies, momentum) replicas agree."""

from deepex.sync.agreement import Agreement, InPlace, State, Turns
from deepex.sync.config import SyncConfig
from deepex.sync.drift import Drift
from deepex.sync.momentum import MomentumPolicy, make_momentum
from deepex.sync.period import PeriodRule, Seen, parse_period, segments
from deepex.sync.region import Region
from deepex.sync.strategy import Crowd, Strategy, make_strategy

__all__ = [
    "Agreement",
    "Crowd",
    "Drift",
    "InPlace",
    "MomentumPolicy",
    "PeriodRule",
    "Region",
    "Seen",
    "State",
    "Strategy",
    "SyncConfig",
    "Turns",
    "make_momentum",
    "make_strategy",
    "parse_period",
    "segments",
]
