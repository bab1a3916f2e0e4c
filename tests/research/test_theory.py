"""Each claim of docs/theory.md: the closed form against a simulation."""

import numpy as np
import pytest

from hdet.lab.tasks.quadratic import Quadratic
from hdet.method.controller import always_positive
from hdet.method.fan_out import multipliers
from research.theory import collinear, gain, horizon, positive


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam"])
def test_replicas_with_a_shared_gradient_lie_on_a_line(optimizer):
    assert collinear.residual(collinear.fan_out(optimizer)) < 1e-13


def test_decoupled_decay_bends_the_line_a_little():
    spread, lr, decay, num_steps = 1 / 9, 0.005, 0.1, 50
    distance = collinear.residual(collinear.fan_out("AdamW", num_steps=num_steps, lr=10 * lr))
    assert 1e-5 < distance < spread * lr * decay * num_steps


def test_local_gradients_leave_the_line():
    assert collinear.residual(collinear.fan_out("Adam", gradients="local")) > 0.1


@pytest.mark.parametrize("decay", [0.0, 0.02])
@pytest.mark.parametrize("momentum", [0.1, 0.5, 0.9])
def test_the_bound_tells_which_bases_stay_positive(momentum, decay):
    edge = positive.largest_step_times_spread(momentum, decay)
    for share, stays in ((0.98, True), (1.02, False)):
        constants = {"spread": share * edge, "momentum": momentum, "step_size": 1.0, "decay": decay}
        assert (min(positive.worst_case(**constants)) >= 0) == stays
        assert always_positive(**constants) == stays


def test_the_papers_constants_cross_zero_in_42_rounds():
    assert not always_positive(**positive.PAPER)
    bases = positive.worst_case(**positive.PAPER)
    assert (len(bases) - 1, bases[-1] < 0 < bases[-2]) == (42, True)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_variance_of_the_multipliers(count):
    assert gain.variance_of_multipliers(count, 0.3) == pytest.approx(np.var(multipliers(count, 0.3)))


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.02, 1 / 9])
def test_the_first_order_of_the_signal(count, spread):
    settings = {"num_replicas": count, "spread": spread, "temperature": 0.1}
    slope = 0.05 * spread / (gain.variance_of_multipliers(count, spread) / 0.1)
    for signed in (slope, -slope):
        first_order = gain.small_signal(signed, **settings)
        assert abs(first_order) == pytest.approx(0.05 * spread)
        assert gain.signal(signed, **settings) == pytest.approx(first_order, rel=0.01)


def test_a_signal_never_leaves_the_spread():
    settings = {"num_replicas": 8, "spread": 1 / 9, "temperature": 1.0}
    assert gain.signal(1e4, **settings) == pytest.approx(-1 / 9)


def test_the_closed_form_is_the_recursion_of_the_quadratic_task():
    task = Quadratic(size=20, batch_size=4)
    bowl = horizon.Bowl(task.curvatures.double().numpy(), 1 / 32)
    start = horizon.State(np.full(20, task.start), np.zeros(20))
    lowest = 0.5 * float(bowl.curvatures.sum())
    for lr, num_steps in ((0.3, 7), (1.2, 50), (0.01, 200)):
        closed = horizon.excess_loss(bowl, horizon.after(bowl, start, lr, num_steps))
        assert closed + lowest == pytest.approx(task.expected_loss([lr] * num_steps, num_replicas=8))


def test_the_closed_form_agrees_with_simulated_runs():
    bowl = horizon.Bowl.standard(size=20)
    state = horizon.after(bowl, horizon.State(np.full(20, 5.0), np.zeros(20)), 0.3, 100)
    for lr, num_steps in ((0.05, 20), (0.8, 100)):
        expected = horizon.excess_loss(bowl, horizon.after(bowl, state, lr, num_steps))
        mean, error = horizon.simulate(bowl, state, [lr] * num_steps, num_runs=2000, seed=0)
        assert abs(mean - expected) < 4 * error
        assert error < 0.05 * expected


@pytest.mark.parametrize("curvature", [1.0, 0.1])
@pytest.mark.parametrize("lr", [0.02, 0.5])
def test_at_the_noise_floor_half_the_learning_rate_looks_best(curvature, lr):
    bowl = horizon.Bowl(np.array([curvature]), 0.7)
    floor = horizon.after(bowl, horizon.State(np.zeros(1), np.zeros(1)), lr, 100_000)
    tried = lr * np.linspace(0.4, 0.6, 401)
    losses = [horizon.excess_loss(bowl, horizon.after(bowl, floor, float(x), 1)) for x in tried]
    assert tried[int(np.argmin(losses))] == pytest.approx(horizon.best_next_lr(lr), rel=1e-3)


def test_what_looks_best_soon_is_too_low_and_leads_astray():
    bowl = horizon.Bowl.standard()
    start = horizon.State(np.full(100, 5.0), np.zeros(100))
    lengths = {"num_rounds": 100, "steps_per_round": 10}
    lrs, losses = horizon.planned(bowl, start, peak=0.775, **lengths)
    _, followed = horizon.greedy(bowl, start, **lengths)
    assert followed[-1] / losses[-1] == pytest.approx(27, rel=0.05)
    state = start
    for i, lr in enumerate(lrs):
        if 30 <= i <= 85:
            assert 0.45 < horizon.best_lr(bowl, state, 1) / lr < 0.56
            assert 0.25 < horizon.best_lr(bowl, state, 10) / lr < 0.47
            assert horizon.best_lr(bowl, state, 100) / lr < 1 / 5
        state = horizon.after(bowl, state, lr, 10)
