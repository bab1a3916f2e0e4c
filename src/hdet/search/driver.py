"""The search for the learning rate, for any framework: a ramp, trials, the answer.

What a framework has to do for it is :class:`Trainee`. Only the order of things is decided here, and by
:mod:`hdet.search.decisions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

from hdet.checks import require_batches, require_count, require_number
from hdet.errors import NotFiniteError, bad_argument
from hdet.search import decisions
from hdet.search.found import FoundLR
from hdet.search.progress import ProgressLine

Batch = TypeVar("Batch")

_MOST_STEPS = 10**8
"""A larger number is none of optimizer steps. The search would take a million of them."""
_HIGHEST = 1e9
"""Of a learning rate to start from. The search multiplies it, and torch's numbers end at 1e38."""
_PROBE_STEPS = 4
"""Without a probe, the batches of so many steps serve as one. Trials do not train on them."""
_SAME = 1e-3
"""Share of a loss by which it may differ on the same weights and data: not every kernel repeats its sums."""


class Trainee(Protocol):
    """Trains, scores and tries out for a search. Factors are on the user's learning rates.

    Losses that are not finite are returned as they are.
    """

    asked: Sequence[float]
    """The user's learning rates."""
    steps_shrink: bool
    """The optimizer's steps shrink with the root of their number, as Adagrad's do."""

    def num_trials_at_once(self, batch: Any) -> int:
        """Look at the first batch, and say how many trials are made at the same time on all replicas."""
        ...

    def has_enough(self, batch: Any) -> bool:
        """Tell if a batch can be split for the trials that are made at the same time."""
        ...

    def without_bad(self, batches: list[Any]) -> list[Any]:
        """Leave out and count batches whose loss is not finite with the weights that the model has."""
        ...

    def score(self, batches: Sequence[Any]) -> float:
        """Take the mean loss of these batches over all replicas. Nothing is trained."""
        ...

    def begin_ramp(self) -> None:
        """Get ready for the first step, with an optimizer that knows nothing."""

    def ramp_step(self, factor: float, batch: Any) -> None:
        """Train all replicas together for a step. Where the loss is not finite, count the batch instead."""

    def keep_weights(self) -> None:
        """Remember the weights of the model. All trials start from those that were kept last."""

    def try_out(
        self,
        factors: Sequence[float],
        turns: Iterable[list[Any]],
        probe: list[Any],
        steps_made: Callable[[int], None],
    ) -> Sequence[float]:
        """Make a trial with each factor, and score it on the probe.

        Args:
            factors: one for each trial. Those that are made at the same time are side by side.
            turns: the batches of a turn, one for each step. They must be taken when the turn begins.
            probe: what is scored on.
            steps_made: is called now and then with the number of steps since, of all trials together.
        """
        ...

    def num_bad(self) -> int:
        """Count the batches that were left out so far, on all replicas."""
        ...


class Search:
    """One search.

    Args:
        trainee: what trains.
        batches: training batches that never end.
        probe: batches that trials are scored on. None for the first few training batches.
        total_steps: length of the run.
        progress: is told what is done.
    """

    def __init__(
        self,
        trainee: Trainee,
        batches: Iterator[Any],
        *,
        probe: Sequence[Any] | None,
        total_steps: int,
        progress: ProgressLine,
    ) -> None:
        first = next(batches)  # its size tells how many trials there can be
        self._num_at_once = trainee.num_trials_at_once(first)
        self._trainee = trainee
        self._batches = chain([first], batches)
        self._sizes = decisions.lengths(total_steps, self._num_at_once)
        self._total_steps = total_steps
        self._progress = progress
        self._is_held_out = probe is not None
        self._probe = [next(self._batches) for _ in range(_PROBE_STEPS)] if probe is None else [*probe]

    def run(self) -> FoundLR:
        """Make the ramp, then trials until they tell."""
        first_score = self._trainee.score(self._probe)
        if not (math.isfinite(first_score) or self._is_held_out):
            self._probe = self._trainee.without_bad(self._probe) or self._probe
            first_score = self._trainee.score(self._probe)
        if not math.isfinite(first_score):
            raise NotFiniteError(
                "loss must be finite at the weights that the search starts from, but it is not: check the "
                "data and the model"
            )
        seen, lead = self._ramp()
        num_steps, trial_steps, trials = len(seen), self._sizes.trial, list[decisions.Trial]()
        while True:
            trials += self._trials(lead, trial_steps)
            num_steps += trial_steps * self._sizes.num_turns
            more = trial_steps * self._sizes.num_turns
            if beyond := decisions.next_lead(trials, first_score, num_steps + more, self._total_steps):
                lead = beyond
            elif decisions.should_lengthen(trials, first_score, num_steps + 2 * more, self._total_steps):
                trials, trial_steps = [], 2 * trial_steps
            else:
                break
        growth = (
            decisions.growth_by_age(trial_steps, self._total_steps) if self._trainee.steps_shrink else 1.0
        )
        found = decisions.answer(
            trials, first_score, lengthened=trial_steps / self._sizes.trial, growth=growth
        )
        num_bad, asked = self._trainee.num_bad(), self._trainee.asked
        left_out = f"; {num_bad} batches whose loss is not finite were left out" if num_bad else ""
        if self._is_noisy:
            left_out += (
                "; the loss of the same data differs from call to call, so the answer is unsure: let it draw "
                "its random numbers from torch's own generator"
            )
        shown = next(lr for lr in asked if lr)
        return FoundLR(
            lr=[found.factor * lr for lr in asked],
            low=[found.low * lr for lr in asked],
            high=[found.high * lr for lr in asked],
            asked=list(asked),
            reason=found.reason + left_out,
            ramp=[(shown * factor, loss) for factor, loss in seen],
            trials=[(shown * trial.factor, trial.score) for trial in trials],
            num_steps=num_steps,
            total_steps=self._total_steps,
        )

    def _ramp(self) -> tuple[list[tuple[float, float]], float]:
        """Raise the learning rate until the loss turns: factors and losses, and the factor of the lowest."""
        self._trainee.begin_ramp()
        self._progress.begin("ramp", self._sizes.most_ramp_steps)
        once = self._trainee.score(self._probe[:1])
        ramp, seen = decisions.Ramp(), list[tuple[float, float]]()
        while not ramp.is_over:
            step = ramp.num_steps
            factor, loss = decisions.ramp_factor(step, self._sizes.ramp), self._trainee.score(self._probe[:1])
            seen.append((factor, loss if math.isfinite(loss) else math.inf))
            ramp = decisions.next_ramp(ramp, loss, self._sizes)
            if ramp.low_step == step:
                self._trainee.keep_weights()
            if not ramp.is_over:
                self._trainee.ramp_step(factor, next(self._batches))
            self._progress.step()
        self._is_noisy = abs(seen[0][1] - once) > _SAME * abs(once)
        return seen, decisions.ramp_factor(ramp.low_step, self._sizes.ramp)

    def _trials(self, lead: float, num_steps: int) -> list[decisions.Trial]:
        factors = decisions.trial_factors(lead, self._num_at_once * self._sizes.num_turns)
        turns = ([self._next_whole() for _ in range(num_steps)] for _ in range(self._sizes.num_turns))
        self._progress.begin("trials", len(factors) * num_steps)
        scores = self._trainee.try_out(factors, turns, self._probe, self._progress.step)
        return [
            decisions.Trial(f, s if math.isfinite(s) else None) for f, s in zip(factors, scores, strict=True)
        ]

    def _next_whole(self) -> Any:
        """Take the next batch that can be split: the last one of an epoch may be too small."""
        return next(batch for batch in self._batches if self._trainee.has_enough(batch))


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Give the batches over and over. Raises where they ended and cannot start over.

    >>> stream = endless([1, 2])
    >>> [next(stream) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """
    require_batches(batches, "pass the DataLoader, or a list of batches")
    while True:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
        if is_empty:
            raise ValueError(
                "batches must have at least one batch, or be able to start over, but they ran out: pass the "
                "DataLoader itself, not iter(loader) or a generator"
            )


def require_length(total_steps: int) -> None:
    """Raise where a run is too short for a search."""
    require_count(
        "total_steps",
        total_steps,
        at_least=decisions.LEAST_STEPS,
        remedy="a shorter run cannot afford a search. Count optimizer steps, which are epochs times "
        "len(loader)",
    )
    if total_steps > _MOST_STEPS:
        remedy = "count optimizer steps, not examples or tokens"
        raise bad_argument("total_steps", f"must be at most {_MOST_STEPS}", str(total_steps), remedy)


def require_guess(name: str, asked: Sequence[float]) -> None:
    """Raise where a search has no learning rate to start from."""
    for value in asked:
        require_number(name, value, at_least=0, at_most=_HIGHEST)
    if not any(asked):
        raise bad_argument(name, "must be above 0", "0 in all", "give any guess")
