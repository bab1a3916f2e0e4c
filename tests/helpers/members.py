"""Merge rules against the same rules written out with plain models and optimizers, and rules of a user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import hdet
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


def build_virtual(settings, kind="adamw", num_replicas=N):
    model = Net()
    optimizer = make_optimizer(kind, [{"params": list(model.parameters())}])
    return hdet.VirtualEnsemble(
        model, optimizer, loss_of, num_replicas=num_replicas, total_steps=STEPS, **settings
    )


def train_virtual(ensemble, first, last, num_replicas=N):
    for step in range(first, last):
        ensemble.step(batches=[batch(r, step) for r in range(num_replicas)])


def assert_follows(settings, kind, rule, *, shared_until=0, before=lambda step, ensemble, members: ensemble):
    """Train both, and compare every replica after every step."""
    members, ensemble = Members(kind), build_virtual(settings, kind)
    for step in range(1, STEPS + 1):
        ensemble = before(step, ensemble, members)
        ensemble.step(batches=[batch(r, step) for r in range(N)])
        members.step(step, shares=step <= shared_until)
        if step % T == 0:
            rule(members, step)
        for row, mine in zip(ensemble.replicas.rows.matrices[0], members.flats(), strict=True):
            torch.testing.assert_close(row, mine, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(ensemble.model), members.flats()[0], rtol=1e-10, atol=1e-12)


def assert_resumes(settings, saved_at, path):
    """Save within a round or at its end, and compare the run that goes on with the one that is resumed."""
    ensemble = build_virtual(settings)
    train_virtual(ensemble, 0, saved_at)
    ensemble.converge()
    torch.save(ensemble.state_dict(), path)
    again = build_virtual(settings)
    again.load_state_dict(torch.load(path, weights_only=True))
    for one in (ensemble, again):
        train_virtual(one, saved_at, STEPS)
    assert torch.equal(flat(ensemble.model), flat(again.model))


def assert_loads_into_another_number(settings):
    ensemble, again = build_virtual(settings), build_virtual(settings, num_replicas=2)
    train_virtual(ensemble, 0, 6)
    ensemble.converge()
    again.load_state_dict(ensemble.state_dict())
    assert torch.equal(flat(ensemble.model), flat(again.model))
    train_virtual(again, 6, STEPS, num_replicas=2)
    assert torch.isfinite(flat(again.model)).all()
    assert torch.equal(*again.replicas.rows.matrices[0])


def assert_heals(settings):
    """A replica that is lost where replicas stay apart gets what another holds."""
    ensemble = build_virtual(settings)
    train_virtual(ensemble, 0, 7)
    with torch.no_grad():
        ensemble.replicas.rows.matrices[0][2].fill_(float("nan"))
    train_virtual(ensemble, 7, STEPS)
    assert torch.isfinite(flat(ensemble.model)).all()


def averages_moments(members):
    """Momentum buffers and Adam's moments too."""
    states = [list(optimizer.state.values()) for optimizer in members.optimizers]
    for together in zip(*states, strict=True):
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if name in together[0] and together[0][name] is not None:
                mean = sum(state[name] for state in together) / N
                for state in together:
                    state[name] = mean.clone()


@dataclass(frozen=True, kw_only=True)
class Lookahead(hdet.Merge):
    """Replicas go a part of the way from where the round began to their mean."""

    copies: ClassVar = {"anchor": 1}
    share: float = 0.5

    def merge(self, at):
        at.join()
        if at.ends_round:
            for weight, anchor in zip(at.weights, at.copies["anchor"], strict=True):
                anchor.lerp_(weight.to(anchor.dtype), self.share)
                weight.copy_(anchor)


class WeightedPull(hdet.Merge):
    """No dataclass: replicas are pulled to a mean by their ranks in the losses, and stay apart."""

    compares_losses = stays_apart = True

    def __init__(self, pull=0.5):
        self.pull = pull

    def shares(self, losses):
        order = sorted(losses)
        return [2 * (order.index(loss) + 1) / (len(losses) * (len(losses) + 1)) for loss in losses]

    def merge(self, at):
        if not at.joins:
            means = [weight.clone() for weight in at.weights]
            at.average(means)
            for weight, mean in zip(at.weights, means, strict=True):
                weight.lerp_(mean, self.pull)


OWN_RULES = {
    "lookahead": {"gradients": "local", "merge": Lookahead(), "sync_every": T, "moments": "keep"},
    "pull": {"gradients": "local", "merge": WeightedPull(), "sync_every": T},
}
