"""AutoLR that explores weight decay equals the reference, and derived replicas equal trained ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hdet
from hdet.method import reference
from hdet.method.recipe import Recipe
from hdet.method.watches import HeldOutDecayWatch
from hdet.replicas.tensors import parameters_of
from tests.helpers.models import predict
from tests.helpers.replicas import run_replicas

TOTAL, PEAK, DECAY, SEEN = 200, 0.03, 0.4, 24


def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, 0.5 * x[:, :2] + torch.randn(count, 2, generator=generator, dtype=torch.float64)


def training_batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = examples(SEEN, 1)
    chosen = torch.arange(8 * step, 8 * step + 8) % SEEN
    return x[chosen], y[chosen]


HELD_OUT = tuple(zip(*(part.split(24) for part in examples(192, 2)), strict=True))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class WideNet(nn.Module):
    """Wide enough to fit the noise of a few examples."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((32, 3), (32,), (2, 32), (2,))
        self.w1, self.b1, self.w2, self.b2 = (
            nn.Parameter(0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64))
            for shape in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        return predict(x, self.w1, self.b1, self.w2, self.b2)


def groups_of(net: WideNet, decay: float = DECAY) -> list[dict]:
    return [
        {"params": [net.w1, net.w2], "weight_decay": decay},
        {"params": [net.b1, net.b2], "weight_decay": 0.0},
    ]


def trained(rank: int = 0, world_size: int = 1, stop_at: int | None = None):
    net = WideNet()
    optimizer = torch.optim.AdamW(groups_of(net), lr=PEAK)
    records = hdet.Records()
    probe = hdet.Probe(HELD_OUT[rank::world_size], loss_of)
    auto = hdet.AutoLR(
        optimizer,
        total_steps=TOTAL,
        model=net,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=probe,
        sync_every=5,
        records=records,
    )
    for step in range(stop_at or TOTAL):
        loss = loss_of(net, training_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    looks = [
        (r.step, seen.slope, r.base["weight_decay"])
        for r in records
        if (seen := r.controllers.get("weight_decay"))
    ]
    return [p.detach().clone() for p in net.parameters()], looks, (net, optimizer, auto)


def referred() -> tuple[reference.Trace, dict[int, float]]:
    recipe, start = Recipe(total_steps=TOTAL), [p.detach() for p in WideNet().parameters()]

    def gradient(parameters: list[Tensor], _: int, step: int) -> tuple[float, list[Tensor]]:
        leaves = [p.clone().requires_grad_() for p in parameters]
        x, y = training_batch(step - 1)
        loss = (predict(x, *leaves) - y).square().mean()
        return loss.item(), list(torch.autograd.grad(loss, leaves))

    def probe(parameters: list[Tensor]) -> list[float]:
        return [(predict(x, *parameters) - y).square().mean().item() for x, y in HELD_OUT]

    watch = HeldOutDecayWatch(
        TOTAL, start=[DECAY, 0.0, DECAY, 0.0], peaks=[PEAK] * 4, sizes=[p.numel() for p in start], probe=probe
    )
    trace = reference.train(
        start,
        gradient=gradient,
        optimizer=reference.adam(),
        schedule=lambda t: [PEAK * recipe.shape(min(t, TOTAL))] * 4,
        num_replicas=1,
        spread=0.0,
        sync_every=5,
        total_steps=TOTAL,
        names=["w1", "b1", "w2", "b2"],
        average_tail=recipe.average_tail,
        watches=[watch],
    )
    return trace, {step: decays[0] for step, decays in watch.decays_after.items()}


@pytest.mark.filterwarnings("ignore:the probe has")
def test_one_device_equals_the_reference():
    parameters, looks, _ = trained()
    trace, decays = referred()
    for mine, expected in zip(parameters, trace.parameters[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)
    assert [base for _, _, base in looks] == pytest.approx([decays[step] for step, _, _ in looks], rel=1e-9)
    assert [step for step, _, _ in looks] == list(range(40, 181, 10))
    assert looks[-1][2] > 1.5 * DECAY  # it fits noise, so there is something to find


def _rank(rank: int) -> tuple[list[Tensor], list[tuple[int, float, float]]]:
    return trained(rank, 2)[:2]


@pytest.mark.filterwarnings("ignore:the probe has")
def test_two_ranks_with_halves_of_the_probe_move_as_one_with_all_of_it():
    (mine, looks, *_), (theirs, _, *_) = run_replicas(_rank, 2)
    alone, looks_alone, _ = trained()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert [slope for _, slope, _ in looks[:1]] == pytest.approx([s for _, s, _ in looks_alone[:1]], rel=1e-9)
    # The scatter of four parts on each of two ranks is not that of eight parts, so moves differ a little.
    assert looks[-1][2] == pytest.approx(looks_alone[-1][2], rel=0.3)
    assert looks[-1][2] > 1.5 * DECAY
    for a, b in zip(mine, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.05)


@pytest.mark.filterwarnings("ignore:the probe has")
@pytest.mark.parametrize("stop_at", [100, 103])
def test_a_resumed_run_ends_in_the_same_bits(stop_at: int):
    expected, looks, _ = trained()
    _, _, (net, optimizer, auto) = trained(stop_at=stop_at)
    auto.converge()
    saved = [part.state_dict() for part in (net, optimizer, auto)]
    _, _, again = trained(stop_at=1)
    again[2].check_state_dict(saved[2])
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    net, optimizer, auto = again
    assert auto.base["weight_decay"] == looks[6][2] if stop_at == 100 else True
    for step in range(stop_at, TOTAL):
        loss = loss_of(net, training_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), expected, strict=True))


def replicas_and_scaled(num_steps: int, spread: float) -> tuple[float, float]:
    """How far a trained replica with more decay is from the others, and from the scaled weights."""
    net = WideNet()
    lr = 0.002
    optimizer = torch.optim.AdamW(groups_of(net, decay=2.0), lr=lr)
    ensemble = hdet.VirtualEnsemble(
        net,
        optimizer,
        loss_of,
        num_replicas=3,
        explore=[hdet.LearningRate(0.0), hdet.WeightDecay(spread=spread, per_group=False)],
        sync_every=1000,
    )
    for step in range(num_steps):
        ensemble.step(training_batch(step))
    rows, multipliers = ensemble.replicas.rows.matrices, ensemble.replicas._multipliers["weight_decay"]
    middle = min(range(3), key=lambda r: abs(multipliers[r] - 1))
    highest = max(range(3), key=multipliers.__getitem__)
    theta, other = rows[0][middle], rows[0][highest]
    derived = theta * (1 - (multipliers[highest] - 1) * lr * 2.0 * num_steps)
    return (other - theta).norm().item(), (other - derived).norm().item()


def test_a_replica_with_more_decay_is_the_model_with_smaller_weights():
    apart, error = replicas_and_scaled(num_steps=8, spread=0.5)
    assert error < 0.1 * apart
    # What is left falls with the square of the length of a round.
    _, of_half = replicas_and_scaled(num_steps=4, spread=0.5)
    assert of_half == pytest.approx(error / 4, rel=0.35)


@pytest.mark.filterwarnings("ignore:the probe has")
def test_a_look_leaves_weights_moments_statistics_and_random_numbers_as_they_were():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    calls = []

    def held_out_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append([p.detach().clone() for p in model.parameters()])
        return loss_of(model, batch)

    auto = hdet.AutoLR(
        optimizer,
        total_steps=40,
        model=net,
        sync_every=2,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=hdet.Probe(HELD_OUT, held_out_loss),
    )
    assert len(calls) == 1  # the first part, to see that it can be scored
    calls.clear()
    for step in range(7):
        optimizer.zero_grad()
        loss = loss_of(net, training_batch(step))
        loss.backward()
        optimizer.step()
        auto.step(loss)
    optimizer.zero_grad()
    loss = loss_of(net, training_batch(7))
    loss.backward()
    optimizer.step()
    before = [t.clone() for t in (*net.state_dict().values(), torch.get_rng_state())]
    assert not calls
    auto.step(loss)  # the eighth: a fifth of the run
    after = [*net.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert net.training and net[1].running_mean is not None
    assert len(calls) == 2 * len(HELD_OUT)
    weights = parameters_of(optimizer)
    for scale, seen in ((0.95, calls[0]), (1.05, calls[-1])):
        for weight, shown in zip(weights, seen, strict=True):
            assert torch.equal(shown, weight.detach() * scale)


@pytest.mark.filterwarnings("ignore:the probe has")
def test_batch_norm_hides_the_scale_of_what_stands_before_it():
    net = nn.Sequential(
        nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8, eps=1e-20), nn.Tanh(), nn.Linear(8, 2)
    ).double()
    optimizer = torch.optim.AdamW(
        [
            {"params": [net[0].weight], "weight_decay": 0.1},
            {"params": net[1:].parameters(), "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    records = hdet.Records()
    auto = hdet.AutoLR(
        optimizer,
        total_steps=40,
        model=net,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=hdet.Probe(HELD_OUT, loss_of),
        records=records,
    )
    for step in range(40):
        optimizer.zero_grad()
        loss = loss_of(net, training_batch(step))
        loss.backward()
        optimizer.step()
        auto.step(loss)
    slopes = [abs(seen.slope) for r in records if (seen := r.controllers.get("weight_decay"))]
    assert slopes and max(slopes) < 1e-9


def _sharded(rank: int, layout: str) -> list[tuple[int, float, float]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    replicas = None
    if layout != "alone":
        sizes, names = ((2, 2), ("replicate", "shard")) if layout == "hsdp" else ((4,), ("shard",))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        fully_shard(net, mesh=mesh)
        replicas = mesh["replicate"] if layout == "hsdp" else None
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK, weight_decay=DECAY)
    records = hdet.Records()
    auto = hdet.AutoLR(
        optimizer,
        total_steps=80,
        model=net,
        controllers=[hdet.HeldOutWeightDecay()],
        probe=hdet.Probe(HELD_OUT, loss_of),
        sync_every=4,
        records=records,
        replicas=replicas,
    )
    for step in range(80):
        loss = loss_of(net, training_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
    return [
        (r.step, seen.slope, r.base["weight_decay"])
        for r in records
        if (seen := r.controllers.get("weight_decay"))
    ]


@pytest.mark.filterwarnings("ignore:the probe has")
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_a_sharded_model_moves_as_a_whole_one(layout: str):
    alone = _sharded(0, "alone")
    looks = run_replicas(_sharded, 4, layout)[0]
    assert len(alone) == 15
    for mine, expected in zip(looks, alone, strict=True):
        assert mine == pytest.approx(expected, rel=1e-7)
    assert alone[-1][2] > 1.1 * DECAY
