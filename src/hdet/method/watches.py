"""Watches of the reference: controllers that look at a run from outside, and do not compare replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from hdet.method import thermostat, weight_decay
from hdet.method.reference import Array, Seen


class ThermostatWatch:
    """Moves the learning rate by what averaging gains.

    Where replicas differ its rounds end at syncs.

    Args:
        total_steps: of the run.
        peak: of the first group's learning rate, as planned.
        probe: gives the loss on the probe.
        replicas_differ: they have values of their own.
        settings: of the thermostat.
    """

    decays: Sequence[float] = ()

    def __init__(
        self,
        total_steps: int,
        *,
        peak: float,
        probe: Callable[[list[Array]], float],
        replicas_differ: bool = False,
        settings: thermostat.Thermostat | None = None,
    ) -> None:
        self._ends = thermostat.round_ends(total_steps)
        self._peak, self._probe, self._waits = peak, probe, replicas_differ
        self._settings = settings or thermostat.Thermostat()
        self._state = thermostat.ThermostatState()
        self._path: list[Seen] = []
        self.factor = 1.0
        self.factors: list[float] = []
        """After every round."""

    def step_made(self, seen: Seen) -> None:
        """See what the mean of a round's weights gains over the last ones."""
        if len(self._state.rounds) == thermostat.LAST:
            return
        self._path.append(seen)
        is_over = seen.step >= self._ends[len(self._state.rounds) + 1]
        if not is_over or (self._waits and not seen.is_sync):
            return
        path, self._path = self._path, []
        averaged = [sum(group) / len(path) for group in zip(*(one.center for one in path), strict=True)]
        ended = thermostat.Round(
            step=seen.step,
            middle=seen.step - (len(path) - 1) / 2,
            lr=fmean(one.bases[0] for one in path) / self._peak,
            end=self._probe(seen.center),
            mean=self._probe(averaged),
            train=fmean(fmean(one.losses) for one in path),
        )
        self._state = thermostat.steered(self._state, ended, self._settings)
        self.factor = math.exp(self._state.log_factor)
        self.factors.append(self.factor)


class HeldOutDecayWatch:
    """Moves the weight decay by held-out data: smaller and larger weights tell what more of it would do.

    Args:
        total_steps: of the run.
        start: weight decay of every group; zero for a group that does not decay.
        peaks: learning rate of every group.
        sizes: numbers in every group.
        probe: gives the losses of the parts of the held-out data.
        settings: of the controller.
    """

    factor = 1.0

    def __init__(
        self,
        total_steps: int,
        *,
        start: Sequence[float],
        peaks: Sequence[float],
        sizes: Sequence[int],
        probe: Callable[[list[Array]], Sequence[float]],
        settings: weight_decay.HeldOutWeightDecay | None = None,
    ) -> None:
        self._total_steps, self._start, self._probe = total_steps, start, probe
        self._settings = settings or weight_decay.HeldOutWeightDecay()
        strengths = [decay * peak * size for decay, peak, size in zip(start, peaks, sizes, strict=True)]
        num_decaying = sum(size for decay, size in zip(start, sizes, strict=True) if decay)
        self._first = sum(strengths) / num_decaying * total_steps
        self._state = weight_decay.DecayState(self._first)
        self._before = 0
        self._losses: list[list[float]] = []
        self._since_look: list[float] = []
        self.decays = list(start)
        self.decays_after: dict[int, list[float]] = {}
        """By the step of each sync."""

    def step_made(self, seen: Seen) -> None:
        """Look at the probe at a sync, if it is time."""
        self._losses.append(seen.losses)
        if not seen.is_sync:
            return
        self._since_look += [fmean(of_replica) for of_replica in zip(*self._losses, strict=True)]
        self._losses = []
        done, before = seen.step / self._total_steps, self._before / self._total_steps
        self._before = seen.step
        if self._settings.is_due(done, before):
            training_loss, self._since_look = fmean(self._since_look), []
            if weight_decay.may_look(done):
                self._look(seen.center, training_loss, done)
        self.decays_after[seen.step] = self.decays

    def _look(self, center: list[Array], training_loss: float, done: float) -> None:
        scaled = [
            [part * scale if decay else part for part, decay in zip(center, self._start, strict=True)]
            for scale in weight_decay.SCALES
        ]
        self._state = weight_decay.moved(
            self._state,
            weight_decay.look_of(*map(self._probe, scaled)),
            training_loss=training_loss,
            share_done=done,
            least=weight_decay.least_strength(self._first),
        )
        self.decays = [decay * self._state.strength / self._first for decay in self._start]
