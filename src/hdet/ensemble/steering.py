"""Steering: what moves the shared values during a run. Nothing, or a controller that compares replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.ensemble.state import check_keys
from hdet.errors import IdenticalLossWarning, WarnOnce
from hdet.explore import ExploredValues, Tunable
from hdet.method.controller import (
    Controller,
    ControllerState,
    auto_temperature,
    floor_matching,
    joint_signals,
    log_update,
    num_controlled_rounds,
    paper_update,
    softmax_weights,
    weighted_deviation,
)
from hdet.records import RoundRecord
from hdet.replicas import Replicas


class Steering:
    """A controller at work. An ensemble has one, and calls these hooks.

    This one does nothing: the schedule alone decides. Controllers derive from it.
    """

    controller = "none"
    """What is at work, in a word."""
    has_gone_back = False
    """Whether the last sync has put earlier weights back."""

    def begin(self, num_steps: int) -> None:
        """Begin, or begin again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
        """

    def sync(self, record: RoundRecord) -> None:
        """Decide at a sync, after replicas were measured and averaged, and tell the record."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers, the same on every replica after converging."""
        return {"controller": self.controller}

    def check_state(self, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this. Any controller takes over from none."""
        check_keys("state_dict steering", state, ("controller",))
        if state["controller"] not in (self.controller, "none"):
            raise ValueError(
                f"state_dict must be of a run with the controller {self.controller!r}, got "
                f"{state['controller']!r}: build the ensemble with the controller that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint. It is called after :meth:`begin`."""


class ComparingSteering(Steering):
    """The controller of the paper, and ours of the same kind, at work.

    Args:
        settings: of the controller.
        values: what is explored; each tunable takes its new base.
        replicas: who is compared.
        sync_every: steps per round. A round that is cut short is not compared.
        total_steps: length of the run, if it is known.
        warn: tells the user, once.
    """

    def __init__(
        self,
        settings: Controller,
        values: ExploredValues,
        replicas: Replicas,
        *,
        sync_every: int,
        total_steps: int | None,
        warn: WarnOnce,
    ) -> None:
        self.controller = settings.form
        self._settings, self._values, self._replicas = settings, values, replicas
        self._sync_every, self._warn = sync_every, warn
        self._num_rounds = 0
        if total_steps is not None:
            self._num_rounds = num_controlled_rounds(settings.start, sync_every, total_steps)
        self._require_work(total_steps)

    def _require_work(self, total_steps: int | None) -> None:
        """Raise if the controller could not do its work here."""
        settings, tunables = self._settings, self._values.tunables
        if total_steps is not None and self._num_rounds < 1:
            raise ValueError(
                f"controller start must leave at least one round to train, got start={settings.start} "
                f"with sync_every={self._sync_every} and total_steps={total_steps}: "
                "start earlier, sync more often, or leave the controller off"
            )
        missing = [tunable.name for tunable in tunables if tunable.floor is None]
        if settings.decay == "floor" and (total_steps is None or missing):
            raise ValueError(
                "decay='floor' needs total_steps and a floor for every hyperparameter, got "
                f"total_steps={total_steps} and no floor for {missing}: "
                "pass total_steps and floor=, or a number as decay"
            )
        incomparable = [tunable.name for tunable in tunables if tunable.changes_loss]
        if incomparable and not self._replicas.has_probe:
            raise ValueError(
                f"probe must be given to steer {incomparable}, got None: they change the loss itself, so the "
                "replicas' training losses cannot be compared. Pass probe=, a function that returns the "
                "plain loss on one fixed batch, or leave the controller off"
            )
        text = "the controller has nothing to compare {}: only its decay acts"
        if not self._values.explores:
            self._warn("nothing to compare", text.format("at spread 0"))
        elif self._replicas.count == 1:
            remedy = ". Train on several ranks, or with hdet.VirtualEnsemble"
            self._warn("nothing to compare", text.format("with one replica") + remedy)

    def sync(self, record: RoundRecord) -> None:
        """Turn the replicas' losses into a move of every base."""
        if record.step < self._settings.start or record.step % self._sync_every:
            return
        scores = record.probes or record.losses
        compared = {
            r: score for r, score in enumerate(scores) if score is not None and r not in record.excluded
        }
        if self._replicas.has_others and self._values.explores:
            self._warn_if_silent(compared)
        replicas, losses = list(compared), list(compared.values())
        weights = [1 / len(replicas)] * len(replicas) if replicas else []
        if self._settings.form == "paper":
            if len(replicas) > 1:
                temperature = self._settings.temperature
                record.temperature = auto_temperature(losses) if temperature == "auto" else float(temperature)
                weights = softmax_weights(losses, record.temperature)
            self._hold_bases(record, replicas, weights)
        else:
            self._correct_bases(record, replicas, losses)
        record.weights = [0.0] * record.num_replicas
        for r, weight in zip(replicas, weights, strict=True):
            record.weights[r] = weight

    def _hold_bases(self, record: RoundRecord, replicas: Sequence[int], weights: Sequence[float]) -> None:
        """The paper's form: the controller keeps a base of its own (eqs. 5-8)."""
        for tunable in self._values.tunables:
            state = tunable.control
            if state is None:  # begin with the base where the schedule has brought it
                start = tunable.inner(tunable.base)
                if start <= 0:
                    continue  # a schedule that begins at zero: not yet
                state = ControllerState(start)
                tunable.decay = self._decay(tunable)
            places = [record.positions[tunable.name][r] for r in replicas]
            values = [state.base * rho for rho in tunable.multipliers(places)]
            signal = weighted_deviation(weights, values) if len(replicas) > 1 else 0.0
            moved = paper_update(
                state,
                signal,
                momentum=self._settings.momentum,
                step_size=self._settings.step_size,
                decay=tunable.decay,
            )
            if moved.velocity == 0 and (signal or state.velocity):
                record.limited[tunable.name] = "the base must stay above zero, so it was halved"
            tunable.hold(moved)
            record.signal[tunable.name] = signal

    def _correct_bases(self, record: RoundRecord, replicas: Sequence[int], losses: Sequence[float]) -> None:
        """Our form: a correction that multiplies the schedule."""
        # A tunable without width this round has no effect to estimate, and takes no part of the others'.
        wide = [tunable for tunable in self._values.tunables if tunable.spread * tunable.share > 0]
        columns = [[record.positions[tunable.name][r] for r in replicas] for tunable in wide]
        signals = joint_signals(columns, losses) if len(replicas) > 1 else [0.0] * len(wide)
        limit = math.log(self._settings.max_correction)
        for tunable, signal in zip(wide, signals, strict=True):
            state = log_update(
                tunable.control or ControllerState(0.0),
                signal,
                momentum=self._settings.momentum,
                step_size=self._settings.step_size,
                half_width=tunable.half_width,
                max_log_correction=limit,
            )
            tunable.correct(state)
            if tunable.control != state:
                record.limited[tunable.name] = "its bounds"
            elif abs(state.base) >= limit:
                record.limited[tunable.name] = f"max_correction={self._settings.max_correction:g}"
            if tunable.name in record.limited:
                self._tell_of_limit(tunable, record.limited[tunable.name])
            record.signal[tunable.name] = signal

    def _tell_of_limit(self, tunable: Tunable, limit: str) -> None:
        self._warn(
            f"limit of {tunable.name}",
            f"the controller has moved {tunable.name} to {tunable.base:.3g}, the limit of {limit}: a value "
            "that runs away is seldom a good one. Score replicas on held-out data (probe=), or set bounds",
        )

    def _decay(self, tunable: Tunable) -> float:
        if self._settings.decay != "floor":
            return self._settings.decay
        assert tunable.floor is not None, "checked when the ensemble was built"
        return floor_matching(tunable.inner(tunable.base), tunable.floor, self._num_rounds)

    def _warn_if_silent(self, compared: dict[int, float]) -> None:
        if not compared:
            self._warn(
                "no losses",
                "the controller saw no loss in this round: pass it, step(loss), or per micro-batch, "
                "observe(loss)",
            )
        elif not self._replicas.has_probe and len(compared) > 1 and len(set(compared.values())) == 1:
            # (Scores on one probe may well be equal, to the last bit, once training has settled.)
            self._warn(
                "identical losses",
                f"all replicas report the same loss ({next(iter(compared.values()))!r}), so the controller "
                "cannot compare them: pass each replica's own loss, not an all-reduced one",
                IdenticalLossWarning,
            )
