"""Steering: what moves the shared values in a run. Nothing, a comparison of replicas, or the guard."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hdet.checks import require_number
from hdet.ensemble.settings import Settings
from hdet.ensemble.state import check_counts, check_keys, check_numbers
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
from hdet.method.guard import Guard, GuardMemory, watch
from hdet.records import RoundRecord
from hdet.replicas import Replicas

_log = logging.getLogger(__name__)

_MOST_BRAKES = 8
"""A run that collapses again and again has another fault."""
_SHARE_TO_LEARN = 0.15
"""Of the steps: when a run must have reached the loss that is expected of it."""


@dataclass(eq=False)
class Steering:
    """A controller at work. An ensemble has one, and calls these hooks.

    This one does nothing: the schedule alone decides. Controllers derive from it.
    """

    settings: Settings
    """Of the ensemble, the controller's among them."""
    values: ExploredValues
    """Each tunable takes its new base."""
    replicas: Replicas
    """They are compared, and their weights go back."""
    warn: WarnOnce
    """Tells the user, once."""

    def __post_init__(self) -> None:
        """Raise if the controller could not do its work here."""

    controller = "none"
    """Names the controller in a word."""
    has_gone_back = False
    """The last sync has put earlier weights back."""

    @property
    def notes(self) -> list[str]:
        """Tell in words what a summary of the values leaves out."""
        return []

    def try_out(self) -> None:
        """Do once, before anything changes, what could fail late in the run."""

    def begin(self, num_steps: int) -> None:
        """Begin, or begin again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
        """

    def add_loss(self, loss: Any) -> None:
        """Take the loss of a batch, for a controller with rounds of its own."""

    def step_made(self, num_steps: int, record: RoundRecord | None) -> None:
        """Called after every optimizer step, with the record where it was a sync. Collective."""

    def sync(self, record: RoundRecord) -> None:
        """Decide at a sync, after replicas were measured and averaged, and tell the record."""

    def weights_went_back(self) -> None:
        """Take note that another controller has put earlier weights back at this sync."""

    def before_save(self) -> None:
        """Gather what each replica holds a part of. Collective."""

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

    def own_state(self, state: Any) -> Any:
        """Pick this controller's part out of the state of a run that had several."""
        parts = state.get("parts") if isinstance(state, Mapping) else None
        return parts.get(self.controller, {"controller": "none"}) if isinstance(parts, Mapping) else state


class ComparingSteering(Steering):
    """The controller of the paper, and ours of the same kind, at work."""

    def __post_init__(self) -> None:
        settings = self.settings
        assert isinstance(settings.controller, Controller)
        self._told = settings.controller
        self.controller = self._told.form
        self._num_rounds = 0
        if settings.total_steps is not None:
            self._num_rounds = num_controlled_rounds(
                self._told.start, settings.sync_every, settings.total_steps
            )
        self._require_work(settings.total_steps)

    def _require_work(self, total_steps: int | None) -> None:
        """Raise if the controller could not do its work here."""
        told, tunables = self._told, self.values.tunables
        if total_steps is not None and self._num_rounds < 1:
            raise ValueError(
                f"controller start must leave at least one round to train, got start={told.start} "
                f"with sync_every={self.settings.sync_every} and total_steps={total_steps}: "
                "start earlier, sync more often, or leave the controller off"
            )
        missing = [tunable.name for tunable in tunables if tunable.floor is None]
        if told.decay == "floor" and (total_steps is None or missing):
            raise ValueError(
                "decay='floor' needs total_steps and a floor for every hyperparameter, got "
                f"total_steps={total_steps} and no floor for {missing}: "
                "pass total_steps and floor=, or a number as decay"
            )
        incomparable = [tunable.name for tunable in tunables if tunable.changes_loss]
        if incomparable and not self.replicas.has_probe:
            raise ValueError(
                f"probe must be given to steer {incomparable}, got None: they change the loss itself, so the "
                "replicas' training losses cannot be compared. Pass probe=, a function that returns the "
                "plain loss on one fixed batch, or leave the controller off"
            )
        text = "the controller has nothing to compare {}: only its decay acts"
        if not self.values.explores:
            self.warn("nothing to compare", text.format("at spread 0"))
        elif self.replicas.count == 1:
            remedy = ". Train on several ranks, or with hdet.VirtualEnsemble"
            self.warn("nothing to compare", text.format("with one replica") + remedy)

    def sync(self, record: RoundRecord) -> None:
        """Turn the replicas' losses into a move of every base."""
        if record.step < self._told.start or record.step % self.settings.sync_every:
            return
        scores = record.probes or record.losses
        compared = {
            r: score for r, score in enumerate(scores) if score is not None and r not in record.excluded
        }
        if self.replicas.has_others and self.values.explores:
            self._warn_if_silent(compared)
        replicas, losses = list(compared), list(compared.values())
        weights = [1 / len(replicas)] * len(replicas) if replicas else []
        if self._told.form == "paper":
            if len(replicas) > 1:
                temperature = self._told.temperature
                record.temperature = auto_temperature(losses) if temperature == "auto" else float(temperature)
                weights = softmax_weights(losses, record.temperature)
            self._hold_bases(record, replicas, weights)
        else:
            self._correct_bases(record, replicas, losses)
        record.weights = [0.0] * record.num_replicas
        for r, weight in zip(replicas, weights, strict=True):
            record.weights[r] = weight

    def _hold_bases(self, record: RoundRecord, replicas: Sequence[int], weights: Sequence[float]) -> None:
        """Keep a base of the controller's own, as the paper does (eqs. 5-8)."""
        for tunable in self.values.tunables:
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
                momentum=self._told.momentum,
                step_size=self._told.step_size,
                decay=tunable.decay,
            )
            if moved.velocity == 0 and (signal or state.velocity):
                record.limited[tunable.name] = "the base must stay above zero, so it was halved"
            tunable.hold(moved)
            record.signal[tunable.name] = signal

    def _correct_bases(self, record: RoundRecord, replicas: Sequence[int], losses: Sequence[float]) -> None:
        """Multiply the schedule by a correction, which is our form."""
        # A tunable without width this round has no effect to estimate, and takes no part of the others'.
        wide = [tunable for tunable in self.values.tunables if tunable.spread * tunable.share > 0]
        columns = [[record.positions[tunable.name][r] for r in replicas] for tunable in wide]
        signals = joint_signals(columns, losses) if len(replicas) > 1 else [0.0] * len(wide)
        limit = math.log(self._told.max_correction)
        for tunable, signal in zip(wide, signals, strict=True):
            state = log_update(
                tunable.control or ControllerState(0.0),
                signal,
                momentum=self._told.momentum,
                step_size=self._told.step_size,
                half_width=tunable.half_width,
                max_log_correction=limit,
            )
            tunable.correct(state)
            if tunable.control != state:
                record.limited[tunable.name] = "its bounds"
            elif abs(state.base) >= limit:
                record.limited[tunable.name] = f"max_correction={self._told.max_correction:g}"
            if tunable.name in record.limited:
                self._tell_of_limit(tunable, record.limited[tunable.name])
            record.signal[tunable.name] = signal

    def _tell_of_limit(self, tunable: Tunable, limit: str) -> None:
        self.warn(
            f"limit of {tunable.name}",
            f"the controller has moved {tunable.name} to {tunable.base:.3g}, the limit of {limit}: a value "
            "that runs away is seldom a good one. Score replicas on held-out data (probe=), or set bounds",
        )

    def _decay(self, tunable: Tunable) -> float:
        if self._told.decay != "floor":
            return self._told.decay
        assert tunable.floor is not None, "checked when the ensemble was built"
        return floor_matching(tunable.inner(tunable.base), tunable.floor, self._num_rounds)

    def _warn_if_silent(self, compared: dict[int, float]) -> None:
        if not compared:
            self.warn(
                "no losses",
                "the controller saw no loss in this round: pass it, step(loss), or per micro-batch, "
                "observe(loss)",
            )
        elif not self.replicas.has_probe and len(compared) > 1 and len(set(compared.values())) == 1:
            # (Scores on one probe may well be equal, to the last bit, once training has settled.)
            self.warn(
                "identical losses",
                f"all replicas report the same loss ({next(iter(compared.values()))!r}), so the controller "
                "cannot compare them: pass each replica's own loss, not an all-reduced one",
                IdenticalLossWarning,
            )


class GuardSteering(Steering):
    """The guard at work: it goes back where a run loses what it had learnt."""

    controller = "guard"

    def __post_init__(self) -> None:
        told, total_steps = self.settings.controller, self.settings.total_steps
        assert isinstance(told, Guard)
        if total_steps is None:
            raise ValueError(
                "total_steps must be given for a Guard, got None: it needs the length of the run"
            )
        if not self.values.learning_rates:
            raise ValueError(
                "explore must hold an hdet.LearningRate for a Guard to lower, got none: add "
                "hdet.LearningRate(spread=0)"
            )
        self._told = told
        self._total_steps = total_steps
        self._forget()

    def _forget(self) -> None:
        self._memory = GuardMemory()
        self._num_brakes = 0
        self._initial: Any = None
        self._initial_is_checked = False

    def begin(self, num_steps: int) -> None:
        """Copy the weights that the run begins with."""
        self._forget()  # give its memory back first
        self._initial = self._save_point()
        self._began_apart = self.replicas.differ
        self._begin_at(num_steps)

    def _save_point(self) -> Any:
        return self.replicas.save_point(on_cpu=self._told.copy_on_cpu)

    def _begin_at(self, step: int) -> None:
        self._copies: list[tuple[Any, GuardMemory]] = []
        self._next_copy = step + self._told.interval * self._total_steps
        self._learns_until = step + _SHARE_TO_LEARN * self._total_steps

    def sync(self, record: RoundRecord) -> None:
        """Look at the mean loss of the round."""
        record.num_brakes = self._num_brakes
        self.has_gone_back = False
        were_apart = bool(record.excluded) or self._began_apart
        if not self._initial_is_checked and were_apart and not self.replicas.differ:
            # Replicas were not equal since the run began, so parts of the copy do not fit together. Nor may
            # equal replicas go back to weights in which they differ.
            self._initial = None
            self._initial = self._save_point()
        self._initial_is_checked = True
        losses = [
            loss for r, loss in enumerate(record.losses) if loss is not None and r not in record.excluded
        ]
        if not record.ends_round:
            return
        if not losses:
            self.warn(
                "no loss",
                "no loss was given to step(), so the guard cannot see whether the run collapses: call "
                "step(loss), or observe(loss) for each micro-batch",
            )
            return
        self._memory = watch(
            self._memory,
            math.fsum(losses) / len(losses),
            self._told,
            must_have_learnt=record.step >= self._learns_until,
        )
        if self._memory.is_well and record.step >= self._next_copy:
            # Of two, the older one is used: when a collapse shows, the newer may already be spoilt.
            self._copies = self._copies[-1:]  # give memory back before more is taken
            self._copies.append((self._save_point(), self._memory))
            self._next_copy = record.step + self._told.interval * self._total_steps
        elif self._memory.num_bad >= self._told.patience and self._num_brakes < _MOST_BRAKES:
            self._go_back(record)

    def _go_back(self, record: RoundRecord) -> None:
        expected = self._told.expected_loss
        usable = [c for c in self._copies[:1] if expected is None or c[1].lowest <= expected]
        if usable:
            point, self._memory = usable[0]
            self._copies = []  # the next time further back
            self.replicas.restore(point)
            why = "the loss has collapsed, so earlier weights are put back"
        else:
            self.replicas.restore(self._initial)
            self._memory = GuardMemory()
            self._begin_at(record.step)
            why = "the run has lost all that it had learnt, so it begins again"
        self._num_brakes += 1
        record.num_brakes = self._num_brakes
        self.has_gone_back = True
        for tunable in self.values.learning_rates:
            tunable.correct(ControllerState(-self._num_brakes * math.log(self._told.factor)))
        self.values.refresh()
        if self.replicas.is_writer:
            _log.warning(
                "step %d: %s, and the learning rate is divided by %g",
                record.step,
                why,
                self._told.factor,
            )

    def state_dict(self) -> dict[str, Any]:
        """Save what it remembers. The copies are not kept: after a resume the first is the checkpoint's."""
        return {
            "controller": self.controller,
            "memory": list(self._memory),
            "num_brakes": self._num_brakes,
            "expected_loss": self._told.expected_loss,
        }

    def check_state(self, state: Any) -> None:
        """See :class:`Steering`."""
        super().check_state(state)
        if state["controller"] == self.controller:
            check_keys("state_dict steering", state, ("memory", "num_brakes", "expected_loss"))
            check_numbers(
                "state_dict steering memory", state["memory"], len(GuardMemory._fields), is_finite=False
            )
            check_counts("state_dict steering", state, ("num_brakes",))
            if state["expected_loss"] is not None:
                require_number("state_dict steering expected_loss", state["expected_loss"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        if state["controller"] == self.controller:
            self._memory = GuardMemory(*state["memory"])
            self._num_brakes = state["num_brakes"]
            self._told = replace(self._told, expected_loss=state["expected_loss"])
