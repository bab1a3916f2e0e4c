from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.lab.tasks import load_task
from hdet.lab.tasks.feed import Feed, auc, normalized_entropy
from hdet.lab.tasks.feed_world import BASE_RATES, TARGETS, Events, World

TASK = Feed()


def are_equal(a: Events, b: Events) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def take(task: Feed, count: int, **stream: Any) -> list[Events]:
    return list(itertools.islice(task.train_batches(**stream), count))


# --- the simulated year ------------------------------------------------------------------------------


def test_it_is_the_built_in_task() -> None:
    assert load_task("feed", {"width": 16}) == Feed(width=16)


def test_a_batch_is_a_function_of_seed_replica_and_step() -> None:
    batches = take(TASK, 4, seed=3, replica=1)
    assert all(map(are_equal, batches, take(TASK, 4, seed=3, replica=1)))
    assert are_equal(batches[3], take(Feed(), 1, seed=3, replica=1, start=3)[0])
    others = [
        batches[1],
        take(TASK, 1, seed=3, replica=2)[0],
        take(TASK, 1, seed=4, replica=1)[0],
        take(Feed(world=1), 1, seed=3, replica=1)[0],
    ]
    assert not any(are_equal(batches[0], other) for other in others)


def test_streams_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    take(TASK, 1, seed=0)
    TASK.evaluation_batches()
    TASK.build_model(0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_follows_from_its_seed() -> None:
    a, b, c = (TASK.build_model(seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["head.weight"], c["head.weight"])


def sample(world: World, time: float | None, count: int = 4000) -> Events:
    generator = torch.Generator().manual_seed(11)
    times = torch.rand(count, generator=generator) if time is None else torch.full((count,), time)
    return world.events(count, 16, times=times, generator=generator)


@pytest.mark.parametrize("seed", [0, 1])
def test_base_rates_are_as_stated_and_actions_go_together(seed: int) -> None:
    world = World(num_users=200, num_items=300, seed=seed)
    actions = sample(world, None)["actions"].flatten(0, 1)
    torch.testing.assert_close(actions.mean(0), torch.tensor(BASE_RATES), rtol=0.12, atol=0)
    correlation = torch.corrcoef(actions.T)
    assert (correlation > 0.15).all()
    assert (correlation - torch.eye(3) < 0.6).all()


def test_lower_positions_get_less() -> None:
    events = sample(TASK._world, None)
    rates = [events["actions"][events["position"] == p].mean(0) for p in (0, 3, 8)]
    assert (rates[0] > 1.15 * rates[1]).all()
    assert (rates[1] > 1.05 * rates[2]).all()


def test_positions_count_from_the_beginning_of_a_session() -> None:
    position = sample(TASK._world, None, 500)["position"]
    assert (position[:, 0] == 0).all()
    follows = position[:, 1:] == position[:, :-1] + 1
    assert (follows | (position[:, 1:] == 0)).all()
    assert 0.09 < (~follows).float().mean() < 0.16  # one in eight


def test_tastes_drift_over_the_year() -> None:
    world, users = TASK._world, torch.arange(TASK.num_users)
    tastes = [world.taste(users, torch.full((TASK.num_users,), t)) for t in (0.0, 0.01, 1.0)]
    similarity = [torch.cosine_similarity(tastes[0], taste).mean() for taste in tastes[1:]]
    assert similarity[0] > 0.99
    assert similarity[1] < 0.8

    def like_rate(time: float, half: int) -> Tensor:
        events = sample(world, time, 10000)
        items, likes = events["item"][half::2].flatten(), events["actions"][half::2, :, 1].flatten()
        return torch.bincount(items, likes, TASK.num_items) / torch.bincount(items, minlength=TASK.num_items)

    # Two samples of one day agree on what is liked; two days half a year apart agree less.
    start, again, later = like_rate(0.0, 0), like_rate(0.0, 1), like_rate(0.5, 1)
    same = torch.corrcoef(torch.stack([start, again]))[0, 1]
    apart = torch.corrcoef(torch.stack([start, later]))[0, 1]
    assert same > apart + 0.1


def test_the_year_passes_with_the_steps() -> None:
    seen: list[float] = []

    class Spy(World):
        def events(self, *args: Any, times: Tensor, **kwargs: Any) -> Events:
            seen.extend(times.tolist())
            return super().events(*args, times=times, **kwargs)

    task = Feed(steps_per_year=10, batch_size=1)
    object.__setattr__(task, "_world", Spy(num_users=512, num_items=512, seed=0))
    take(task, 12, seed=0)
    assert [int(10 * time) for time in seen] == [*range(10), 0, 1]


def test_held_out_batches_are_fixed_and_differ_from_the_probe() -> None:
    batches = TASK.evaluation_batches()
    assert all(map(are_equal, batches, Feed().evaluation_batches()))
    assert are_equal(TASK.probe_batch(), TASK.probe_batch())
    assert not any(are_equal(TASK.probe_batch(), batch) for batch in batches)
    assert 2000 <= sum(int(batch["mask"].sum()) for batch in batches) <= 10000


# --- the ranker --------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0, 1, 7, 15])
def test_a_prediction_sees_no_action_of_its_event_or_later(t: int) -> None:
    model = TASK.build_model(0).eval()
    batch = take(TASK, 1, seed=0)[0]
    before = model(batch)
    actions = batch["actions"].clone()
    actions[:, t:] = 1 - actions[:, t:]
    after = model(Events(**{**batch, "actions": actions}))
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    if t < 15:
        assert (before[:, t + 1 :] != after[:, t + 1 :]).all()


def test_a_prediction_sees_its_item_and_none_after_it() -> None:
    model = TASK.build_model(0).eval()
    batch = take(TASK, 1, seed=0)[0]
    items = batch["item"].clone()
    items[:, 7] = (items[:, 7] + 1) % 512
    before, after = model(batch), model(Events(**{**batch, "item": items}))
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).all()


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_all_replicas_at_once_equal_one_by_one(gradients: Any) -> None:
    results = []
    for vectorize in (True, False):
        model = TASK.build_model(0)
        optimizer = torch.optim.SGD(TASK.parameter_groups(model), lr=0.1, momentum=0.9)
        ensemble = hdet.VirtualEnsemble(
            model, optimizer, TASK.loss, num_replicas=3, vectorize=vectorize, gradients=gradients
        )
        losses = [
            ensemble.step(batches=[next(TASK.train_batches(seed=0, replica=r, start=step)) for r in range(3)])
            for step in range(3)
        ]
        results.append(torch.stack(losses))
    torch.testing.assert_close(*results)


def test_dropout_acts_in_training_only() -> None:
    task = Feed(dropout=0.3)
    model, batch = task.build_model(0), take(task, 1, seed=0)[0]
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_four_groups_hold_every_parameter_once() -> None:
    model = TASK.build_model(0)
    groups = TASK.parameter_groups(model)
    assert [group["name"] for group in groups] == ["embedding", "no_decay", "non_embedding", "transformer"]
    held = [parameter for group in groups for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert all(group["params"] for group in groups)
    assert [group.get("weight_decay") for group in groups] == [None, 0.0, None, None]
    names = {id(p): name for name, p in model.named_parameters()}
    by_group = {group["name"]: [names[id(p)] for p in group["params"]] for group in groups}
    assert by_group["non_embedding"] == ["mix.weight", "head.weight"]
    assert all(re.search(r"bias$|norm\.weight$", name) for name in by_group["no_decay"])
    assert 30_000 <= sum(p.numel() for p in held) <= 60_000


# --- scores ------------------------------------------------------------------------------------------


def test_auc_by_hand() -> None:
    def of(scores: list[float], labels: list[float]) -> float:
        return auc(torch.tensor(scores), torch.tensor(labels))

    assert of([1, 2, 3, 4], [0, 0, 1, 1]) == 1
    assert of([4, 3, 2, 1], [0, 0, 1, 1]) == 0
    assert of([1, 2, 3], [1, 0, 1]) == 0.5
    assert of([7, 7, 7, 7], [0, 1, 1, 0]) == 0.5
    assert of([1, 2, 2, 2, 3], [0, 1, 0, 1, 1]) == (1 + 0.5 + 1 + 0.5 + 1 + 1) / 6
    assert math.isnan(of([1, 2], [1, 1]))
    assert math.isnan(of([], []))


def test_auc_equals_the_count_of_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 20, (300,), generator=generator).float()
    labels = torch.randint(0, 2, (300,), generator=generator)
    difference = scores[labels == 1].unsqueeze(1) - scores[labels == 0]
    pairs = ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()
    assert auc(scores, labels) == pytest.approx(pairs, abs=1e-12)


class Constant(nn.Module):
    def __init__(self, rates: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.logit(rates))

    def forward(self, events: Events) -> Tensor:
        assert not self.training
        return self.logits.expand_as(events["actions"])


def test_a_constant_predictor_of_the_base_rates_is_worth_nothing() -> None:
    batches = TASK.evaluation_batches()
    actions = torch.cat([batch["actions"].flatten(0, 1) for batch in batches])
    model = Constant(actions.mean(0))
    found = TASK.metrics(model, batches)
    assert model.training
    for name in TARGETS:
        assert found[f"ne_{name}"] == pytest.approx(1, abs=1e-5)
        assert found[f"auc_{name}"] == 0.5
    assert found["ne"] == pytest.approx(1, abs=1e-5)
    assert found["loss"] == pytest.approx(sum(found[f"loss_{name}"] for name in TARGETS) / 3)
    assert math.isnan(normalized_entropy(0.1, 0.0))


def test_metrics_and_loss_agree() -> None:
    model, batches = TASK.build_model(0).eval(), TASK.evaluation_batches()
    losses = [TASK.loss(model, batch).item() for batch in batches]
    assert TASK.metrics(model, batches)["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_training_learns_more_than_the_base_rates() -> None:
    task = Feed(batch_size=32, steps_per_year=150)
    model = task.build_model(0)
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=2e-2)
    for step, batch in enumerate(itertools.islice(task.train_batches(seed=0), 150)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * min((step + 1) / 15, (150 - step) / 135)
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    found = task.metrics(model, task.evaluation_batches())
    assert found["ne"] < 0.93
    assert found["auc"] > 0.68


# --- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"width": 10, "num_heads": 4},
            r"width must be a multiple of num_heads, got 10 with 4 heads: try 12",
        ),
        ({"length": 1}, r"length must be an integer of at least 2, got 1"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"num_items": 8}, r"num_items must be an integer of at least 16, got 8: a sequence shows"),
        ({"world": -1}, r"world must be an integer of at least 0, got -1"),
        ({"steps_per_year": 0}, r"steps_per_year must be an integer of at least 1, got 0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feed(**options)


# --- events of a file --------------------------------------------------------------------------------


def test_the_example_trains_on_a_log(tmp_path: Path) -> None:
    def row(k: int) -> str:  # what is done depends on the item; each user pauses once for an hour
        item, time = k % 31, 60 * k + 3600 * (k >= 100)
        return f"u{k % 7},i{item},{time},{int(item % 9 == 0)},{item % 2},{int(item % 3 > 0)}"

    lines = ["user,item,time,contribution,like,dwell", *map(row, range(400))]
    log = tmp_path / "log.csv"
    log.write_text("\n".join(lines) + "\n")
    name = f"{Path(__file__).parents[4] / 'examples' / 'tasks' / 'feed_log.py'}:FeedLog"
    task = load_task(name, {"log": str(log), "length": 8})
    batches = take(task, 2 * task.num_examples // task.batch_size + 1, seed=0)
    assert sum(int(b["mask"].sum()) for b in task.evaluation_batches()) == 40
    assert int(task.probe_batch()["mask"].sum()) == 40
    assert {int(b["position"].max()) for b in batches} == {7} and task.num_examples == 42
    assert torch.equal(batches[3]["item"], take(task, 1, seed=0, start=3)[0]["item"])
    model = task.build_model(0)
    padded = next(b for b in batches if (b["mask"] == 0).any())
    other = {**padded, "item": torch.where(padded["mask"] > 0, padded["item"], 3)}
    assert torch.equal(task.loss(model, padded), task.loss(model, other))  # padding is not scored
    optimizer = torch.optim.AdamW(task.parameter_groups(model), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.metrics(model, task.evaluation_batches())["auc"] > 0.7
    log.write_text("\n".join([*lines, "u1,i1,soon,0,0,0"]))
    with pytest.raises(ValueError, match=r"log .*log\.csv, line 402: ValueError could not convert string"):
        load_task(name, {"log": str(log)})
