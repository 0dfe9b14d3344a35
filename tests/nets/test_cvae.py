import torch
from torch import Tensor, nn
from torch.nn import functional

from deepex.nets import build


def small() -> nn.Module:
    return build("cvae", channels=1, size=(12, 10), classes=1, filters=4, features=16)


def test_layers_are_the_papers() -> None:
    with torch.device("meta"):
        net = build("cvae", channels=1, size=(28, 28), classes=1)
    encoder = [tuple(module.weight.shape) for module in net.encoder if hasattr(module, "weight")]
    decoder = [tuple(module.weight.shape) for module in net.decoder if hasattr(module, "weight")]
    assert encoder == [(128, 1, 3, 3), (128, 128, 3, 3), (128, 128, 3, 3), (128, 100352)]
    assert decoder == [(128, 3), (100352, 128), (128, 128, 3, 3), (128, 128, 3, 3), (128, 1, 3, 3)]
    kinds = [type(module) for module in net.decoder]
    # Every hidden output is rectified, as its twin in the encoder; the logits are not.
    assert kinds == [
        *(nn.Linear, nn.ReLU, nn.Linear, nn.Unflatten, nn.ReLU),
        *(nn.ConvTranspose2d, nn.ReLU, nn.ConvTranspose2d, nn.ReLU, nn.ConvTranspose2d),
    ]


def test_outputs_have_their_shapes() -> None:
    logits, mean, log_variance = build("cvae", channels=2, size=(12, 7), classes=9, filters=4, latent=5)(torch.rand(3, 2, 12, 7))
    assert logits.shape == (3, 2, 12, 7)
    assert mean.shape == log_variance.shape == (3, 5)


def test_evaluation_decodes_the_mean() -> None:
    net, x = small().eval(), torch.rand(2, 1, 12, 10)
    logits, mean, log_variance = net(x)
    assert torch.equal(logits, net(x)[0])
    assert torch.equal(logits, net.decode(mean))
    for got, expected in zip(net.encode(x), (mean, log_variance), strict=True):
        assert torch.equal(got, expected)


def test_training_draws_around_the_mean() -> None:
    """With a decoder that shows its input, the drawn points have the mean and the variance that the encoder gives."""
    net = small().train()
    net.decoder = nn.Identity()
    x = torch.rand(1, 1, 12, 10).expand(20_000, -1, -1, -1)
    with torch.no_grad():
        net.log_variance.bias.copy_(torch.tensor([-2.0, 0.0, 1.0]))
        z, mean, log_variance = net(x)
    # 20,000 draws: five standard errors are 3.5 % of σ for the mean and 5 % for the variance.
    deviation = log_variance[0].exp().sqrt()
    assert ((z.mean(0) - mean[0]).abs() < 0.036 * deviation).all()
    torch.testing.assert_close(z.var(0), log_variance[0].exp(), rtol=0.05, atol=0)


def test_the_seed_decides_the_draw() -> None:
    net, x = small().train(), torch.rand(2, 1, 12, 10)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        logits: Tensor = net(x)[0]
        return logits

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_it_learns_to_reconstruct() -> None:
    net, x = small(), (torch.rand(8, 1, 12, 10) > 0.5).float()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(150):
        logits, mean, log_variance = net(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        reconstruction = functional.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        losses.append(reconstruction.item())
        optimiser.zero_grad()
        (reconstruction + 0.01 * divergence).backward()
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]
