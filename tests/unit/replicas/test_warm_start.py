import pytest
import torch
from torch import nn

import hdet


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 400))


def noise_of(replica: int, **settings: object) -> list[torch.Tensor]:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    hdet.warm_start(net, replica=replica, **settings)  # pyright: ignore[reportArgumentType]
    return [p.detach() - b for p, b in zip(net.parameters(), before, strict=True)]


def test_the_per_tensor_form_scales_each_tensor_by_itself() -> None:
    for noise, parameter in zip(noise_of(0, noise_scale=0.1), model().parameters(), strict=True):
        expected = 0.1 * parameter.norm() / parameter.numel() ** 0.5
        assert noise.std().item() == pytest.approx(expected.item(), rel=0.15)


def test_the_global_form_scales_all_alike() -> None:
    net = model()
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    expected = 0.1 * flat.norm() / flat.numel() ** 0.5
    for noise in noise_of(0, noise_scale=0.1, norm="global"):
        assert noise.std().item() == pytest.approx(expected.item(), rel=0.15)


def test_draws_differ_by_replica_and_seed_and_repeat() -> None:
    first = noise_of(0)
    for a, b in zip(first, noise_of(0), strict=True):
        assert torch.equal(a, b)
    for other in (noise_of(1), noise_of(0, seed=1)):
        for a, b in zip(first, other, strict=True):
            assert abs(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1]) < 0.25


def test_the_global_generator_is_untouched_and_frozen_parameters_stay() -> None:
    net = model()
    frozen = next(net.parameters()).requires_grad_(False)
    before, state = frozen.clone(), torch.get_rng_state()
    hdet.warm_start(net)
    assert torch.equal(frozen, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_half_precision_norms_do_not_overflow() -> None:
    net = nn.Linear(100, 100, bias=False).to(torch.float16)
    with torch.no_grad():
        net.weight.fill_(1000.0)  # squares overflow in float16
    hdet.warm_start(net, noise_scale=0.01)
    assert torch.isfinite(net.weight).all()
    assert net.weight.float().std().item() == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"noise_scale": -0.1}, ValueError, "noise_scale must be a number of at least 0, got -0.1"),
        ({"noise_scale": float("nan")}, ValueError, "noise_scale"),
        ({"replica": -1}, ValueError, "replica must be an integer of at least 0, got -1"),
        ({"seed": 0.5}, TypeError, "seed must be an integer"),
        ({"norm": "layer"}, ValueError, "norm must be one of 'tensor', 'global', got 'layer'"),
    ],
)
def test_bad_input(settings: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        hdet.warm_start(model(), **settings)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        hdet.warm_start([])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="unfreeze some first"):
        hdet.warm_start(model().requires_grad_(False))
