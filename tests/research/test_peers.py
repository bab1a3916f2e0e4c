"""Every method trains on the same batches; the rules that we wrote down ourselves follow their papers."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn

from hdet.errors import HdetError
from hdet.lab.tasks.quadratic import Quadratic
from hdet.lab.tasks.task import load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import evaluate, run
from hdet.method.recipe import one_cycle
from research.peers import METHODS, packages
from research.peers.alrao import Outputs, feature_rates, switch
from research.peers.averaging import Outer
from research.peers.base import Job, Method, Trained, descend
from research.peers.finders import nes_step
from research.peers.grid import lr_at, next_points
from research.peers.hypergradient import Hypergradient
from research.peers.l4 import L4
from research.peers.many_models import Mixture, greedy_soup, mixture, uniform_soup
from research.peers.members import Members
from research.peers.pbt import exploits
from research.peers.plain import triangular
from research.peers.range_test import ramp, suggestion

STEPS, REPLICAS = 60, 4


class CountingQuadratic(Quadratic):
    """Counts the batches that are taken from it."""

    taken = 0

    def train_batches(self, *, seed, replica=0, start=0):
        for batch in super().train_batches(seed=seed, replica=replica, start=start):
            CountingQuadratic.taken += 1
            yield batch


def train(name, task, lr, kind="adamw", seed=0):
    return METHODS[name].train(task, lr, steps_of(name), seed, REPLICAS, kind)


def steps_of(name):
    """Give a method that steers a run that is long enough for it."""
    return max(STEPS, METHODS[name].least_steps)


IN_PROCESS = [name for name in METHODS if name != "pbt_ray"]
"""The other one has its own test, in test_pbt_ray.py."""


@pytest.mark.parametrize("name", IN_PROCESS)
@pytest.mark.parametrize(("kind", "lr"), [("adamw", 0.2), ("sgd", 0.05)])
def test_a_method_lowers_the_loss_is_repeatable_and_takes_the_batches_of_its_steps(name, kind, lr):
    task = CountingQuadratic(size=20)
    before = evaluate(task, task.build_model(0))["loss"]
    CountingQuadratic.taken = 0
    outcome = train(name, task, lr, kind)
    budget = steps_of(name) * REPLICAS * METHODS[name].cost
    if name in ("hdet_find", "hdet_steered"):  # several trials see the same batches
        assert 0.5 * budget < CountingQuadratic.taken <= budget + 8 * REPLICAS  # and two probes
    elif name in ("hdet_find_on_top", "hdet_steered_on_top"):
        assert budget < CountingQuadratic.taken <= 1.5 * budget
    elif name != "best_of_sweep":
        assert CountingQuadratic.taken == budget
    assert math.isfinite(outcome.final_loss)
    assert outcome.final_loss < before
    assert outcome.metrics["loss"] == outcome.final_loss
    assert not outcome.diverged
    assert outcome.seconds > 0
    if name != "best_of_sweep":
        again = train(name, task, lr, kind)
        assert (again.final_loss, again.found_lr) == (outcome.final_loss, outcome.found_lr)
        other = train(name, task, lr, kind, seed=1)
        assert other.final_loss != outcome.final_loss


@pytest.mark.parametrize("name", [name for name in IN_PROCESS if name != "best_of_sweep"])
def test_a_method_trains_a_network_with_several_parameter_groups(name):
    task = load_task("charlm", {"width": 8, "length": 8})
    before = evaluate(task, task.build_model(0))["loss"]
    kind = "sgd" if name == "dadaptation" else "adamw"
    outcome = train(name, task, 0.01, kind)
    assert outcome.final_loss < before


def test_global_randomness_is_private_and_dropout_repeatable():
    task = load_task("digits", {"dropout": 0.5})
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        losses.append(METHODS["plain_linear"].train(task, 0.01, 5, 0, 2).final_loss)
        assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1]


def test_plain_is_what_hdet_runs_without_exploration(tmp_path):
    task = Quadratic(size=20)
    outcome = METHODS["plain_linear"].train(task, 0.1, 40, 3, 4, "sgd")
    config = RunConfig(
        task="quadratic",
        lr=0.1,
        steps=40,
        replicas=4,
        optimizer="sgd",
        find=False,
        controllers=(),
        probe=False,
        seed=3,
    )
    result = run(config, RunFolder.create(tmp_path / "run", config, {}), task=task)
    assert outcome.final_loss == pytest.approx(result.final_loss, rel=1e-5)


def test_a_run_diverges_when_its_loss_is_lost_or_worse_than_untrained():
    task = Quadratic(size=20)
    lost = METHODS["plain_linear"].train(task, 1e6, 60, 0, 2, "sgd")
    assert (lost.final_loss, lost.metrics, lost.diverged) == (math.inf, {}, True)
    untrained = evaluate(task, task.build_model(0))["loss"]
    for factor, has_diverged in ((1.9, False), (2.1, True), (math.nan, True)):
        method = Method(
            name="x", description="", run=lambda job, f=factor: Trained({"loss": f * untrained}, 1.0)
        )
        assert method.train(task, 1.0, 1).diverged is has_diverged


@pytest.mark.parametrize("name", ["pbt", "local_sgd", "diloco", "hdet_log", "range_test"])
def test_other_methods_survive_a_start_that_destroys_everything(name):
    outcome = METHODS[name].train(Quadratic(size=20), 1e8, 60, 0, 4, "sgd")
    assert outcome.diverged


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(HdetError, match=r"pip install .*\[research\]'"):
        METHODS["prodigy"].require()
    with pytest.raises(HdetError, match="prodigyopt is missing"):
        train("prodigy", Quadratic(size=2), 0.1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HdetError, match=r"ray is missing. Install it: pip install .*\[ray\]'"):
        METHODS["pbt_ray"].require()
    METHODS["plain_linear"].require()


def test_bad_arguments_are_named():
    task = Quadratic(size=2)
    with pytest.raises(ValueError, match="optimizer_kind must be one of"):
        METHODS["dog"].train(task, 0.1, 10, optimizer_kind="adam")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="start_lr must be a number above 0"):
        METHODS["dog"].train(task, 0.0, 10)


# --- rules by hand -------------------------------------------------------------------------------


def point(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def give(parameter, *gradient):
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)


def test_hypergradient_of_sgd():
    x = point(1.0, 2.0)
    optimizer = Hypergradient(torch.optim.SGD([x], lr=0.1), rate=0.01)
    give(x, 2.0, 1.0)
    optimizer.step()  # nothing before it: alpha stays
    assert x.tolist() == pytest.approx([0.8, 1.9])
    give(x, 3.0, -1.0)
    optimizer.step()  # alpha = 0.1 + 0.01 (6 - 1) = 0.15
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.15)
    assert x.tolist() == pytest.approx([0.8 - 0.45, 1.9 + 0.15])
    give(x, -1.0, 0.0)
    optimizer.step()  # 0.15 + 0.01 (-3) = 0.12
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.12)


def test_hypergradient_with_momentum_multiplies_the_running_sum():
    x, y = point(0.0), point(0.0)
    optimizer = Hypergradient(
        torch.optim.SGD([{"params": [x]}, {"params": [y]}], lr=0.1, momentum=0.5), rate=0.01
    )
    for gradient in (2.0, 4.0):  # u = 2, then 0.5 * 2 + 4 = 5
        give(x, gradient)
        give(y, 1.0)
        optimizer.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1 + 0.01 * (4 * 2 + 1))  # one for all groups
    give(x, 1.0)
    give(y, 0.0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 + 0.01 * (4 * 2 + 1) + 0.01 * 5)


def test_hypergradient_of_adam():
    x = point(1.0)
    optimizer = Hypergradient(torch.optim.AdamW([x], lr=0.1, eps=0.0, weight_decay=0.0), rate=0.01)
    give(x, 4.0)
    optimizer.step()  # the first update of Adam is the sign
    assert x.item() == pytest.approx(0.9)
    give(x, 3.0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 + 0.01 * 3)
    first = (0.9 * 0.1 * 4 + 0.1 * 3) / (1 - 0.9**2)
    second = (0.999 * 0.001 * 16 + 0.001 * 9) / (1 - 0.999**2)
    assert x.item() == pytest.approx(0.9 - 0.13 * first / math.sqrt(second))


def test_dog_divides_the_distance_by_the_gradients_and_is_evaluated_at_its_average():
    task = Quadratic(size=4)
    job = Job(task=task, start_lr=1.0, steps=20, seed=0, num_replicas=2, optimizer_kind="sgd")
    model, average = job.build_model(), job.build_model()
    (x,), (mean,) = model.parameters(), average.parameters()
    start, squares, distance = x.detach().clone(), 1e-8, 1e-6 * (1 + x.detach().norm())
    for t, batch in enumerate(itertools.islice(job.batches(), job.steps), 1):
        (gradient,) = torch.autograd.grad(task.loss(model, batch), x)
        with torch.no_grad():
            squares = squares + gradient.norm() ** 2
            distance = torch.maximum(distance, (x - start).norm())
            x -= distance / squares**0.5 * gradient
            mean.lerp_(x, 9 / (t + 8))
    found = METHODS["dog"].run(job)
    assert found.found_lr == pytest.approx(float(distance / squares**0.5), rel=1e-4)
    last, averaged = (evaluate(task, each)["loss"] for each in (model, average))
    assert abs(found.metrics["loss"] - averaged) < 0.01 * abs(last - averaged)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_mechanic_scales_the_updates_of_the_optimizer_that_is_compared(kind, monkeypatch):
    used = []

    def seen(job, model, optimizer, *rest, **more):
        used.append(optimizer)
        descend(job, model, optimizer, *rest, **more)

    monkeypatch.setattr(packages, "descend", seen)
    task = load_task("charlm", {"width": 8, "length": 8})
    job = Job(task=task, start_lr=0.5, steps=12, seed=0, num_replicas=2, optimizer_kind=kind)
    found_lr = METHODS["mechanic"].run(job).found_lr
    base = job.optimizer(job.build_model(), 1.0)
    (optimizer,) = used
    assert isinstance(optimizer, type(base))
    assert len(optimizer.param_groups) == len(base.param_groups) > 1
    last = one_cycle(11, 12, anneal="linear")  # the start is not used
    for expected, group in zip(base.param_groups, optimizer.param_groups, strict=True):
        differing = {"params": None, "lr": last}
        assert group | {"params": None} == expected | differing
    assert 0 < found_lr == optimizer.state["_mechanic"]["s"].sum().item()


def test_the_outer_step_of_diloco():
    outer = Outer([torch.tensor([1.0, 2.0])], lr=0.7, momentum=0.9)
    outer.step([torch.tensor([0.0, 3.0])])  # delta (1, -1), b the same
    assert outer.weights[0].tolist() == pytest.approx([1 - 0.7 * 1.9, 2 + 0.7 * 1.9])
    x = 1 - 0.7 * 1.9
    outer.step([torch.tensor([x - 0.5, 3.33])])  # delta 0.5, b = 0.9 + 0.5
    assert outer.weights[0][0].item() == pytest.approx(x - 0.7 * (0.5 + 0.9 * 1.4))


def test_pbt_replaces_the_worst_quarter_by_the_best():
    scores = [5.0, 1.0, 9.0, 2.0, 3.0, math.inf, 4.0, 6.0]
    seen = {e for seed in range(50) for e in exploits(scores, torch.Generator().manual_seed(seed))}
    assert seen == set(itertools.product((2, 5), (1, 3), (0.8, 1.25)))
    for seed in range(5):
        assert [t for t, _, _ in exploits(scores, torch.Generator().manual_seed(seed))] == [2, 5]
    assert exploits([1.0], torch.Generator()) == []
    assert [(t, s) for t, s, _ in exploits([2.0, 1.0], torch.Generator())] == [(0, 1)]


def test_members_train_as_torch_does_and_copy_everything():
    task = load_task("digits")
    job = Job(task=task, start_lr=0.01, steps=4, seed=0, num_replicas=2, optimizer_kind="adamw")
    members = Members(job)
    lrs = [0.01, 0.03]
    for _ in range(3):
        members.step(lrs)
    for replica, lr in enumerate(lrs):
        model = job.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        for batch in itertools.islice(task.train_batches(seed=0, replica=replica), 3):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        members.rows.write_template(replica)
        for found, expected in zip(members.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected)
    members.copy(source=1, target=0)
    rows = [*members.rows.matrices, *members.row_optimizer.moments[0].values()]
    assert len(rows) == 3
    assert all(torch.equal(row[0], row[1]) for row in rows)


def test_the_range_test_suggests_the_steepest_fall():
    lrs = [10.0**k for k in range(20)]
    # Differences in the middle: the steepest is from point 13 to 15, thus at 14.
    losses = [9.0] * 13 + [8.8, 7.0, 5.5, 5.2, 5.1, 5.1, 50.0]
    assert suggestion(lrs, losses) == lrs[14]
    assert suggestion(lrs, [100.0, *range(99, 89, -1), *[80.0] * 9]) == lrs[10]  # the beginning is left out
    assert suggestion(lrs[:12], losses[:12]) is None


def test_the_ramp_grows_by_a_million_and_stops_at_four_times_the_best():
    job = Job(task=Quadratic(size=20), start_lr=0.1, steps=60, seed=0, num_replicas=2, optimizer_kind="sgd")
    lrs, losses = ramp(job, job.build_model(), job.batches(), 50)
    assert lrs[0] == pytest.approx(1e-4)
    assert lrs[1] / lrs[0] == pytest.approx(1e6 ** (1 / 49))
    assert len(lrs) == len(losses) < 50  # SGD on a quadratic cannot take 100
    assert not losses[-1] <= 4 * min(losses)
    assert all(loss <= 4 * min(losses[: i + 1]) for i, loss in enumerate(losses[:-1]))


def test_the_grid_widens_to_an_inner_best_and_refines_it():
    known: dict[int, float] = {}
    while points := next_points(known, 1.0):
        known |= {p: abs(p - 11.2) for p in points}  # best at 10^2.8, beyond the first grid's 10^2
    assert min(known, key=lambda p: known[p]) == 11
    assert {10, 11, 12} <= set(known)  # four per factor of ten on both sides of the best
    assert lr_at(max(known)) / lr_at(min(known)) >= 1e4
    assert next_points(dict.fromkeys(range(-20, 10, 2), math.inf), 1.0) == []  # it gives up in the end


def test_cyclical_learning_rates_are_triangles():
    # s = 4: up from a quarter to one in four steps, and down; torch's CyclicLR has the same rule.
    by_hand = [0.25, 0.4375, 0.625, 0.8125, 1.0, 0.8125, 0.625, 0.4375, 0.25, 0.4375]
    assert [triangular(t, half_cycle=4) for t in range(10)] == pytest.approx(by_hand)
    optimizer = torch.optim.SGD([point(0.0)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.25, 1.0, step_size_up=4, cycle_momentum=False)
    for t in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(triangular(t, half_cycle=4))
        optimizer.step()
        theirs.step()


def test_l4_with_momentum():
    x = point(1.0, 2.0)
    l4 = L4([x], is_adam=False)
    give(x, 2.0, 1.0)
    l4.step(4.0)  # lowest 3, so 0.15 (4 - 2.7) / (4 + 1) = 0.039
    assert l4.lr == pytest.approx(0.039)
    assert x.tolist() == pytest.approx([1 - 0.078, 2 - 0.039])
    give(x, 1.0, 0.0)
    l4.step(2.0)  # lowest 2; g = (0.9 * 0.1 * (2, 1) + 0.1 * (1, 0)) / 0.19
    g = [0.28 / 0.19, 0.09 / 0.19]
    assert l4.lr == pytest.approx(0.15 * (2 - 1.8) / (g[0] ** 2 + g[1] ** 2))
    assert x.tolist() == pytest.approx([0.922 - l4.lr * g[0], 1.961 - l4.lr * g[1]])
    give(x, 1.0, 1.0)
    before = l4.lr
    l4.step(3.0)  # the lowest has grown by a thousandth
    assert l4.lr != before
    g = [(0.9 * 0.28 + 0.1) / 0.271, (0.9 * 0.09 + 0.1) / 0.271]
    assert l4.lr == pytest.approx(0.15 * (3 - 0.9 * 2.002) / (g[0] ** 2 + g[1] ** 2))


def test_l4_of_adam_takes_the_product_of_gradient_and_direction():
    x = point(1.0, 1.0)
    l4 = L4([x], is_adam=True)
    give(x, 3.0, -4.0)
    l4.step(2.0)  # the direction is the sign but for 1e-4; 0.15 (2 - 0.9 * 1.5) / (3 + 4)
    assert l4.lr == pytest.approx(0.15 * 0.65 / 7, rel=1e-4)
    assert x.tolist() == pytest.approx([1 - l4.lr, 1 + l4.lr], rel=1e-4)


def test_the_switch_gives_weight_to_the_better_model():
    weights = torch.tensor([[0.9999, 0.9999], [0.0001, 0.0001]], dtype=torch.float64) / 2
    after = switch(weights, torch.tensor([0.0, math.log(3)], dtype=torch.float64), 1)
    # By hand: p = (1, 1/3), pi = 1/2; w^a p = .9999 (1/2, 1/6), their pool .9999 / 3.
    pool = 0.9999 / 3
    a = [0.9999 / 4 + 0.9999 * pool / 2, 0.9999 / 12 + 0.9999 * pool / 2]
    b = [0.0001 / 2 + 0.0001 * pool / 2, 0.0001 / 6 + 0.0001 * pool / 2]
    total = sum(a) + sum(b)
    assert after.tolist() == [pytest.approx([v / total for v in a]), pytest.approx([v / total for v in b])]


def test_every_feature_has_a_learning_rate_of_its_own():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    rates = feature_rates(model, torch.Generator().manual_seed(0))
    table, matrix, bias, scale, shift = model.parameters()
    assert [tuple(rates[p].shape) for p in (table, matrix, bias)] == [(1, 3), (2, 1), (2,)]
    assert rates[matrix].flatten().tolist() == rates[bias].tolist()  # those of one unit
    assert rates[scale].tolist() == rates[shift].tolist() != rates[bias].tolist()
    assert all(1e-5 <= rate <= 10 for each in rates.values() for rate in each.flatten().tolist())
    logs = feature_rates(nn.Linear(1, 4000), torch.Generator().manual_seed(0)).popitem()[1].log10()
    assert (logs.mean().item(), logs.std().item()) == pytest.approx((-2, 6 / math.sqrt(12)), abs=0.1)


def test_predictions_are_mixed_by_their_probabilities():
    third = torch.tensor([0.25, 0.75])
    digits, feed = load_task("digits"), load_task("feed")
    outputs = [torch.tensor([[0.0, math.log(3)]]), torch.tensor([[0.0, 0.0]])]  # (1/4, 3/4) and (1/2, 1/2)
    assert mixture(digits, outputs, third).exp().tolist() == [pytest.approx([0.4375, 0.5625])]
    odds = [torch.tensor([math.log(3)]), torch.tensor([0.0])]  # 3/4 and 1/2
    assert mixture(feed, odds, third).sigmoid().tolist() == pytest.approx([0.5625])
    assert mixture(Quadratic(size=2), odds, third).tolist() == pytest.approx([math.log(3) / 4])
    layer = nn.Linear(2, 3)
    both = Mixture(digits, [layer, layer])
    features = torch.randn(4, 2)
    torch.testing.assert_close(both(features), layer(features).log_softmax(dim=-1))
    outputs = Outputs(layer, digits)
    torch.testing.assert_close(outputs(features).exp().sum(dim=-1), torch.ones(4))


def test_a_greedy_soup_leaves_out_what_makes_it_worse():
    task = Quadratic(size=2, condition=1.0)

    def at(*values):
        model = task.build_model(0)
        with torch.no_grad():
            next(model.parameters()).copy_(torch.tensor(values))
        return model

    models = [at(3.0, 0.0), at(1.0, 1.0), at(-1.0, 0.0)]
    (mean,) = uniform_soup(models).parameters()
    assert mean.tolist() == pytest.approx([1.0, 1 / 3])
    # The best is (-1, 0); with (1, 1) the mean is (0, .5), which is better, and with (3, 0) too it is worse.
    (soup,) = greedy_soup(models, task).parameters()
    assert soup.tolist() == pytest.approx([0.0, 0.5])


def test_natural_evolution_moves_the_log_learning_rate():
    # Ranks of four replicas: log 3 - log k, so 1.0986, 0.4055, 0, 0, over their sum, minus a quarter.
    utilities = [1.0986 / 1.5041 - 0.25, 0.4055 / 1.5041 - 0.25, -0.25, -0.25]
    multipliers = [0.5, 0.8, 1.25, 2.0]
    by_hand = sum(u * math.log(m) for u, m in zip(utilities, [2.0, 1.25, 0.5, 0.8], strict=True))
    assert nes_step(0.1, [3.0, math.inf, 2.0, 1.0], multipliers) == pytest.approx(0.1 + by_hand, abs=1e-4)
