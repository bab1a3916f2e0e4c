"""The rules of research, step by step, against the published ones written out; and on real ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.method.fan_out import assign
from research import merges
from tests.distributed import test_local_gradients as on_ranks
from tests.distributed.test_sharded import batch_of, build, joined
from tests.distributed.test_sharded import loss_of as loss_of_ranks
from tests.helpers.members import (
    STEPS,
    N,
    T,
    assert_follows,
    assert_heals,
    assert_loads_into_another_number,
    assert_resumes,
    flat,
    loss_of,
)
from tests.helpers.models import Net, batch
from tests.helpers.replicas import run_replicas

SEEN_BY_ALL = batch(9, 0)


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

    assert_follows(merges.easgd(sync_every=T), kind, rule)


def test_grawa():
    def norms(members):
        gradients = [
            torch.autograd.grad(loss_of(model, SEEN_BY_ALL), list(model.parameters()))
            for model in members.models
        ]
        return [torch.cat([g.reshape(-1) for g in each]).norm().item() for each in gradients]

    def rule(members, step):
        inverse = [1 / norm for norm in norms(members)]
        center = sum(w * x for w, x in zip(inverse, members.flats(), strict=True)) / sum(inverse)
        pull = 1.0 if step == STEPS else 0.5
        members.write([(1 - pull) * x + pull * center for x in members.flats()])

    assert_follows(merges.grawa([SEEN_BY_ALL], loss_of, sync_every=T), "momentum", rule)


@pytest.mark.parametrize("phase_ends", [6, 7])
def test_swap(phase_ends):
    def before(step, ensemble, members):
        if step != phase_ends + 1:
            return ensemble
        old = ensemble.engine.optimizer
        return merges.resumed(
            ensemble,
            lambda: hdet.VirtualEnsemble(
                ensemble.model, old, loss_of, num_replicas=N, total_steps=STEPS, **merges.swap(sync_every=T)
            ),
        )

    def rule(members, step):
        if step == STEPS:
            members.write([sum(members.flats()) / N] * N)

    shared = {"gradients": "shared", "explore": [hdet.LearningRate(0)], "sync_every": T}
    assert_follows(shared, "momentum", rule, shared_until=phase_ends, before=before)


def test_pbt():
    base = [0.1]

    def before(step, ensemble, members):
        # What each replica is to use: the base times a factor between 0.8 and 1.2, drawn anew in each round.
        factors = assign("random", N, 0, (step - 1) // T, ["lr"])["lr"]
        assert sorted(1 + 0.2 * x for x in factors) == pytest.approx([0.8, 1 - 0.2 / 3, 1 + 0.2 / 3, 1.2])
        for optimizer, x in zip(members.optimizers, factors, strict=True):
            optimizer.param_groups[0]["lr"] = base[0] * (1 + 0.2 * x)
        return ensemble

    def rule(members, step):
        best = min(range(N), key=lambda r: members.sums[r])
        # Exploit: weights, the optimizer's state and the learning rate of the best.
        members.write([members.flats()[best]] * N)
        state = members.optimizers[best].state_dict()
        base[0] = members.optimizers[best].param_groups[0]["lr"]
        for optimizer in members.optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))
        members.sums = [0.0] * N

    assert_follows(merges.pbt(sync_every=T), "momentum", rule, before=before)
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

    settings = merges.loss_weighted(sync_every=T) | {"moments": "keep"}
    assert_follows(settings, "sgd", rule)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: merges.ElasticMerge(strength=0.0), "strength must be a number in"),
        (lambda: merges.GradientNormMerge(pull=2), "pull must be a number in"),
        (lambda: merges.LossWeightedMerge(temperature=0.0), "temperature must be"),
    ],
)
def test_settings_out_of_range_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


RULES = {
    "easgd": merges.easgd(sync_every=T),
    "grawa": merges.grawa([SEEN_BY_ALL], loss_of, sync_every=T),
    "swap": merges.swap(sync_every=T),
    "pbt": merges.pbt(sync_every=T),
    "loss_weighted": merges.loss_weighted(sync_every=T),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("saved_at", [6, 7])
def test_a_checkpoint_resumes_bit_for_bit(name, saved_at, tmp_path):
    assert_resumes(RULES[name], saved_at, tmp_path / "state.pt")


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_loads_into_another_number_of_replicas(name):
    assert_loads_into_another_number(RULES[name])


@pytest.mark.parametrize("name", ["easgd", "grawa", "swap"])
def test_a_replica_that_is_lost_gets_what_another_holds_where_they_stay_apart(name):
    assert_heals(RULES[name])


# --- on real ranks -----------------------------------------------------------------------------------

ON_RANKS = {name: rule | {"sync_every": 7} for name, rule in RULES.items()}
ON_RANKS["grawa"] = merges.grawa([batch_of(9, 0)], loss_of_ranks, sync_every=7)


def _every_rule(rank):
    warnings.simplefilter("ignore", FutureWarning)
    return [on_ranks._ddp(rank, "adamw", more) for more in ON_RANKS.values()]


def test_every_merge_rule_on_ranks_equals_virtual_replicas():
    by_rank = run_replicas(_every_rule, 4)
    for more, *ranks in zip(ON_RANKS.values(), *by_rank, strict=True):
        on_ranks.assert_equal_to_virtual(ranks, 4, **more)


def _sharded(rank):
    return on_ranks._sharded(rank, 1, ON_RANKS["easgd"])


def test_the_elastic_rule_of_sharded_replicas_equals_virtual_ones():
    both = lambda r, step: joined(step, (2 * r, 2 * r + 1))  # noqa: E731
    ranks = run_replicas(_sharded, 4)
    on_ranks.assert_equal_to_virtual(ranks, 2, batch=both, average_tail=0.3, **ON_RANKS["easgd"])


def _saved(rank):
    return on_ranks._saved(rank, ON_RANKS["easgd"])


def test_a_checkpoint_of_one_rank_resumes_bit_for_bit():
    assert all(run_replicas(_saved, 2))


PHASE_ENDS = 12
TAIL = {"average_tail": 0.3, "explore": [hdet.LearningRate(0)]}


def _swap(rank):
    ddp = DistributedDataParallel(build())
    optimizer = on_ranks.optimizer_of("adamw", ddp.parameters())

    def make(**more):
        return hdet.Ensemble(optimizer, model=ddp, **on_ranks.settings(**TAIL | more))

    ensemble = make()
    on_ranks.train(ddp, optimizer, ensemble, rank, steps=PHASE_ENDS)
    ensemble = merges.resumed(ensemble, lambda: make(**merges.swap(sync_every=7)))
    assert not ddp.require_backward_grad_sync
    on_ranks.train(ddp, optimizer, ensemble, rank, first=PHASE_ENDS)
    ensemble.finish()
    assert ddp.require_backward_grad_sync
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("join_equal", [False, True])
def test_both_phases_of_swap_on_ranks_equal_virtual_replicas(join_equal):
    model = build()
    optimizer = on_ranks.optimizer_of("adamw", model.parameters())

    def make(**more):
        told = on_ranks.settings(**TAIL | more)
        return hdet.VirtualEnsemble(
            model, optimizer, loss_of_ranks, num_replicas=2, join_equal=join_equal, **told
        )

    ensemble = make()
    for step in range(on_ranks.STEPS):
        if step == PHASE_ENDS:
            ensemble = merges.resumed(ensemble, lambda: make(**merges.swap(sync_every=7)))
        ensemble.step(batches=[batch_of(r, step) for r in range(2)])
    for parameters in run_replicas(_swap, 2):
        for mine, theirs in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-11)
