"""The run directory: schema, atomic writes, phase clock. No torch, no MPI."""

from deepex.record.clock import COMPUTE, PHASES
from deepex.record.run import EpochRecord, RunDirectory, Score
from deepex.record.target import Target

__all__ = ["COMPUTE", "PHASES", "EpochRecord", "RunDirectory", "Score", "Target"]
