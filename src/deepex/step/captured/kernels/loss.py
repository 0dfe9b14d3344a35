"""Losses with their gradient and their measure, in one pass over the logits.

    loss, squares = reconstruction_loss(logits, images)   # binary cross entropy; mean square errors, summed over samples
    loss, wrong = cross_entropy(logits, labels)           # of classes; number of samples whose largest logit is another's

    loss.backward(unit(loss.device))                      # a gradient of 1 that is known to be one

What the tasks define, to the letter. The gradient of the logits is written while they are at hand and multiplied by the
loss's own gradient in the backward pass, unless that is known to be 1: nothing waits for anything. Every program writes its sums,
and a small kernel behind it adds them up in a fixed order.
"""

import functools
from typing import Any, Final, cast

import torch
import triton
import triton.language as tl

from deepex.step.captured.kernels.division import as_rows
from deepex.task.classify import Classify
from deepex.task.reconstruct import Reconstruct, divergence
from deepex.task.task import Task

MAX_CLASSES: Final = 32_768  # a row of logits is held in the registers of one program


@triton.jit
def reconstruction_kernel(
    logits,
    images,
    gradient,
    partial,
    count,
    num_parts,
    loss_scale,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    logit = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    image = tl.load(images + at, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(logit))
    one = 1.0 + small
    # log1p: what 1 + small has lost in rounding is put back by the quotient
    log1p = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))
    error = tl.where(logit >= 0.0, 1.0, small) / one - image
    entropy = tl.maximum(logit, 0.0) - logit * image + log1p
    if WRITES:
        tl.store(gradient + at, (error * loss_scale).to(gradient.dtype.element_ty), mask=inside)
    tl.store(partial + part, tl.sum(tl.where(inside, entropy, 0.0), 0))
    tl.store(partial + num_parts + part, tl.sum(tl.where(inside, error * error, 0.0), 0))


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    gradient,
    partial,
    num_rows,
    num_parts,
    loss_scale,
    NUM_CLASSES: tl.constexpr,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    CLASSES: tl.constexpr,
):
    part = tl.program_id(0)
    row = part * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CLASSES)
    here = row < num_rows
    inside = here[:, None] & (column < NUM_CLASSES)[None, :]
    at = row.to(tl.int64)[:, None] * NUM_CLASSES + column[None, :]
    label = tl.load(labels + row, mask=here, other=0)
    logit = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    logit = tl.where((column < NUM_CLASSES)[None, :], logit, float("-inf"))
    top = tl.max(logit, 1)
    best = tl.min(tl.where(logit == top[:, None], column[None, :], CLASSES), 1)  # the first of equal ones
    apart = logit - top[:, None]
    exponential = tl.exp(apart)
    total = tl.sum(exponential, 1)
    chosen = column[None, :] == label[:, None]
    entropy = tl.log(total) - tl.sum(tl.where(chosen, apart, 0.0), 1)
    wrong = here & (best != label)
    if WRITES:
        d = (exponential / total[:, None] - tl.where(chosen, 1.0, 0.0)) * loss_scale
        tl.store(gradient + at, d.to(gradient.dtype.element_ty), mask=inside)
    tl.store(partial + part, tl.sum(tl.where(here, entropy, 0.0), 0))
    tl.store(partial + num_parts + part, tl.sum(wrong.to(tl.float32), 0))  # whole numbers below 2²⁴ are exact


@triton.jit
def add_up_kernel(partial, loss_out, sum_out, num_parts, loss_scale, sum_scale, PARTS: tl.constexpr):
    """In float64, which counts mistakes exactly."""
    losses = tl.zeros((PARTS,), tl.float64)
    sums = tl.zeros((PARTS,), tl.float64)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)
        there = part < num_parts
        losses += tl.load(partial + part, mask=there, other=0.0).to(tl.float64)
        sums += tl.load(partial + num_parts + part, mask=there, other=0.0).to(tl.float64)
    tl.store(loss_out, (tl.sum(losses, 0) * loss_scale).to(loss_out.dtype.element_ty))
    tl.store(sum_out, (tl.sum(sums, 0) * sum_scale).to(sum_out.dtype.element_ty))


@functools.cache
def unit(device: torch.device) -> torch.Tensor:
    """The gradient of a loss that nothing follows. The losses here know it, and do not multiply by it."""
    return torch.ones((), device=device)


class _Loss(torch.autograd.Function):
    """(loss, sum of the measure) of a launcher, whose third value is the gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, launch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert not ctx.needs_input_grad[1], "the targets of a loss have no gradient"
        loss, summed, gradient = launch(logits, target, writes=ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(summed)
        return loss, summed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        known = grads[0].data_ptr() == unit(gradient.device).data_ptr()
        return gradient if known else gradient * grads[0], None, None


def reconstruction_loss(logits: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Binary cross entropy summed over pixels, mean over samples; Σ over samples of the mean square error of sigmoid(logits)."""
    return cast("tuple[torch.Tensor, torch.Tensor]", _Loss.apply(logits, images, reconstruct))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of logits (n, classes) and int64 labels; how many labels are not those of the (first) largest logit."""
    return cast("tuple[torch.Tensor, torch.Tensor]", _Loss.apply(logits, labels, classify))


def loss_and_sums(task: Task, output: Any, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A task's loss and the sums of its measures, in one pass where there is a kernel for it."""
    if isinstance(task, Classify) and output.dim() == 2 and output.shape[1] <= MAX_CLASSES:
        loss, wrong = cross_entropy(output, labels)
        return loss, [wrong]
    logits, *latent = output if isinstance(output, tuple) else (output,)
    if isinstance(task, Reconstruct) and logits.shape == images.shape:
        loss, squares = reconstruction_loss(logits, images)
        return loss + divergence(*latent) / len(images) if latent else loss, [squares]
    return task.loss(output, images, labels), task.measure_sums(output, images, labels)


def reconstruct(
    logits: torch.Tensor, images: torch.Tensor, *, writes: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(loss, sum of the measure, gradient of the logits if `writes`)."""
    if logits.shape != images.shape:
        raise ValueError(f"the logits have shape {tuple(logits.shape)}, the images {tuple(images.shape)}: they have to be the same")
    logits, images = as_rows(logits), as_rows(images)
    gradient = torch.empty_like(logits) if writes else None
    count, samples = logits.numel(), len(logits)
    # 8 elements (16 bytes of bf16) for each of 128 threads: a batch of 1,024 small images is 784 programs, 6 to a multiprocessor
    block = 1024
    parts = triton.cdiv(count, block)
    partial = torch.empty(2 * parts, device=logits.device)
    reconstruction_kernel[(parts,)](
        *(logits, images, logits if gradient is None else gradient, partial, count, parts, 1.0 / samples, writes, block),
        num_warps=4,
    )
    return *_add_up(partial, torch.float32, 1.0 / samples, samples / count), gradient


def classify(logits: torch.Tensor, labels: torch.Tensor, *, writes: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(loss, sum of the measure, gradient of the logits if `writes`)."""
    samples, classes = logits.shape
    if classes > MAX_CLASSES:
        raise ValueError(f"{classes} classes: the kernel takes up to {MAX_CLASSES}; use torch.nn.functional.cross_entropy")
    logits = logits.contiguous()
    gradient = torch.empty_like(logits) if writes else None
    # 2,048 logits in 4 warps are 16 for each thread; 32,768 in 16 warps are 64: both stay in registers. Rows of few classes share a
    # program, but not more than 32, lest a small batch be a single program.
    block = triton.next_power_of_2(classes)
    rows = min(max(2048 // block, 1), 32)
    parts = triton.cdiv(samples, rows)
    partial = torch.empty(2 * parts, device=logits.device)
    cross_entropy_kernel[(parts,)](
        *(logits, labels.contiguous(), logits if gradient is None else gradient, partial, samples, parts, 1.0 / samples),
        *(classes, writes, rows, block),
        num_warps=min(max(block // 512, 4), 16),
    )
    return *_add_up(partial, torch.int64, 1.0 / samples, 1.0), gradient


def _add_up(partial: torch.Tensor, kind: torch.dtype, loss_scale: float, sum_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and sum of the measure, the latter as `kind`, from what the programs found."""
    parts = partial.numel() // 2
    loss, summed = (torch.empty((), dtype=dtype, device=partial.device) for dtype in (torch.float32, kind))
    at_once = min(triton.next_power_of_2(parts), 1024)
    add_up_kernel[(1,)](partial, loss, summed, parts, loss_scale, sum_scale, at_once, num_warps=4)
    return loss, summed
