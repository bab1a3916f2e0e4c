"""FoundLR: what a search for the learning rate has found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdet.errors import HdetError, bad_argument, warn
from hdet.records import RoundRecord, SearchRecord
from hdet.search.decisions import should_search_again, where_it_moves

if TYPE_CHECKING:
    from torch.optim import Optimizer


_STEERED = 2.0
"""What an answer is multiplied by where a thermostat follows. Answers are cautious, because too high costs
more than too low. A thermostat takes back what is too high far better than it raises what is too low."""
_LENGTHS_APART = 2
"""By which factor the length of a run may differ from that of the search, without a warning."""


@dataclass(frozen=True, kw_only=True)
class FoundLR:
    """Holds what :func:`hdet.find_lr` found. Lists have one entry for each parameter group.

    What ``hdet.jax.find_lr`` found is the same. There the entries are for the learning rates of ``tx``.
    """

    lr: list[float]
    """The peak learning rates to train with."""
    low: list[float]
    """The lower end of the likely range. See ``high``."""
    high: list[float]
    """The upper end. The best learning rate of a sweep should lie in this range in four cases of five."""
    asked: list[float]
    """The learning rates that the optimizer had, which is the user's guess."""
    reason: str
    """It says in words how the answer came about."""
    ramp: list[tuple[float, float]] = field(repr=False)
    """Learning rate of the first group that has one, and loss, for each step of the ramp."""
    trials: list[tuple[float, float | None]] = field(repr=False)
    """The same with the score, for each trial. None where the loss was not finite."""
    num_steps: int
    """The search took so many steps. All trials at the same time count as one."""
    total_steps: int | None = None
    """The length of the run that it is for. None in what an earlier version has saved."""
    began_at: list[float] | None = None
    """A second search began here; None where there was one search."""
    clipped: float | None = None
    """Share of the ramp's steps whose gradient was clipped; None without ``clip_norm``."""

    @property
    def expected_loss(self) -> float | None:
        """Name a loss that a run should reach soon, half way to the best trial's; None if none learnt."""
        first = self.ramp[0][1]
        best = min((score for _, score in self.trials if score is not None), default=first)
        return (first + best) / 2 if best < first else None

    @property
    def to_be_steered(self) -> FoundLR:
        """Give what to train with where a thermostat follows: twice this, unless it is your guess."""
        return self if self.is_guess else replace(self, lr=[_STEERED * lr for lr in self.lr])

    @property
    def is_guess(self) -> bool:
        """Tell if the search could not tell, so that your guess stays."""
        return self.lr == self.asked

    @property
    def should_search_again(self) -> bool:
        """Tell if a second search, with this answer as the guess, would know more than the range says.

        The answer is more than 300 times off your guess, or the highest trial did best.
        """
        first = self._first_group
        return should_search_again((self.began_at or self.asked)[first], self.lr[first], self.trials)

    @property
    def next_guess(self) -> list[float] | None:
        """Say where a second search should begin; None where it would not know more."""
        if self.should_search_again:
            return self.lr
        moves = where_it_moves(self.ramp) if self.is_guess else None
        return None if moves is None else [lr * moves / self.asked[self._first_group] for lr in self.asked]

    def then(self, again: FoundLR) -> FoundLR:
        """Join what a second search has found, that began at :attr:`next_guess`."""
        num_steps = self.num_steps + again.num_steps
        if again.is_guess:
            return replace(self, num_steps=num_steps)
        reason = "a second search: " + again.reason.replace("your guess", "where it began")
        began_at = again.asked
        return replace(again, asked=self.asked, began_at=began_at, reason=reason, num_steps=num_steps)

    @property
    def _first_group(self) -> int:
        """Find the first that has a learning rate."""
        return next(i for i, lr in enumerate(self.asked) if lr)

    def __str__(self) -> str:
        def shown(values: Sequence[float]) -> str:
            return ", ".join(f"{value:.3g}" for value in dict.fromkeys(values))

        sureness = f"The best one is probably between {shown(self.low)} and {shown(self.high)} (80 %). "
        if self.is_guess:
            sureness = ""  # the reason says it
        elif self.should_search_again:
            sureness = "The search went to its limits. To be sure, search again with this one as your guess. "
        return (
            f"learning rate {shown(self.lr)} (your guess was {shown(self.asked)}). {sureness}"
            f"It comes from {self.reason}. The search took {self.num_steps} steps."
        )

    def warn_of_other_length(self, total_steps: int) -> None:
        """Warn where a run is much longer or shorter than the one that this was searched for."""
        planned = self.total_steps or total_steps
        if max(total_steps, planned) > _LENGTHS_APART * min(total_steps, planned):
            warn(
                f"found is for a run of {planned} steps, but total_steps is {total_steps}. A run of another "
                f"length needs another learning rate: call find_lr with total_steps={total_steps}"
            )

    def to_record(self, num_replicas: int) -> RoundRecord:
        """Make the record that goes before those of the run, of the first group with a learning rate."""
        first = self._first_group
        search = SearchRecord(
            asked=self.asked[first],
            found=self.lr[first],
            low=self.low[first],
            high=self.high[first],
            reason=self.reason,
            num_steps=self.num_steps,
            ramp=[list(pair) for pair in self.ramp if math.isfinite(pair[1])],
            trials=[list(pair) for pair in self.trials],
        )
        return RoundRecord(round=0, step=0, num_replicas=num_replicas, ends_round=False, search=search)

    def write(self, optimizer: Optimizer) -> None:
        """Give the optimizer the learning rates that were found, as the peaks of a schedule to come."""
        # They import torch, which hdet.jax does without.
        from hdet.replicas.optimizers import plain_optimizer, remember_search, start_rates

        optimizer = plain_optimizer(optimizer)
        if len(optimizer.param_groups) != len(self.lr):
            must = f"must have the {len(self.lr)} parameter groups that the search had"
            got, remedy = str(len(optimizer.param_groups)), "search with the optimizer that trains"
            raise bad_argument("optimizer", must, got, remedy)
        remember_search(optimizer, start_rates(optimizer), self.lr)
        for group, lr in zip(optimizer.param_groups, self.lr, strict=True):
            set_rate(group, lr)
            for name in ("initial_lr", "max_lr"):
                if name in group:
                    group[name] = lr

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the ramp, the trials, the answer and the likely range. This needs matplotlib.

        Args:
            path: where to save the picture; None to return the figure only.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise HdetError("plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.axvspan(self.low[0], self.high[0], alpha=0.15, label="likely")
        axes.plot(*zip(*self.ramp, strict=True), color="0.6", label="ramp")
        trials = [trial for trial in self.trials if trial[1] is not None]
        if trials:
            axes.plot(*zip(*trials, strict=True), "o-", label="trials")
        axes.axvline(self.lr[0], color="black", label=f"found: {self.lr[0]:.3g}")
        axes.axvline(self.asked[0], color="black", linestyle=":", label=f"guess: {self.asked[0]:.3g}")
        losses = [loss for _, loss in [*self.ramp, *trials] if loss is not None and math.isfinite(loss)]
        first = self.ramp[0][1]
        margin = 0.1 * (first - min(losses)) or 1.0
        axes.set_ylim(min(losses) - margin, first + 3 * margin)
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Write a learning rate into a parameter group, in place where it is a tensor."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
