"""What the table of the heaviest kernels counts; its times need a GPU."""

import itertools

import pytest
import torch

import gpu_kernels
from deepex.step.captured.linear_ops import ConvolutionShape, Lane, convolve


def test_bytes_and_flops_of_a_convolution_and_its_gradients() -> None:
    ticks = itertools.count()
    ledger = gpu_kernels.Ledger(lambda: next(ticks))
    x, weight = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((2, 8, 6, 5), (16, 8, 3, 3)))
    bias = torch.randn(16)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    with ledger, ledger.launches():
        y = convolve(x, weight, bias, ConvolutionShape(stride=(1, 1), padding=(1, 1)), relu=True, lane=Lane(torch.device("cpu")))
        y.backward(torch.ones_like(y))
    product = 2 * y.numel() * 8 * 9
    rows = {(row["name"], row["calls"]): row for row in gpu_kernels.table(ledger.entries, lambda e: e.end - e.begin, 1.0, 1e30)}
    forward, masks, back = (rows[key] for key in (("convolution", 1), ("bias_kernel", 1), ("convolution_backward", 1)))
    assert (forward["flops"], forward["bytes"]) == (product, x.nbytes + weight.nbytes + bias.nbytes + y.nbytes)
    assert masks["bytes"] >= 3 * y.nbytes, "gradient, activation, and gradient behind it"
    assert masks["flops"] == 0
    backwards = [entry for entry in ledger.entries if entry.name == "convolution_backward"]
    assert [entry.flops for entry in backwards] == [product] * 2
    assert [entry.bytes for entry in backwards] == [y.nbytes + x.nbytes + weight.nbytes] * 2, "images for one, weight for the other"
    assert back["least_seconds"] == pytest.approx(back["bytes"])
    assert not {"view", "empty", "empty_like", "detach"} & {entry.name for entry in ledger.entries}


def test_an_update_changes_what_it_reads() -> None:
    weights, momenta, shadow = torch.zeros(100), torch.zeros(100), torch.zeros(100, dtype=torch.bfloat16)
    table, rates = torch.zeros(4), torch.zeros(1)
    assert gpu_kernels._launch_bytes("update_kernel", [table, weights, momenta, shadow, rates]) == 100 * (8 + 8 + 2 + 2)
    assert gpu_kernels._launch_bytes("update_kernel", [table, weights, momenta, weights, rates]) == 100 * (8 + 8 + 4)


def test_a_batch_is_read_not_the_dataset() -> None:
    samples, batch = torch.zeros(1000, 3, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.bfloat16)
    assert gpu_kernels._launch_bytes("take_kernel", [samples, batch]) == 4 * 3 * (1 + 2)
