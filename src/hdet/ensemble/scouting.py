"""Scouting: the scout while it runs, within the first steps of an ensemble."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.core.scout import (
    ROOM_ABOVE,
    Scout,
    ScoutState,
    advance,
    fan_factors,
    least_steps,
    may_move,
    steps_per_fan,
    trial_shape,
)
from hdet.explore import Dial
from hdet.replicas import Replicas

__all__ = ["Scouting", "check_scout", "is_adaptive", "set_local_gradients"]


class Scouting:
    """Which fan is running, which step of it, and what each replica's learning rate is.

    Args:
        settings: of the scout.
        dials: of the learning rate; all are scaled together.
        num_replicas: how many there are.
        total_steps: length of the run, if known.
        peaks: what a factor of one stands for, per dial and field.
    """

    def __init__(
        self,
        settings: Scout,
        dials: Sequence[Dial],
        *,
        num_replicas: int,
        total_steps: int | None,
        peaks: Sequence[Sequence[float]],
    ) -> None:
        self.settings, self.dials, self._peaks = settings, list(dials), peaks
        self._num_replicas, self._total_steps = num_replicas, total_steps
        self._lengths = steps_per_fan(settings, num_replicas, total_steps)
        self.state = ScoutState()
        self.begin_fan()

    def begin_fan(self) -> None:
        """Start the next fan, or the same one again."""
        assert self.state.stage != "done"
        self.step, self.num_steps = 0, self._lengths[self.state.stage]
        self.factors = fan_factors(self.state, self.settings, self._num_replicas)

    def put(self, factors: Sequence[float]) -> None:
        """Tell the dials the learning rates of the coming step, each with its replica's factor."""
        shape = trial_shape(self.step, self.num_steps)
        for dial, peaks, factor in zip(self.dials, self._peaks, factors, strict=True):
            dial.held = [shape * peak for peak in peaks]
            dial.set_fields(factor)

    @property
    def tail_begins(self) -> int:
        """The step of a fan from which training losses count."""
        return round((1 - min(1.0, self.settings.tail)) * self.num_steps)

    def take(self, scores: Sequence[float | None], num_steps_used: int) -> tuple[dict[str, Any], int | None]:
        """The scores of the fan that has ended; what the record says of it, and see :func:`advance`."""
        fan = {
            "stage": self.state.stage,
            "factors": list(self.factors),
            "scores": list(scores),
            "peak_lr": self._peaks[0][0],
        }
        can_move = may_move(self.state, self.settings, self._num_replicas, self._total_steps, num_steps_used)
        leader = advance(self.state, self.factors, scores, may_move=can_move)
        if self.state.stage != "done":
            self.begin_fan()
        return fan, leader

    def decide(
        self, num_steps_used: int, num_joined: int, *, is_adaptive: bool, is_corrected: bool
    ) -> dict[str, Any]:
        """The factor for the run, and how it came about."""
        state = self.state
        transfer = 1.0
        if state.is_found:
            remaining = max(1, (self._total_steps or 0) - num_steps_used)
            share = min(1.0, self._lengths["narrow"] / remaining) if self._total_steps else 1.0
            transfer = self.settings.transfer(
                num_joined, share, is_adaptive=is_adaptive, is_corrected=is_corrected
            )
        factor = state.chosen * transfer
        reason = state.reason
        if factor > state.ceiling:
            factor = state.ceiling
            reason = "higher ones were not stable"
        return {
            "chosen_factor": state.chosen,
            "low": state.low,
            "high": state.high,
            "transfer": transfer,
            "factor": factor,
            "reason": reason,
        }

    def room_above(self, factor: float) -> float:
        """How far a controller may raise this factor, by what trials did not survive."""
        return ROOM_ABOVE * self.state.ceiling / factor

    def state_dict(self) -> dict[str, Any]:
        """Numbers only. A fan that was begun is begun again."""
        return self.state.to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint."""
        known = {field.name for field in fields(ScoutState)}
        self.state = ScoutState(**copy.deepcopy({k: v for k, v in state.items() if k in known}))
        if len(self.state.grid) % self._num_replicas:  # of another number of replicas
            self.state.grid = []
        self.begin_fan()


def check_scout(
    scout: object,
    *,
    dials: Sequence[Dial],
    model: nn.Module | None,
    replicas: Replicas,
    total_steps: int | None,
) -> None:
    """Raise if the scout could not do its work here."""
    if not isinstance(scout, Scout):
        raise TypeError(f"scout must be an hdet.Scout or None, got {scout!r} of type {type(scout).__name__}")
    if not dials:
        raise ValueError(
            "explore must hold an hdet.LearningRate for the scout to find, got none: add "
            "hdet.LearningRate(spread=0)"
        )
    if replicas.communicates and not isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model must be the DistributedDataParallel module for the scout, which keeps gradients local "
            f"while it runs, got {type(model).__name__}: pass model=ddp_model"
        )
    steps_per_fan(scout, replicas.count, total_steps)  # raises if the length is not known
    least = least_steps(scout, replicas.count, total_steps)
    if total_steps is not None and total_steps < least:
        raise ValueError(
            f"total_steps must be at least {least} for this scout with {replicas.count} replicas, got "
            f"{total_steps}: train longer, use more replicas, or leave the scout out"
        )


def is_adaptive(optimizer: Optimizer) -> bool:
    """Whether steps are divided by the gradient's own size, as in Adam."""
    return any(key in optimizer.defaults for key in ("betas", "alpha", "rho", "lr_decay"))


def set_local_gradients(model: nn.Module | None, is_local: bool) -> None:
    """Keep each rank's gradients to itself, or share them again; what ``no_sync`` does within a block."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = not is_local
