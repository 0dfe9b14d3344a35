"""The run directory: schema, atomic writes, phase clock. No torch, no MPI."""

from deepex.record.clock import COMPUTE, PHASES
from deepex.record.run import EpochRecord, RunDirectory, Score
from deepex.record.study import PlannedRun, StudyDirectory, is_study
from deepex.record.target import Target

__all__ = ["COMPUTE", "PHASES", "EpochRecord", "PlannedRun", "RunDirectory", "Score", "StudyDirectory", "Target", "is_study"]
