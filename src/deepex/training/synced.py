"""Where in a job's arena the numbers lie on which its replicas agree."""

from deepex.arena.arena import Arena
from deepex.arena.optimiser.base import Optimiser
from deepex.sync.drift import Drift
from deepex.sync.synced_slice import MatrixSlot, SyncedSlice
from deepex.training.job import Job


def synced_slice(job: Job, optimiser: Optimiser) -> SyncedSlice:
    """The gradients and buffers; or the weights, buffers and those states of the optimiser that are averaged."""
    arena = optimiser.arena
    buffers, weights = arena.buffers.numel(), arena.weights.numel()
    if job.config.sync.kind.sums_gradients:
        gradients = arena.gradients.numel()
        held = slice(gradients, gradients + buffers)
        slots = tuple((slot.offset, slot.count) for slot in arena.layout.weights) if arena.moves else ()
        return SyncedSlice(
            agreed=arena.gradients_and_buffers, buffers=held, weights=slice(0, 0), own=held, request=gradients, slots=slots
        )
    policies, ahead = job.config.state_policies, optimiser.ahead()
    agreed = arena.model_and([*policies.values()].count("average"))
    matrices = (slot for slot in arena.layout.decayed if len(slot.shape) > 1 and slot.count)
    return SyncedSlice(
        agreed=agreed,
        buffers=slice(0, buffers),
        weights=slice(buffers, buffers + weights),
        own=slice(0, agreed.numel()),
        request=0,
        lost=1,
        matrices=tuple(MatrixSlot(slot.offset, slot.shape[0], slot.count // slot.shape[0]) for slot in matrices),
        momentum_ahead=ahead if ahead and policies[ahead.state] != "reset" else None,
    )


def make_drift(job: Job, arena: Arena, synced: SyncedSlice, *, replicas_per_rank: int) -> Drift | None:
    """What measures how far replicas are apart; none where they never are."""
    if job.config.sync.kind.sums_gradients or job.replicas == 1:
        return None
    tensors = [slot for slot in arena.layout.weights if slot.count]
    matrices = [slot for slot in tensors if len(slot.shape) > 1] or tensors
    return Drift(synced, [(slot.name, slot.offset, slot.count) for slot in matrices], replicas_per_rank=replicas_per_rank)
