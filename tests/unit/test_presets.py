"""Presets and rules of a user, step by step, against the same written out with plain models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hdet
from hdet import presets
from tests.helpers.members import (
    OWN_RULES,
    STEPS,
    Lookahead,
    N,
    T,
    WeightedPull,
    assert_follows,
    assert_heals,
    assert_loads_into_another_number,
    assert_resumes,
    averages_moments,
    build_virtual,
    flat,
    loss_of,
    train_virtual,
)
from tests.helpers.models import Net, batch


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
def test_a_rule_that_keeps_a_copy(kind):
    anchor = [flat(Net())]

    def rule(members, step):
        anchor[0] = (anchor[0] + sum(members.flats()) / N) / 2
        members.write([anchor[0]] * N)

    assert_follows(OWN_RULES["lookahead"] | {"explore": [hdet.LearningRate(0)]}, kind, rule)


def test_a_rule_that_compares_replicas_and_lets_them_stay_apart():
    def rule(members, step):
        order = sorted(members.sums)
        shares = [0.1 * (order.index(one) + 1) for one in members.sums]
        mean = sum(share * x for share, x in zip(shares, members.flats(), strict=True))
        pull = 1.0 if step == STEPS else 0.5
        members.write([x + pull * (mean - x) for x in members.flats()])
        members.sums = [0.0] * N

    assert_follows(OWN_RULES["pull"] | {"explore": [hdet.LearningRate(0)]}, "momentum", rule)


def test_settings_of_a_rule_are_compared_though_it_is_no_dataclass():
    assert repr(WeightedPull(0.25)) == "WeightedPull(pull=0.25)"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"merge": hdet.OuterMerge()}, ValueError, "gradients must be 'local' for OuterMerge, got 'shared'"),
        ({"merge": Lookahead()}, ValueError, "gradients must be 'local' for Lookahead, got 'shared'"),
        ({"merge": "best", "gradients": "local"}, TypeError, "merge must be a merge rule such as"),
        ({"merge": Lookahead, "gradients": "local"}, TypeError, "merge must be a merge rule such as"),
        (OWN_RULES["pull"] | {"moments": "average"}, ValueError, "moments must be 'auto' or 'keep'"),
        *[
            (
                rule | {"controllers": [hdet.Guard()], "total_steps": 9},
                ValueError,
                "must remember nothing and leave replicas equal beside a Guard",
            )
            for rule in (presets.diloco(), *OWN_RULES.values())
        ],
        (
            OWN_RULES["pull"]
            | {"controllers": [hdet.HeldOutWeightDecay()], "total_steps": 9}
            | {"probe": hdet.Probe([batch(9, 0)], loss_of)},
            ValueError,
            "merge must leave replicas equal to steer the weight decay",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings, error, words):
    model = Net()
    with pytest.raises(error, match=words):
        hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1), **{"model": model} | settings)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="momentum must be a number in"):
        hdet.OuterMerge(momentum=1.0)


RULES = OWN_RULES | {
    "local_sgd": presets.local_sgd(sync_every=T),
    "diloco": presets.diloco(sync_every=T),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("saved_at", [6, 7])
def test_a_checkpoint_resumes_bit_for_bit(name, saved_at, tmp_path):
    assert_resumes(RULES[name], saved_at, tmp_path / "state.pt")


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_loads_into_another_number_of_replicas(name):
    assert_loads_into_another_number(RULES[name])


def test_a_state_of_another_rule_is_refused():
    state = build_virtual(RULES["diloco"]).state_dict()
    for name, rule in (("lookahead", "Lookahead"), ("local_sgd", "MeanMerge")):
        with pytest.raises(ValueError, match=f"must be of a run with {rule}, got 'OuterMerge'"):
            build_virtual(RULES[name]).load_state_dict(state)


def test_a_replica_that_is_lost_gets_what_another_holds_where_they_stay_apart():
    assert_heals(RULES["pull"])


def test_rules_that_compare_losses_say_if_there_are_none():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(optimizer, gradients="local", merge=WeightedPull(), sync_every=1)
    optimizer.step()
    with pytest.raises(hdet.HdetError, match="WeightedPull needs a loss of every replica"):
        ensemble.step()


def test_rules_compare_the_probe_also_before_a_save():
    probe = hdet.Probe([batch(9, 0)], loss_of)
    records = hdet.Records()
    ensemble = build_virtual(RULES["pull"] | {"probe": probe, "records": records})
    train_virtual(ensemble, 0, 4)
    ensemble.converge()
    assert [record.ends_round for record in records] == [True, False]
    for record in records:
        assert record.merge_weights == WeightedPull().shares(record.probes)


@pytest.mark.filterwarnings("ignore:replica .* of 8 was asked for")
@pytest.mark.parametrize("rank", range(8))
def test_in_the_papers_settings_rank_r_begins_with_multiplier_r(rank):
    """Rank 0 of 8 starts at 8/9 of the base (Algorithm 1, line 3)."""
    optimizer = torch.optim.Adam(presets.four_groups(nn.Sequential(nn.Linear(2, 2)), "0."))
    assert [group["name"] for group in optimizer.param_groups] == ["no_decay", "transformer"]
    scheduler = hdet.OneCycleAutoLR(optimizer, 9e-4, rank=rank, world_size=8, **presets.paper(3000))
    assert scheduler.get_last_lr() == pytest.approx([9e-4 / 25 * (1 + (rank - 3.5) / 3.5 / 9)] * 2)


def test_in_the_papers_settings_multipliers_are_drawn_anew_from_where_the_controller_starts():
    records = hdet.Records()
    settings = presets.paper_ensemble(30) | {"records": records}
    ensemble = hdet.VirtualEnsemble(
        model := Net(), torch.optim.Adam(model.parameters(), lr=0.01), loss_of, **settings
    )
    for step in range(30):
        ensemble.step(batches=[batch(r, step) for r in range(8)])
    rows = [record.multipliers["lr"] for record in records]
    in_order = [1 + (r - 3.5) / 3.5 / 9 for r in range(8)]
    assert [record.step for record in records] == [5, 10, 15, 20, 25, 30]
    assert all(row == pytest.approx(in_order) for row in rows[:2])  # S_warm is a third of the run
    assert all(sorted(row) == pytest.approx(in_order) != row for row in rows[2:])
    assert len({tuple(row) for row in rows[2:]}) == 4
    assert records[-1].base["lr"] < records[1].base["lr"] * 0.4
