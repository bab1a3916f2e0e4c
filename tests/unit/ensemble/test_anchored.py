"""The anchored controller at work: which learning rates the signals move."""

import math

import pytest
import torch
from torch import nn

import hdet
from hdet.core.anchored import AnchoredController
from hdet.ensemble.anchor import Anchor
from hdet.ensemble.anchored import AnchoredSteering

SETTINGS = AnchoredController(start=0.0, limit=2.0)


class Run:
    """Two groups of two weights, a run of 1000 steps."""

    def __init__(self, settings: AnchoredController, *, per_group=True, room_above=math.inf) -> None:
        groups = [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(2)]
        self.parameters = [group["params"][0] for group in groups]
        self.ensemble = hdet.Ensemble(
            torch.optim.SGD(groups, lr=0.1),
            explore=[hdet.LearningRate(0.0, per_group=per_group)],
            controller=settings,
            total_steps=1000,
        )
        assert isinstance(self.ensemble.steering, AnchoredSteering)
        self.steering = self.ensemble.steering
        self.steering.begin(0, room_above)

    def step(self, slopes: list[float]) -> None:
        """One step with these gradients of the groups along the way that was travelled."""
        for group, parameter, slope in zip(
            self.steering.anchor.average, self.parameters, slopes, strict=True
        ):
            group[0].fill_(1.0)
            parameter.data.fill_(1.0)
            parameter.grad = torch.full((2,), slope)
        self.steering.gradients_ready()
        self.steering.step_made(1)

    def control(self, slopes: list[float], num_times: int) -> list[float]:
        """This many control times; the factors on the learning rates."""
        for _ in range(num_times):
            before = self.steering.memory.states
            while self.steering.memory.states == before:
                self.step(slopes)
        return [lr / 0.1 for lr in self.ensemble.found_lr.values()]


def test_a_group_may_rise_above_the_others_and_does_not_fall_below_them():
    assert Run(SETTINGS).control([-3.0, 1.0], 60) == pytest.approx([4.0, 2.0])  # together: more
    assert Run(SETTINGS).control([-1.0, 3.0], 60) == pytest.approx([4.0, 0.5])  # together: less
    assert Run(SETTINGS).control([3.0, 1.0], 60) == pytest.approx([0.5, 0.5])


def test_one_factor_for_all_where_groups_are_not_followed_or_share_a_tunable():
    together = AnchoredController(start=0.0, limit=2.0, per_group=False)
    assert Run(together).control([-3.0, 1.0], 60) == pytest.approx([2.0, 2.0])
    assert Run(SETTINGS, per_group=False).control([-3.0, 1.0], 60) == pytest.approx([2.0])


def test_the_ceiling_holds_for_groups_too():
    assert Run(SETTINGS, room_above=3.0).control([-3.0, 1.0], 60) == pytest.approx([3.0, 2.0])
    assert Run(SETTINGS, room_above=1.5).control([-3.0, 1.0], 60) == pytest.approx([1.5, 1.5])


def test_a_checkpoint_made_without_groups_goes_on_from_its_common_factor():
    together, run = Run(AnchoredController(start=0.0, per_group=False)), Run(SETTINGS)
    together.control([-3.0, 1.0], 60)
    run.steering.load_state_dict(together.steering.state_dict())
    assert [math.exp(state.log_factor) for state in run.steering.memory.states] == pytest.approx([2.0] * 3)
    assert run.control([-3.0, 1.0], 40) == pytest.approx([4.0, 2.0])


def test_signals_that_overflow_on_both_sides_are_left_out():
    run = Run(SETTINGS)
    for _ in range(40):
        run.step([3e38, -3e38])
    assert [state.log_factor for state in run.steering.memory.states] == [0.0] * 3


def test_a_closed_gate_ends_the_measuring():
    run = Run(SETTINGS)
    assert run.steering.is_measuring
    run.steering.memory = run.steering.memory._replace(gate="training data repeats")
    assert not run.steering.is_measuring
    for _ in range(100):
        run.step([1.0, 1.0])
    assert run.steering.anchor.num_summed == 0
    assert [state.num_controls for state in run.steering.memory.states] == [0] * 3


def test_the_signal_by_hand():
    anchor = Anchor([[torch.tensor([1.0, 2.0])], [torch.tensor([3.0])]])
    anchor.add_weights([[torch.tensor([2.0, 2.0])], [torch.tensor([5.0])]], weight=0.5)  # E - x0: .5 0, 1
    anchor.add_signal([[torch.tensor([4.0, 9.0])], [torch.tensor([-1.0])]])
    anchor.add_signal([[torch.tensor([0.0, 9.0])], [None]])
    assert anchor.means() == [1.0, -0.5]
    anchor.add_decay([[torch.tensor([2.0, 2.0])], [None]])
    assert anchor.means() == [2.0, -0.5]
    anchor.clear_sums()
    assert anchor.means() == [0.0, 0.0]
