"""The group-aware start: learned from records of real runs, and used by the next one."""

import pytest
import torch
from torch import nn

import hdet
from tests.helpers.models import Net, batch


def loss_of(model: nn.Module, data) -> torch.Tensor:
    return (model(data[0]) - data[1]).square().mean()


def trained(explore, seed=0, sink=None, steps=60):
    model = Net()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "name": "first"}, {"params": parameters[2:], "name": "last"}]
    optimizer = torch.optim.Adam(groups, lr=0.02)
    records = hdet.Records() if sink is None else sink
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        loss_of,
        num_replicas=4,
        explore=[explore],
        controllers=[hdet.Controller(form="paper", end="floor")],
        total_steps=steps,
        sync_every=5,
        seed=seed,
        records=records,
    )
    for step in range(steps):
        ensemble.step(batches=[batch(r, step + 1000 * seed) for r in range(4)])
    return records


def test_earlier_runs_set_the_spread_and_the_decay_of_every_group(tmp_path):
    uniform = hdet.LearningRate(0.2, floor=[0.02 * 0.01, 0.02 * 0.1])
    sink = hdet.JsonlSink(tmp_path / "records.jsonl")
    runs = [trained(uniform, seed=0), tmp_path]
    trained(uniform, seed=1, sink=sink)
    prior = hdet.prior_from(runs, spread=0.2)
    assert prior.groups == ("lr.first", "lr.last")
    assert prior.drops == pytest.approx((0.01, 0.1), rel=0.5)  # the decay, and a little signal
    assert prior.spreads == pytest.approx((0.2, 0.2))  # two groups are as far from their mean
    records = trained(prior.learning_rate(0.02))
    ends = records[-1].base
    assert 0.3 < ends["lr.first"] / 0.02 / prior.drops[0] < 3
    assert 0.3 < ends["lr.last"] / 0.02 / prior.drops[1] < 3


def test_spreads_of_groups_reach_the_replicas():
    records = trained(hdet.LearningRate(group_spreads=(0.1, 0.3), floor=1e-4))
    multipliers = records[0].multipliers
    assert max(multipliers["lr.first"]) == pytest.approx(1.1)
    assert max(multipliers["lr.last"]) == pytest.approx(1.3)


def test_errors_say_what_is_wrong(tmp_path):
    one = trained(hdet.LearningRate(0.1, per_group=False, floor=1e-4))
    several = trained(hdet.LearningRate(0.1, floor=1e-4))
    with pytest.raises(ValueError, match="runs must hold at least one run"):
        hdet.prior_from([])
    with pytest.raises(ValueError, match="learning rates of their own"):
        hdet.prior_from([one])
    with pytest.raises(ValueError, match="runs must have the same parameter groups"):
        hdet.prior_from([several, one])
    with pytest.raises(ValueError, match=r"group_spreads\[1\] must be a number in \[0, 1\), got 2"):
        hdet.LearningRate(group_spreads=(0.1, 2.0))
    with pytest.raises(ValueError, match="group_spreads must be None where per_group is False"):
        hdet.LearningRate(group_spreads=(0.1,), per_group=False)
    with pytest.raises(
        ValueError, match="group_spreads must have one entry per parameter group, got 1 for 2"
    ):
        trained(hdet.LearningRate(group_spreads=(0.1,)))
