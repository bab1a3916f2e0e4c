"""Steering by comparing replicas: the controller of the paper, and ours of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.checks import SAME_SETTINGS, check_keys, check_numbers, named
from hdet.errors import IdenticalLossWarning, bad_argument
from hdet.explore import Tunable
from hdet.method import controller as rules
from hdet.records import RoundRecord
from hdet.round_record import ComparingRecord
from hdet.steering.port import Steering, Surroundings


class ComparingSteering(Steering):
    """A :class:`hdet.Controller` at work: it compares the replicas at every sync."""

    name = "comparing"
    kind = rules.Controller
    compares = True
    settings: rules.Controller

    def __init__(self, settings: rules.Controller, around: Surroundings) -> None:
        super().__init__(settings, around)
        self._tunables = [tunable for tunable in self.values.tunables if not tunable.steered_by]
        self._constants = {"momentum": settings.momentum, "step_size": settings.step_size}
        self._num_rounds, total_steps = 0, around.total_steps
        if total_steps is not None:
            self._num_rounds = rules.num_controlled_rounds(settings.start, around.sync_every, total_steps)
        self._require_work(total_steps)
        self._forget()

    def _forget(self) -> None:
        self._states: dict[str, rules.ControllerState] = {}
        self._decays: dict[str, float] = {}

    def _require_work(self, total_steps: int | None) -> None:
        """Raise if the controller could not do its work here."""
        settings, tunables = self.settings, self._tunables
        if total_steps is not None and self._num_rounds < 1:
            every, remedy = (
                self.around.sync_every,
                "start earlier, sync more often, or leave the controller off",
            )
            got = f"start={settings.start} with sync_every={every} and total_steps={total_steps}"
            raise bad_argument("controller start", "must leave at least one round to train", got, remedy)
        missing = [tunable.name for tunable in tunables if tunable.floor is None and settings.end == "floor"]
        if settings.end != 1.0 and (total_steps is None or missing):
            needs, got = "needs total_steps", f"total_steps={total_steps}"
            if missing:
                needs, got = (
                    f"{needs} and a floor for every hyperparameter",
                    f"{got} and no floor for {missing}",
                )
            remedy = "pass total_steps, and with 'floor' a floor=; or end=1"
            raise bad_argument(f"end={settings.end!r}", needs, got, remedy)
        incomparable = [tunable.name for tunable in tunables if tunable.changes_loss]
        if incomparable and self.replicas.probe is None:
            remedy = (
                "they change the loss itself, so the replicas' training losses cannot be compared. Pass "
                "probe=hdet.Probe(batches, loss) with the plain loss, or leave the controller off"
            )
            raise bad_argument("probe", f"must be given to steer {incomparable}", "None", remedy)
        text = "the controller has nothing to compare {}: only its decay acts"
        if not self.values.explores:
            self.warn("nothing to compare", text.format("at spread 0"))
        elif self.replicas.count == 1:
            remedy = ". Train on several ranks, or with hdet.VirtualEnsemble"
            self.warn("nothing to compare", text.format("with one replica") + remedy)

    def begin(self, num_steps: int) -> None:
        """Begin with the bases as the schedule has them."""
        self._forget()

    def sync(self, record: RoundRecord) -> None:
        """Turn the replicas' losses into a move of every base."""
        section = ComparingRecord()
        record.controllers[self.name] = section
        if record.step >= self.settings.start and record.step % self.around.sync_every == 0:
            self._compare(record, section)
        section.velocity = {name: state.velocity for name, state in self._states.items()}

    def _compare(self, record: RoundRecord, section: ComparingRecord) -> None:
        scores = enumerate(record.probes or record.losses)
        compared = {r: x for r, x in scores if x is not None and r not in record.excluded}
        is_silent = len(set(compared.values())) < 2
        if is_silent and self.replicas.has_others and self.values.explores:
            self._warn_of_silence(compared)
        replicas, losses = list(compared), list(compared.values())
        weights = [1 / len(replicas)] * len(replicas) if replicas else []
        if self.settings.form == "paper":
            if len(replicas) > 1:
                sigma = self.settings.temperature
                section.temperature = rules.auto_temperature(losses) if sigma == "auto" else float(sigma)
                weights = rules.softmax_weights(losses, section.temperature)
            self._hold_bases(record, section, replicas, weights)
        else:
            self._correct_bases(record, section, replicas, losses)
        section.weights = [0.0] * record.num_replicas
        for r, weight in zip(replicas, weights, strict=True):
            section.weights[r] = weight

    def _hold_bases(
        self,
        record: RoundRecord,
        section: ComparingRecord,
        replicas: Sequence[int],
        weights: Sequence[float],
    ) -> None:
        """Keep a base of the controller's own, as the paper does (eqs. 5-8)."""
        for tunable in self._tunables:
            name = tunable.name
            state = self._states.get(name)
            if state is None:  # begin with the base where the schedule has brought it
                start = tunable.planned
                if start <= 0:
                    continue  # a schedule that begins at zero: not yet
                state = rules.ControllerState(start)
                self._decays[name] = self._decay(tunable)
            values = [state.base * record.multipliers[name][r] for r in replicas]
            signal = rules.weighted_deviation(weights, values) if len(replicas) > 1 else 0.0
            moved = rules.paper_update(state, signal, decay=self._decays[name], **self._constants)
            if moved.velocity == 0 and (signal or state.velocity):
                section.limited[name] = "the base must stay above zero, so it was halved"
            held = tunable.hold(tunable.inner(moved.base))
            self._states[name] = rules.ControllerState(tunable.inner(held), moved.velocity)
            section.signal[name] = signal

    def _correct_bases(
        self,
        record: RoundRecord,
        section: ComparingRecord,
        replicas: Sequence[int],
        losses: Sequence[float],
    ) -> None:
        """Multiply the schedule by a correction, which is our form."""
        # A tunable without width this round has no effect to estimate, and takes no part of the others'.
        wide = [tunable for tunable in self._tunables if tunable.spread * tunable.share > 0]
        columns = [[record.positions[tunable.name][r] for r in replicas] for tunable in wide]
        signals = rules.joint_signals(columns, losses) if len(replicas) > 1 else [0.0] * len(wide)
        limit = math.log(self.settings.max_correction)
        for tunable, signal in zip(wide, signals, strict=True):
            name = tunable.name
            state = rules.log_update(
                self._states.get(name, rules.ControllerState(0.0)),
                signal,
                half_width=tunable.half_width,
                max_log_correction=limit,
                **self._constants,
            )
            factor = math.exp(state.base)
            allowed = tunable.set_factor(self.name, factor)
            if allowed != factor:
                state = rules.ControllerState(math.log(allowed), state.velocity)
                section.limited[name] = "its bounds"
            elif abs(state.base) >= limit:
                section.limited[name] = f"max_correction={self.settings.max_correction:g}"
            if name in section.limited:
                self._tell_of_limit(tunable, section.limited[name])
            self._states[name] = state
            section.signal[name] = signal

    def went_back(self) -> None:
        """Stop: what was seen is of weights that are gone."""
        self._states = {name: rules.ControllerState(state.base) for name, state in self._states.items()}

    def state_dict(self) -> dict[str, Any]:
        """Save what it remembers of each hyperparameter: base, velocity and decay."""
        moved = [[name, [*state, self._decays.get(name, 0.0)]] for name, state in self._states.items()]
        return {"form": self.settings.form, "moved": moved}

    def check_state(self, name: str, state: Any) -> None:
        """See :class:`Steering`."""
        check_keys(name, state, ("form", "moved"))
        if state["form"] != self.settings.form:
            must = f"must be {self.settings.form!r}"
            raise bad_argument(f"{name} form", must, repr(state["form"]), SAME_SETTINGS)
        for hyperparameter, numbers in named(f"{name} moved", state["moved"]).items():
            check_numbers(f"{name} {hyperparameter}", numbers, 3)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        self._forget()
        for name, (base, velocity, decay) in state["moved"]:
            self._states[name] = rules.ControllerState(base, velocity)
            self._decays[name] = decay

    def _tell_of_limit(self, tunable: Tunable, limit: str) -> None:
        self.warn(
            f"limit of {tunable.name}",
            f"the controller has moved {tunable.name} to {tunable.base:.3g}, the limit of {limit}: a value "
            "that runs away is seldom a good one. Score replicas on held-out data (probe=), or set bounds",
        )

    def _decay(self, tunable: Tunable) -> float:
        end = self.settings.end
        if end == "floor":
            assert tunable.floor is not None, "checked when the ensemble was built"
            end = tunable.floor / tunable.planned
        return rules.decay_to(end, self._num_rounds or 1)

    def _warn_of_silence(self, compared: dict[int, float]) -> None:
        if not compared:
            self.warn(
                "no losses",
                "the controller saw no loss in this round: pass it, step(loss), or per micro-batch, "
                "observe(loss)",
            )
        elif self.replicas.probe is None and len(compared) > 1:
            # (Scores on one probe may well be equal, to the last bit, once training has settled.)
            self.warn(
                "identical losses",
                f"all replicas report the same loss ({next(iter(compared.values()))!r}), so the controller "
                "cannot compare them: pass each replica's own loss, not an all-reduced one",
                IdenticalLossWarning,
            )
