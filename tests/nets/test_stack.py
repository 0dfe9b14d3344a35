import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepex.errors import ConfigError
from deepex.nets.autoencoder import autoencoder
from deepex.nets.stack import Convolution, Dense, Flatten, Layer, Pooling, Shape, shapes
from tests.full import examples


@st.composite
def stacks(draw: st.DrawFn) -> tuple[list[Layer], Shape]:
    """A random shape and a random stack that it survives, its maps ending in any size, odd ones and 1×1 included."""
    shape: Shape = (draw(st.integers(1, 3)), draw(st.integers(1, 19)), draw(st.integers(1, 19)))
    stack: list[Layer] = []
    current = shape
    for _ in range(draw(st.integers(0, 4))):
        least = min(current[1:])
        if draw(st.booleans()):
            padding = draw(st.integers(0, 3))
            kernel = draw(st.integers(1, min(5, least + 2 * padding)))
            activation = draw(st.sampled_from([None, nn.ReLU, nn.Tanh]))
            stack.append(Convolution(draw(st.integers(1, 4)), kernel, draw(st.integers(1, 4)), padding, activation))
        else:
            stack.append(Pooling(draw(st.integers(1, min(3, least)))))
        current = stack[-1].output(current)
    if draw(st.booleans()):
        stack += [Flatten(), *(Dense(features) for features in draw(st.lists(st.integers(1, 9), max_size=2)))]
    return stack, shape


@settings(max_examples=examples(37, 150), deadline=None)
@given(case=stacks(), latent=st.integers(1, 4))
def test_the_decoder_gives_exactly_the_shape_of_the_input(case: tuple[list[Layer], Shape], latent: int) -> None:
    stack, shape = case
    logits, mean, log_variance = autoencoder(stack, shape, latent)(torch.rand(2, *shape))
    assert logits.shape == (2, *shape)
    assert mean.shape == log_variance.shape == (2, latent)


@settings(max_examples=examples(37, 150), deadline=None)
@given(case=stacks())
def test_each_layer_keeps_its_word_about_shapes(case: tuple[list[Layer], Shape]) -> None:
    stack, shape = case
    along = shapes(stack, shape)
    for layer, before, after in zip(stack, along, along[1:], strict=False):
        assert layer.forward(before)(torch.rand(2, *before)).shape == (2, *after)
        assert layer.reverse(before)(torch.rand(2, *after)).shape == (2, *before)


@settings(max_examples=examples(15, 60), deadline=None)
@given(case=stacks())
def test_the_reverse_of_a_convolution_is_its_adjoint_when_they_share_weights(case: tuple[list[Layer], Shape]) -> None:
    """⟨conv(x), y⟩ = ⟨x, reverse(y)⟩: the reverse has the geometry of the forward layer, not only its shape."""
    stack, shape = case
    for layer, before, after in zip(stack, shapes(stack, shape), shapes(stack, shape)[1:], strict=False):
        if not isinstance(layer, Convolution):
            continue
        forward, reverse = layer.forward(before).double(), layer.reverse(before).double()
        x, y = torch.randn(1, *before, dtype=torch.float64), torch.randn(1, *after, dtype=torch.float64)
        with torch.no_grad():
            reverse.weight.copy_(forward.weight)
            forward.bias.zero_()
            reverse.bias.zero_()
            torch.testing.assert_close((forward(x) * y).sum(), (x * reverse(y)).sum())


def test_unpooling_repeats_each_value_over_its_tile() -> None:
    up = Pooling(2).reverse((1, 4, 4))(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]))
    assert up[0, 0].tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]


def test_the_reverse_has_weights_of_its_own() -> None:
    layer = Convolution(4)
    forward, reverse = layer.forward((2, 9, 9)), layer.reverse((2, 9, 9))
    assert forward.weight.data_ptr() != reverse.weight.data_ptr()


@pytest.mark.parametrize(
    ("stack", "shape", "message"),
    [
        ([Convolution(4, kernel=5)], (1, 4, 9), "kernel=5.* map of 4×9, .*it needs at least 5×5: use larger images"),
        ([Convolution(4, kernel=5, padding=1)], (1, 2, 9), "it needs at least 3×3"),
        ([Pooling(2), Pooling(2), Pooling(2)], (1, 7, 7), r"Pooling\(kernel=2\) got a map of 1×1"),
        ([Dense(4)], (1, 7, 7), r"Dense\(features=4.* put Flatten\(\) before it"),
        ([Flatten(), Convolution(4)], (1, 7, 7), r"Convolution.* shape \(49,\); it takes \(channels, height, width\)"),
        ([Flatten(), Pooling()], (1, 7, 7), r"Pooling.* shape \(49,\)"),
        ([], (1, 0, 7), r"shape \(1, 0, 7\); every extent must be at least 1"),
    ],
)
def test_a_stack_that_cannot_be_is_a_config_error(stack: list[Layer], shape: Shape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        autoencoder(stack, shape, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Convolution(0), "Convolution got out_channels = 0"),
        (lambda: Convolution(1, kernel=0), "Convolution got kernel = 0"),
        (lambda: Convolution(1, stride=0), "Convolution got stride = 0"),
        (lambda: Convolution(1, padding=-1), "Convolution got padding = -1"),
        (lambda: Pooling(0), "Pooling got kernel = 0"),
        (lambda: Dense(0), "Dense got features = 0"),
        (lambda: autoencoder([Flatten()], (1, 2, 2), 0), "autoencoder got latent = 0"),
    ],
)
def test_nonsense_settings_are_config_errors(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
