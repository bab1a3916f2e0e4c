"""AnchoredSteering: move the learning rates by the gradients' own signal over the whole run so far."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.core.anchored import (
    AnchoredController,
    AnchoredMemory,
    AnchoredState,
    averaging_weight,
    control,
    log_factors,
    measuring_interval,
    next_control,
    watch_probe,
)
from hdet.core.controller import ControllerState
from hdet.core.loss_watch import LossWatch
from hdet.ensemble.anchor import Anchor, decay_terms
from hdet.ensemble.loss_table import LossTable
from hdet.ensemble.steering import Steering
from hdet.explore import ExploredValues
from hdet.replicas import Replicas
from hdet.replicas.losses import LossSum
from hdet.telemetry import RoundRecord

__all__ = ["AnchoredSteering"]


class AnchoredSteering(Steering):
    """The anchored controller at work.

    Args:
        settings: of the controller.
        values: what is explored; the learning rates take corrections.
        replicas: whose gradients it looks at.
        optimizer: its groups say which learning rate each parameter has.
        losses: what replicas have seen.
        total_steps: length of the run, with the scout.
    """

    needs_loss = True
    reads_gradients = True

    def __init__(
        self,
        settings: AnchoredController,
        values: ExploredValues,
        replicas: Replicas,
        optimizer: Optimizer,
        losses: LossTable,
        *,
        total_steps: int,
    ) -> None:
        self._settings, self._values, self._replicas = settings, values, replicas
        self._optimizer, self._losses, self._total_steps = optimizer, losses, total_steps
        self._tunables = values.learning_rates
        tunable_of_group = [0] * len(optimizer.param_groups)
        for i, tunable in enumerate(self._tunables):
            for slot in tunable.slots:
                tunable_of_group[slot.group_index] = i
        self._tunable_of_group = tunable_of_group
        num_followed = len(self._tunables) if settings.per_group and len(self._tunables) > 1 else 0
        self._num_states = 1 + num_followed  # of all groups together, then by tunable
        self.anchor: Anchor | None = None
        """The copies of the weights; there is none while the scout runs."""
        self.memory = self._blank()

    def _blank(self, ceiling: float = math.inf) -> AnchoredMemory:
        count = self._num_states
        return AnchoredMemory((AnchoredState(),) * count, (0.0,) * count, ceiling=ceiling)

    # --- hooks ---------------------------------------------------------------------------------------

    @property
    def watches_probe(self) -> bool:
        """Whether the gate looks at the probe: nobody said when data repeats, and it is still open."""
        return self.anchor is not None and not self.memory.gate and self._settings.repeats_after is None

    @property
    def is_measuring(self) -> bool:
        """Whether the coming step, or the one just made and not yet counted, is one that is looked at."""
        return (
            self.anchor is not None
            and not self.memory.gate
            and (self._num_steps - self._last_control) % self._interval == 0
        )

    def begin(self, num_scout_steps: int, room_above: float) -> None:
        """The run begins: the weights of now are x0."""
        weights = self._replicas.mean_weights()
        settings = self._settings
        self.anchor = Anchor(weights, on_cpu=settings.copy_on_cpu, in_bfloat16=settings.copy_in_bfloat16)
        self._tunable_of_tensor = [
            tunable for tunable, group in zip(self._tunable_of_group, weights, strict=True) for _ in group
        ]
        self.memory = self._blank(room_above)
        self._run_steps = max(1, self._total_steps - num_scout_steps)
        self._num_steps = 0
        self._plan_next(0)
        self._losses.take_recent()

    def _plan_next(self, last_control: int) -> None:
        self._last_control = last_control
        self._next_control = next_control(last_control, self._run_steps)
        self._interval = measuring_interval(self._next_control - last_control)

    def gradients_ready(self) -> None:
        """Add the signal of this step."""
        if self.is_measuring:
            assert self.anchor is not None
            self.anchor.add_signal(self._replicas.mean_gradients())

    def step_made(self, run_step: int) -> None:
        """Move E; at a control time, move the corrections."""
        anchor = self.anchor
        if anchor is None:
            return
        if self.is_measuring:
            share = averaging_weight(self._settings, self._num_steps + 1, self._interval)
            anchor.add_weights(self._replicas.mean_weights(), share)
        self._num_steps += 1
        # There is no control time once the gate is closed.
        if not self.memory.gate and self._num_steps >= self._next_control:
            anchor.add_decay(self._decay_terms(max(1, run_step)))
            self._control(anchor)

    def _decay_terms(self, num_updates: int) -> list[list[Tensor | None]]:
        return [
            decay_terms(group, weights, moments, num_updates, self._optimizer)
            for group, weights, moments in zip(
                self._optimizer.param_groups,
                self._replicas.mean_weights(),
                self._replicas.mean_second_moments(),
                strict=True,
            )
        ]

    def _control(self, anchor: Anchor) -> None:
        by_tunable = [0.0] * len(self._tunables)
        for tunable, mean in zip(self._tunable_of_tensor, anchor.means(), strict=True):
            by_tunable[tunable] += mean
        parts = [sum(by_tunable), *by_tunable][: self._num_states]
        rows, losses = self._replicas.exchange_signals(parts)
        self._losses.add(losses)
        finite = [row for row in rows if all(map(math.isfinite, row))] or rows
        self.memory = control(
            self.memory,
            [sum(column) / len(finite) for column in zip(*finite, strict=True)],
            self._losses.take_recent(),
            self._settings,
            log_time=math.log(self._num_steps / max(1, self._last_control)),
            acts=self._num_steps >= self._settings.start * self._run_steps,
        )
        for tunable, log_factor in zip(
            self._tunables, log_factors(self.memory, len(self._tunables)), strict=True
        ):
            tunable.correct(ControllerState(log_factor))
        self._values.refresh()
        anchor.clear_sums()
        self._plan_next(self._num_steps)

    def sync(self, record: RoundRecord) -> None:
        """Look at the probe, and tell the record what was seen last."""
        if record.excluded and self.anchor is not None:
            self.anchor.heal(self._replicas.mean_weights())
        scores = [score for score in record.probes if score is not None]
        mean = math.fsum(scores) / len(scores) if scores else None
        self.memory = watch_probe(self.memory, record.step, mean, self._settings)
        record.gate, record.num_brakes = self.memory.gate, self.memory.num_brakes
        common, *own = self.memory.signals
        signals = own or [common] * len(self._tunables)
        record.signal = {t.name: signal for t, signal in zip(self._tunables, signals, strict=True)}

    def averaged(self) -> list[Tensor]:
        """E, and the sums of the signal: then one replica's checkpoint is everybody's."""
        if self.anchor is None:
            return []
        return [average for group in self.anchor.average for average in group] + [self.anchor.sums]

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, tensors on the CPU; empty while the scout runs."""
        if self.anchor is None:
            return {}
        memory = self.memory._asdict()
        memory |= {"states": [list(state) for state in self.memory.states], "watch": list(self.memory.watch)}
        return {
            "anchor": self.anchor.state_dict(),
            "memory": memory | {"signals": list(self.memory.signals)},
            "counters": [self._num_steps, self._last_control],
            "recent_losses": list(self._losses.recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, also one that followed no groups: these start from the common factor."""
        if not state or self.anchor is None:
            return
        self.anchor.load_state_dict(state["anchor"])
        memory, count = dict(state["memory"]), self._num_states
        states = [AnchoredState(*each) for each in memory["states"]]
        states += [AnchoredState(states[0].log_factor)] * count
        memory["states"] = tuple(states[:count])
        memory["signals"] = tuple((list(memory["signals"]) + [0.0] * count)[:count])
        memory["watch"] = LossWatch(*memory["watch"])
        self.memory = AnchoredMemory(**memory)
        self._num_steps, last_control = state["counters"]
        self._plan_next(last_control)
        self._losses.recent = LossSum(*state["recent_losses"])
