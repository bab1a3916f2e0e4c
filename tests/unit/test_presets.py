"""Each preset, step by step, against its published rule written out with plain models and optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hdet
from hdet import presets
from tests.helpers.models import Net, batch, make_optimizer

N, T, STEPS = 4, 3, 12


def loss_of(model, data):
    x, y = data
    return (model(x) - y).square().mean()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def write(model, values):
    nn.utils.vector_to_parameters(values.clone(), model.parameters())  # it hands out views


class Members:
    """N models that train alone, each with torch's own optimizer on its own batches."""

    def __init__(self, kind):
        self.models = [Net() for _ in range(N)]
        self.optimizers = [make_optimizer(kind, [{"params": list(m.parameters())}]) for m in self.models]
        self.sums = [0.0] * N

    def step(self, step, shares=False):
        for r, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            loss = loss_of(model, batch(r, step))
            optimizer.zero_grad()
            loss.backward()
            self.sums[r] += loss.item()
        if shares:
            for together in zip(*(model.parameters() for model in self.models), strict=True):
                mean = sum(p.grad for p in together) / N
                for p in together:
                    p.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def norms(self):
        return [torch.cat([p.grad.reshape(-1) for p in m.parameters()]).norm().item() for m in self.models]

    def flats(self):
        return [flat(model) for model in self.models]

    def write(self, values):
        for model, value in zip(self.models, values, strict=True):
            write(model, value)


def assert_follows(settings, kind, rule, *, shared_until=0, total_steps=STEPS, lrs=None):
    """Train both, and compare every replica after every step."""
    model, members = Net(), Members(kind)
    optimizer = make_optimizer(kind, [{"params": list(model.parameters())}])
    ensemble = hdet.VirtualEnsemble(
        model, optimizer, loss_of, num_replicas=N, total_steps=total_steps, **settings
    )
    for step in range(1, STEPS + 1):
        if lrs is not None:
            lrs(ensemble, members)
        ensemble.step(batches=[batch(r, step) for r in range(N)])
        members.step(step, shares=step <= shared_until)
        if step % T == 0:
            rule(members, step)
        for row, mine in zip(ensemble.replicas.rows.matrices[0], members.flats(), strict=True):
            torch.testing.assert_close(row, mine, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(model), members.flats()[0], rtol=1e-10, atol=1e-12)


def averages_moments(members):
    """Momentum buffers and Adam's moments too."""
    states = [list(optimizer.state.values()) for optimizer in members.optimizers]
    for together in zip(*states, strict=True):
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if name in together[0] and together[0][name] is not None:
                mean = sum(state[name] for state in together) / N
                for state in together:
                    state[name] = mean.clone()


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_local_sgd(kind):
    def rule(members, step):
        mean = sum(members.flats()) / N
        members.write([mean] * N)
        averages_moments(members)

    assert_follows(presets.local_sgd(sync_every=T), kind, rule)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_diloco(kind):
    outer = nn.Parameter(flat(Net()))
    outer_optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)

    def rule(members, step):
        outer.grad = outer.detach() - sum(members.flats()) / N
        outer_optimizer.step()
        members.write([outer.detach()] * N)  # each keeps the state of its AdamW

    assert_follows(presets.diloco(sync_every=T), kind, rule)


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_easgd(kind):
    center = [flat(Net())]
    beta = 0.9
    alpha = beta / N

    def rule(members, step):
        before = members.flats()
        members.write([x - alpha * (x - center[0]) for x in before])
        center[0] = (1 - beta) * center[0] + beta * sum(before) / N
        if step == STEPS:  # the center is what was trained
            members.write([center[0]] * N)

    assert_follows(presets.easgd(sync_every=T), kind, rule)


def test_grawa():
    def rule(members, step):
        inverse = [1 / norm for norm in members.norms()]
        center = sum(w * x for w, x in zip(inverse, members.flats(), strict=True)) / sum(inverse)
        pull = 1.0 if step == STEPS else 0.5
        members.write([(1 - pull) * x + pull * center for x in members.flats()])

    assert_follows(presets.grawa(sync_every=T), "momentum", rule)


def test_swap():
    def rule(members, step):
        if step == STEPS:
            members.write([sum(members.flats()) / N] * N)

    assert_follows(presets.swap(start=0.5, sync_every=T), "momentum", rule, shared_until=STEPS // 2)


def test_pbt():
    base = [0.1]

    def lrs(ensemble, members):
        # What each replica is to use: the base times a factor between 0.8 and 1.2, drawn anew in each round.
        factors = ensemble.engine._parts.reassign.positions((ensemble.engine.num_steps) // T)["lr"]
        assert sorted(1 + 0.2 * x for x in factors) == pytest.approx([0.8, 1 - 0.2 / 3, 1 + 0.2 / 3, 1.2])
        for optimizer, x in zip(members.optimizers, factors, strict=True):
            optimizer.param_groups[0]["lr"] = base[0] * (1 + 0.2 * x)

    def rule(members, step):
        best = min(range(N), key=lambda r: members.sums[r])
        # Exploit: weights, the optimizer's state and the learning rate of the best.
        members.write([members.flats()[best]] * N)
        state = members.optimizers[best].state_dict()
        base[0] = members.optimizers[best].param_groups[0]["lr"]
        for optimizer in members.optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))
        members.sums = [0.0] * N

    assert_follows(presets.pbt(sync_every=T), "momentum", rule, lrs=lrs)
    assert base[0] != 0.1


def test_a_weighted_mean_follows_the_losses():
    def rule(members, step):
        losses = [total / T for total in members.sums]
        mean = sum(losses) / N
        temperature = (sum((loss - mean) ** 2 for loss in losses) / N) ** 0.5
        weights = torch.softmax(
            torch.tensor([-loss / temperature for loss in losses], dtype=torch.float64), 0
        )
        members.write([sum(w * x for w, x in zip(weights, members.flats(), strict=True))] * N)
        members.sums = [0.0] * N

    settings = presets.local_sgd(sync_every=T) | {"merge": hdet.LossWeightedMerge(), "moments": "keep"}
    assert_follows(settings, "sgd", rule)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"merge": hdet.OuterMerge()}, ValueError, "gradients must be 'local' for OuterMerge, got 'shared'"),
        ({"merge": "best", "gradients": "local"}, TypeError, "merge must be a merge rule such as"),
        (presets.easgd() | {"moments": "average"}, ValueError, "moments must be 'auto' or 'keep'"),
        (presets.swap(), ValueError, "total_steps must be given for LateMerge"),
        (
            presets.diloco() | {"controllers": [hdet.Guard()], "total_steps": 9},
            ValueError,
            "must not be an hdet.Gu",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, error, words):
    model = Net()
    with pytest.raises(error, match=words):
        hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1), **settings)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: hdet.ElasticMerge(strength=0.0), "strength must be a number in"),
        (lambda: hdet.OuterMerge(momentum=1.0), "momentum must be a number in"),
        (lambda: hdet.GradientNormMerge(pull=2), "pull must be a number in"),
        (lambda: hdet.LateMerge(start=1.0), "start must be a number in"),
        (lambda: hdet.LossWeightedMerge(temperature=0.0), "temperature must be"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def build_virtual(settings, num_replicas=N, total_steps=STEPS):
    model = Net()
    optimizer = make_optimizer("adamw", [{"params": list(model.parameters())}])
    return hdet.VirtualEnsemble(
        model, optimizer, loss_of, num_replicas=num_replicas, total_steps=total_steps, **settings
    )


PRESETS = {
    "local_sgd": presets.local_sgd(sync_every=T),
    "diloco": presets.diloco(sync_every=T),
    "easgd": presets.easgd(sync_every=T),
    "grawa": presets.grawa(sync_every=T),
    "swap": presets.swap(start=0.4, sync_every=T),
    "pbt": presets.pbt(sync_every=T),
}


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("saved_at", [6, 7])
def test_a_checkpoint_resumes_bit_for_bit(name, saved_at, tmp_path):
    ensemble = build_virtual(PRESETS[name])
    for step in range(STEPS):
        ensemble.step(batches=[batch(r, step) for r in range(N)])
        if step + 1 == saved_at:
            ensemble.converge()
            torch.save(ensemble.state_dict(), tmp_path / "state.pt")
    again = build_virtual(PRESETS[name])
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(saved_at, STEPS):
        again.step(batches=[batch(r, step) for r in range(N)])
    assert torch.equal(flat(ensemble.model), flat(again.model))


@pytest.mark.parametrize("name", PRESETS)
def test_a_checkpoint_loads_into_another_number_of_replicas(name):
    ensemble = build_virtual(PRESETS[name])
    for step in range(6):
        ensemble.step(batches=[batch(r, step) for r in range(N)])
    ensemble.converge()
    again = build_virtual(PRESETS[name], num_replicas=2)
    again.load_state_dict(ensemble.state_dict())
    assert torch.equal(flat(ensemble.model), flat(again.model))
    for step in range(6, STEPS):
        again.step(batches=[batch(r, step) for r in range(2)])
    assert torch.isfinite(flat(again.model)).all()
    assert torch.equal(*again.replicas.rows.matrices[0])


def test_a_state_of_another_rule_is_refused():
    state = build_virtual(PRESETS["diloco"]).state_dict()
    with pytest.raises(ValueError, match="must be of a run with ElasticMerge, got 'OuterMerge'"):
        build_virtual(PRESETS["easgd"]).load_state_dict(state)


def test_a_replica_that_is_lost_gets_what_another_holds_where_they_stay_apart():
    for name in ("easgd", "grawa", "swap"):
        ensemble = build_virtual(PRESETS[name])
        for step in range(STEPS):
            if step == 7:
                with torch.no_grad():
                    ensemble.replicas.rows.matrices[0][2].fill_(float("nan"))
            ensemble.step(batches=[batch(r, step) for r in range(N)])
        assert torch.isfinite(flat(ensemble.model)).all(), name


def test_rules_that_compare_losses_say_if_there_are_none():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, gradients="local", merge=hdet.BestMerge(), sync_every=1)
    optimizer.step()
    with pytest.raises(hdet.HdetError, match="BestMerge needs a loss of every replica"):
        ensemble.step()
