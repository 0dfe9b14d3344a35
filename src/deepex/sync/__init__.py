"""When (period rules) and how (agreements, momentum) replicas agree."""

from deepex.sync.agreement import Agreement, make_agreement
from deepex.sync.config import SyncConfig
from deepex.sync.momentum import MomentumPolicy, make_momentum
from deepex.sync.period import PeriodRule, parse_period, segments

__all__ = [
    "Agreement",
    "MomentumPolicy",
    "PeriodRule",
    "SyncConfig",
    "make_agreement",
    "make_momentum",
    "parse_period",
    "segments",
]
