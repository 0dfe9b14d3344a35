"""One contiguous buffer that holds a replica: its weights, averaged buffers, gradients and what its optimiser keeps.

    arena = Arena(network, device)
    arena.weights.norm()           # all trainable weights, as one vector
    network.conv1.weight           # a view into it, channels-last strides kept

The allocation is laid out so that whatever is communicated or written is one contiguous slice of it, with no copy made first:

    | gradients | buffers | weights | state 1 | state 2 | … | frozen |
      '------ sync of gradients -'
                  '-- sync of weights --'
                  '-- sync of weights, state 1 averaged -'
                  '---------- kept: broadcast and checkpoint ---------'

Gradients, and states such as momentum, are twins of the weights: the same offsets. Within the weights, those that decay come first,
so that an update with weight decay is one pass over two slices. Each tensor starts on a multiple of 256 bytes (a cache line, a GPU
memory transaction and cuDNN's vector loads all divide that); the padding between tensors is zero and stays zero.
On a CPU that syncs weights alone, the region of gradients is left out: each gradient stays in the memory that autograd made for it
until the update has taken it. Moving them together first would cost 4 % of a step of ResNet-18, and nobody needs them in one piece.
`buffers` are the module's floating-point buffers (batch-norm statistics), after two reserved numbers in which ranks tell each other
that they were asked to stop, and that a replica is left out. Those of a layer that is in evaluation mode stand still, among the
frozen tensors. Integer and boolean buffers (batch norm's counters) are not averaged; each has memory of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from deepex.arena.network import moving_buffers
from deepex.comm.base import Zeros, own_zeros
from deepex.errors import ConfigError

ALIGNMENT_BYTES: Final = 256


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor of the module lies in its region of the arena; strides are in elements."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    count: int

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """The tensor, as a view of its region.

        `.data` gives each view a version counter of its own. With the one they would share, writing any part of the arena
        between forward and backward would look to autograd like writing the batch-norm statistics that it saved.
        """
        flat = region[self.offset : self.offset + self.count]
        return flat.as_strided(self.shape, self.stride, region.storage_offset() + self.offset).data


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The slots of each region. Two networks with equal layouts can read each other's checkpoints."""

    dtype: str
    buffers: tuple[Slot, ...]
    decayed: tuple[Slot, ...]
    undecayed: tuple[Slot, ...]
    frozen: tuple[Slot, ...]
    states: tuple[str, ...]

    @property
    def weights(self) -> tuple[Slot, ...]:
        """The trainable slots; `decayed` first."""
        return self.decayed + self.undecayed

    def to_json(self) -> dict[str, Any]:
        """Names, shapes, strides and offsets, and the optimiser's states, for the checkpoint's header."""
        regions = {"buffers": self.buffers, "weights": self.weights, "frozen": self.frozen}
        slots = {region: [[s.name, list(s.shape), list(s.stride), s.offset] for s in slots] for region, slots in regions.items()}
        return {"dtype": self.dtype, **slots, "states": list(self.states)}


class Arena:
    """Moves a module's parameters and buffers into one allocation on `device`, and owns it.

    Works for any module whose floating-point parameters share one dtype: tied parameters get one slot, frozen ones
    (`requires_grad` false) a slot without gradient and states. The module must already be built with its initial values.
    Without `gathers`, the arena has no region for gradients; with `moves`, as on a CPU, each is moved there as soon as autograd has
    made it. `zeros` makes its memory: a communicator's, so that ranks share it. Frozen tensors that are `moving`, as the network
    itself changes them, are averaged as buffers are. `states`: what an optimiser keeps per weight, in the order of memory.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        states: Sequence[str] = ("momentum",),
        channels_last: bool = False,
        gathers: bool = True,
        moves: bool | None = None,
        zeros: Zeros = own_zeros,
        moving: frozenset[str] = frozenset(),
    ) -> None:
        parameters = dict(module.named_parameters())
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        dtype = _common_dtype(chain(parameters.items(), buffers.items()))
        self.layout = _plan(module, parameters, buffers, dtype, channels_last, moving, states)
        extent = _extent(self.layout.weights, dtype)
        sizes = {
            "gradients": extent if gathers else 0,
            "buffers": _extent(self.layout.buffers, dtype) or _aligned(1, dtype),
            "weights": extent,
            "states": extent * len(states),
            "frozen": _extent(self.layout.frozen, dtype),
        }
        self.memory = zeros(sum(sizes.values()), dtype, device)
        ends = _ends(sizes)
        self.gradients = self.memory[: ends["gradients"]]
        self.buffers = self.memory[ends["gradients"] : ends["buffers"]]
        self.weights = self.memory[ends["buffers"] : ends["weights"]]
        self.all_states = self.memory[ends["weights"] : ends["states"]]
        self.states = {name: self.all_states[k * extent : (k + 1) * extent] for k, name in enumerate(states)}
        self.frozen = self.memory[ends["states"] : ends["frozen"]]
        self.gradients_and_buffers = self.memory[: ends["buffers"]]
        self.model = self.memory[ends["gradients"] : ends["weights"]]
        self.kept = self.memory[ends["gradients"] :]
        self.num_decayed = _extent(self.layout.decayed, dtype)
        self.num_parameters = sum(parameter.numel() for parameter in parameters.values())
        self.gathers, self.moves = gathers, gathers and (device.type == "cpu" if moves is None else moves)
        self.trainable = [parameters[slot.name] for slot in self.layout.weights]
        self._gradient_views = [slot.view(self.gradients) for slot in self.layout.weights] if gathers else []
        self._arrived: set[int] = set()
        self.listeners: list[Callable[[int], None]] = []  # are told of each gradient that has been moved to its slot
        self._adopt(module, parameters, buffers, device)

    def backward(self, loss: torch.Tensor) -> None:
        """Replace the gradients by those of `loss`. A weight that took no part in it gets zero.

        Autograd makes each gradient in memory of its own. To gather them on a CPU, each is moved to its slot at once, while it is
        in the cache: half the traffic of clearing the gradients first and adding to them. A GPU has bandwidth for that, and
        autograd's own adding starts its kernels sooner than calls back into Python would.
        """
        if self.moves:
            self._arrived.clear()
        elif self.gathers:
            self.gradients.zero_()
        else:
            self.drop_gradients()
        loss.backward()
        if self.moves and len(self._arrived) < len(self.trainable):
            for index, view in enumerate(self._gradient_views):
                if index not in self._arrived:
                    view.zero_()

    def weight_views(self) -> list[torch.Tensor]:
        """Each trainable tensor, as a view, in the order of the layout."""
        return [slot.view(self.weights) for slot in self.layout.weights]

    def state_views(self, name: str) -> list[torch.Tensor]:
        """What an optimiser keeps for each trainable tensor under that name, as a view, in the order of the layout."""
        return [slot.view(self.states[name]) for slot in self.layout.weights]

    def model_and(self, num_states: int) -> torch.Tensor:
        """Buffers, weights and the first so many states, as one slice."""
        return self.kept[: self.model.numel() + num_states * self.weights.numel()]

    def gradient_tensors(self) -> list[torch.Tensor]:
        """Each trainable tensor's gradient, wherever it is, in the order of the layout and with the weight's strides."""
        return self._gradient_views if self.gathers else [_gradient(weight) for weight in self.trainable]

    def drop_gradients(self) -> None:
        """Free what autograd made, once it has been used; gathered gradients stay."""
        if not self.gathers:
            for weight in self.trainable:
                weight.grad = None

    def take_back_gradients(self) -> None:
        """Let autograd add to the arena's gradients again, after somebody else has taken each where it was made."""
        for index, weight in enumerate(self.trainable):
            weight.grad = self._gradient_views[index] if self.gathers and not self.moves else None

    def take_back_buffers(self) -> None:
        """Take over the values of buffers that the network has replaced (`self.mean = …`), and make it use the arena's again."""
        for owner, name, held, memory in self._buffers:
            found = owner._buffers[name] if name in owner._buffers else None  # noqa: SIM401 - a scripted module's have no `get`
            if found is None or (found is held and found.data_ptr() == memory.data_ptr()):
                continue
            if (found.shape, found.dtype) == (memory.shape, memory.dtype):  # else it is a cache, or `Held` tells of it
                memory.copy_(found.detach())
                held.data = memory
                owner._buffers[name] = held

    @contextmanager
    def keeping_buffers(self) -> Iterator[None]:
        """Let the network compute without learning: afterwards its buffers are as they were."""
        self.take_back_buffers()
        memory = list({id(held): memory for _, _, held, memory in self._buffers}.values())
        kept = [one.clone() for one in memory]
        try:
            yield
        finally:
            self.take_back_buffers()
            if memory:
                torch._foreach_copy_(memory, kept)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and averaged buffer by the module's own name."""
        regions = (
            (self.layout.weights, self.weights),
            (self.layout.frozen, self.frozen),
            (self.layout.buffers, self.buffers),
        )
        for slots, region in regions:
            for slot in slots:
                yield slot.name, slot.view(region)

    def _receiver(self, index: int) -> Callable[[torch.Tensor], None]:
        view, arrived, listeners = self._gradient_views[index], self._arrived, self.listeners  # not the arena, which holds the hook

        def receive(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # a hook of the network's own has taken it
                return
            if index in arrived:  # a weight that is used in several parts of a backward pass (re-entrant checkpointing)
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
            parameter.grad = None
            arrived.add(index)
            for heard in listeners:
                heard(index)

        return receive

    def _adopt(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        buffers: dict[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Copy each tensor's initial values into its slot and make the module use the slot from now on."""
        for index, (weight, view) in enumerate(zip(self.trainable, self.weight_views(), strict=True)):
            view.copy_(weight.data)
            weight.data = view
            if self.moves:
                weight.register_post_accumulate_grad_hook(self._receiver(index))
        self.take_back_gradients()
        for slots, region in ((self.layout.frozen, self.frozen), (self.layout.buffers, self.buffers)):
            for slot in slots:
                view = slot.view(region)
                if slot.name in buffers:
                    view.copy_(buffers[slot.name])
                    buffers[slot.name].data = view  # wherever the module holds it, as an attribute too
                else:
                    view.copy_(parameters[slot.name].data)
                    parameters[slot.name].data = view
        for buffer in list(module.buffers()):
            if not buffer.is_floating_point():
                own = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)  # not a transposed or expanded view
                buffer.data = own.copy_(buffer)
        self._buffers = [
            (owner, name, buffer, buffer.detach())  # the last stays where it is, whatever `buffer.data` becomes
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    """A weight's gradient, in the weight's order of dimensions; autograd nearly always makes it so, and then nothing is copied."""
    gradient = weight.grad
    if gradient is None:
        return torch.zeros_like(weight)
    strides = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    return gradient if all(a == b for size, a, b in strides if size > 1) else torch.empty_like(weight).copy_(gradient)


def _plan(  # noqa: PLR0917 - as the arena has them
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    dtype: torch.dtype,
    channels_last: bool,
    moving: frozenset[str],
    states: Sequence[str],
) -> Layout:
    norms = tuple(_norm_types())
    norm_parameters = {id(p) for m in module.modules() if isinstance(m, norms) for p in m.parameters(recurse=False)}
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    decayed = {n: p for n, p in trainable.items() if id(p) not in norm_parameters and not _is_bias(n)}
    undecayed = {n: p for n, p in trainable.items() if n not in decayed}
    learning = moving_buffers(module)
    moved = {n: b for n, b in buffers.items() if id(b) in learning or n in moving}
    held = {n: b for n, b in buffers.items() if n not in moved}
    moved |= {n: p for n, p in parameters.items() if n in moving}
    frozen = {n: p for n, p in parameters.items() if n not in trainable and n not in moving}
    first = _slots(decayed, dtype, channels_last, 0)
    still = _slots(frozen, dtype, channels_last, 0)
    return Layout(
        dtype=str(dtype).removeprefix("torch."),
        buffers=_slots(moved, dtype, False, _aligned(1, dtype)),
        decayed=first,
        undecayed=_slots(undecayed, dtype, channels_last, _extent(first, dtype)),
        frozen=(*still, *_slots(held, dtype, False, _extent(still, dtype))),
        states=tuple(states),
    )


def _is_bias(name: str) -> bool:
    """Whether a parameter is a layer's bias by its name, such as an attention's `in_proj_bias`, or what one is computed from."""
    path = name.split(".")
    own = path[path.index("parametrizations") + 1] if "parametrizations" in path[:-1] else path[-1]
    return own.startswith("bias") or own.endswith("bias")


def _slots(tensors: Any, dtype: torch.dtype, channels_last: bool, start: int) -> tuple[Slot, ...]:
    slots, offset = [], start
    for name, tensor in tensors.items():
        slots.append(
            Slot(
                name=name,
                shape=tuple(tensor.shape),
                stride=_dense_stride(tensor, channels_last),
                offset=offset,
                count=tensor.numel(),
            )
        )
        offset += _aligned(tensor.numel(), dtype)
    return tuple(slots)


def _dense_stride(tensor: torch.Tensor, channels_last: bool) -> tuple[int, ...]:
    """Keep a dense tensor's own order of dimensions; a 4-d one becomes channels-last where that is asked for."""
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    usual = [torch.empty(tensor.shape, device="meta").stride()]
    if channels_last and tensor.dim() == 4:
        meta = meta.contiguous(memory_format=torch.channels_last)
        usual.append(torch.empty(tensor.shape, device="meta", memory_format=torch.channels_last).stride())
    if meta.stride() in usual:
        return meta.stride()
    # Not for all: torch loads its symbolic shapes for this, which takes half as long as to load torch itself.
    return torch.empty_like(meta, memory_format=torch.preserve_format).stride()


def _common_dtype(tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.dtype:
    found: dict[torch.dtype, str] = {}
    for name, tensor in tensors:
        found.setdefault(tensor.dtype, name)
    if len(found) > 1:
        names = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in found.items())
        raise ConfigError(f"the network mixes dtypes ({names}); the arena holds one: convert it, for example with module.float()")
    if not found:
        raise ConfigError("the network has no parameters: there is nothing to train")
    return next(iter(found))


def _norm_types() -> Iterator[type[nn.Module]]:
    yield from (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _aligned(count: int, dtype: torch.dtype) -> int:
    unit = ALIGNMENT_BYTES // dtype.itemsize
    return -(-count // unit) * unit


def _extent(slots: tuple[Slot, ...], dtype: torch.dtype) -> int:
    """Where the next slot of the region would start."""
    return slots[-1].offset + _aligned(slots[-1].count, dtype) if slots else 0


def _ends(sizes: dict[str, int]) -> dict[str, int]:
    ends, end = {}, 0
    for name, size in sizes.items():
        end += size
        ends[name] = end
    return ends
