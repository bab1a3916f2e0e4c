"""ComparingSteering: move the base by comparing the replicas after each round (eqs. 4-8, and our form)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.ensemble.steering import Steering
from hdet.ensemble.warn_once import WarnOnce
from hdet.errors import HdetWarning, IdenticalLossWarning
from hdet.explore import ExploredValues, Tunable
from hdet.method.controller import Controller, ControllerState, log_update, paper_update
from hdet.method.decay import floor_matching
from hdet.method.signal import auto_temperature, joint_signals, softmax_weights, weighted_deviation
from hdet.records import RoundRecord
from hdet.replicas import Replicas


class ComparingSteering(Steering):
    """The controller of the paper, and ours of the same kind, at work.

    Args:
        settings: of the controller.
        values: what is explored; each tunable takes its new base.
        replicas: who is compared.
        sync_every: steps per round. A round that is cut short is not compared.
        num_rounds: how many rounds train on a base that the controller has set.
        warn: tells the user, once.
    """

    def __init__(
        self,
        settings: Controller,
        values: ExploredValues,
        replicas: Replicas,
        *,
        sync_every: int,
        num_rounds: int,
        warn: WarnOnce,
    ) -> None:
        self._settings, self._values, self._replicas = settings, values, replicas
        self._sync_every, self._num_rounds, self._warn = sync_every, num_rounds, warn
        self.controller = settings.form

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
                is_auto = self._settings.temperature == "auto"
                record.temperature = (
                    auto_temperature(losses) if is_auto else float(self._settings.temperature)
                )
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
            state = paper_update(
                state,
                signal,
                momentum=self._settings.momentum,
                step_size=self._settings.step_size,
                decay=tunable.decay,
            )
            tunable.hold(state)
            record.signal[tunable.name] = signal

    def _correct_bases(self, record: RoundRecord, replicas: Sequence[int], losses: Sequence[float]) -> None:
        """Our form: a correction that multiplies the schedule."""
        # A tunable without width this round has no effect to estimate, and takes no part of the others'.
        wide = [tunable for tunable in self._values.tunables if tunable.spread * tunable.share > 0]
        columns = [[record.positions[tunable.name][r] for r in replicas] for tunable in wide]
        signals = joint_signals(columns, losses) if len(replicas) > 1 else [0.0] * len(wide)
        for tunable, signal in zip(wide, signals, strict=True):
            state = log_update(
                tunable.control or ControllerState(0.0),
                signal,
                momentum=self._settings.momentum,
                step_size=self._settings.step_size,
                half_width=tunable.half_width,
                max_log_correction=math.log(self._settings.max_correction),
            )
            tunable.correct(state)
            record.signal[tunable.name] = signal

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
                HdetWarning,
            )
        elif not self._replicas.has_probe and len(compared) > 1 and len(set(compared.values())) == 1:
            # (Scores on one probe may well be equal, to the last bit, once training has settled.)
            self._warn(
                "identical losses",
                f"all replicas report the same loss ({next(iter(compared.values()))!r}), so the controller "
                "cannot compare them: pass each replica's own loss, not an all-reduced one",
                IdenticalLossWarning,
            )
