"""The anchor: which learning rates the signals move."""

import math

import pytest
import torch

from hdet.core.anchored import AnchoredController
from hdet.ensemble.anchor import Anchor

SETTINGS = AnchoredController(start=0.0, limit=2.0)


def make(settings: AnchoredController, *, dial_of_group=(0, 1), **more) -> Anchor:
    groups = [[torch.zeros(2)] for _ in dial_of_group]
    return Anchor(settings, groups, total_steps=1000, dial_of_group=dial_of_group, **more)


def control(anchor: Anchor, slopes: list[float], num_times: int) -> list[float]:
    """Control times with these gradients of the groups along the way that was travelled; the factors."""
    for _ in range(num_times):
        for group in anchor.average:
            group[0].fill_(1.0)
        is_time = False
        while not is_time:
            if anchor.is_measuring:
                anchor.add_signal([[torch.full((2,), slope)] for slope in slopes])
            is_time = anchor.count_step()
        anchor.control(anchor.own_signals(), loss=None)
    return [math.exp(u) for u in anchor.log_factors]


def test_a_group_may_rise_above_the_others_and_does_not_fall_below_them():
    assert control(make(SETTINGS), [-3.0, 1.0], 60) == pytest.approx([4.0, 2.0])  # together: more
    assert control(make(SETTINGS), [-1.0, 3.0], 60) == pytest.approx([4.0, 0.5])  # together: less
    assert control(make(SETTINGS), [3.0, 1.0], 60) == pytest.approx([0.5, 0.5])


def test_one_factor_for_all_where_groups_are_not_followed_or_share_a_dial():
    together = AnchoredController(start=0.0, limit=2.0, per_group=False)
    assert control(make(together), [-3.0, 1.0], 60) == pytest.approx([2.0, 2.0])
    assert control(make(SETTINGS, dial_of_group=(0, 0)), [-3.0, 1.0], 60) == pytest.approx([2.0])


def test_the_ceiling_holds_for_groups_too():
    assert control(make(SETTINGS, ceiling=3.0), [-3.0, 1.0], 60) == pytest.approx([3.0, 2.0])
    assert control(make(SETTINGS, ceiling=1.5), [-3.0, 1.0], 60) == pytest.approx([1.5, 1.5])


def test_a_checkpoint_made_without_groups_goes_on_from_its_common_factor():
    together = make(AnchoredController(start=0.0, per_group=False))
    control(together, [-3.0, 1.0], 60)
    anchor = make(SETTINGS)
    anchor.load_state_dict(together.state_dict())
    assert [math.exp(u) for u in anchor.log_factors] == pytest.approx([2.0, 2.0])
    assert control(anchor, [-3.0, 1.0], 40) == pytest.approx([4.0, 2.0])


def test_a_checkpoint_that_knows_no_common_factor_keeps_those_of_its_groups():
    anchor = make(SETTINGS)
    state = anchor.state_dict()
    state["states"] = [[math.log(0.5), 0.1, 0.1, 9], [math.log(2.0), -0.1, 0.1, 9]]
    state["signals"] = [0.5, -0.5]
    del state["watch"], state["num_brakes"]
    anchor.load_state_dict(state)
    assert [math.exp(u) for u in anchor.log_factors] == pytest.approx([0.5, 2.0])


def test_signals_that_overflow_on_both_sides_are_left_out():
    anchor = make(SETTINGS)
    for group in anchor.average:
        group[0].fill_(1.0)
    anchor.add_signal([[torch.full((2,), 3e38)], [torch.full((2,), -3e38)]])
    anchor.count_step()
    anchor.control(anchor.own_signals(), loss=None)
    assert anchor.log_factors == [0.0, 0.0]


def test_a_closed_gate_ends_the_measuring():
    anchor = make(SETTINGS)
    anchor.gate = "training data repeats"
    assert not anchor.is_measuring
    assert not any(anchor.count_step() for _ in range(100))
