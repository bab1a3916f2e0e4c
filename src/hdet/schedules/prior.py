"""Prior: what earlier runs say of each parameter group, as a start for the next one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdet.checks import require_number
from hdet.explore import LearningRate
from hdet.records import RoundRecord, read_records
from hdet.round_record import is_learning_rate
from hdet.schedules.replay import export_schedule

_WIDEST = 2.0
"""A group's spread is at most this times the common one, and at least the common one over this."""

_MOST = 0.95
"""A spread of one and more would reach zero."""
_LOWEST = 1 / (25 * 1e4)
"""OneCycleLR's floor over its peak; a schedule may end at zero, a decay cannot."""


@dataclass(frozen=True)
class Prior:
    """A start for each parameter group, in the order of the groups."""

    groups: tuple[str, ...]
    """Their names in the records."""
    spreads: tuple[float, ...]
    """Wider where earlier runs parted the group from the others, narrower where they did not."""
    drops: tuple[float, ...]
    """The learning rate at the end of the run over its peak."""

    def learning_rate(self, max_lr: float, **settings: Any) -> LearningRate:
        """What to give to ``explore``; with ``Controller(form="paper", decay="floor")`` groups decay apart.

        Args:
            max_lr: the peak of the new run.
            settings: further arguments of :class:`hdet.LearningRate`.
        """
        require_number("max_lr", max_lr, above=0)
        floors = [max_lr * drop for drop in self.drops]
        return LearningRate(group_spreads=self.spreads, floor=floors, **settings)


def prior_from(runs: Iterable[str | Path | Sequence[RoundRecord]], *, spread: float = 1 / 9) -> Prior:
    r"""Learn a start for each parameter group from the records of earlier runs.

    A group's drop is the geometric mean over runs of its last learning rate over its highest, at least
    OneCycleLR's. Its spread is

    .. math:: \alpha_g = \alpha \cdot \mathrm{clip}(d_g / \bar d,\ 1/2,\ 2)

    with :math:`d_g` the root mean square over runs of how far, on average over the steps, the log learning
    rate of the group is from the mean of all groups.

    Args:
        runs: of each its records, or the path of their file or of the folder that holds ``records.jsonl``.
        spread: the common one.

    >>> def record(lrs):
    ...     return RoundRecord(round=0, step=2, num_replicas=2, num_steps=2, base=lrs,
    ...                        base_trace={name: [0.1, lr] for name, lr in lrs.items()})
    >>> prior = prior_from([[record({"lr.a": 0.05, "lr.b": 0.0125, "lr.c": 0.025})]], spread=0.1)
    >>> [round(drop, 9) for drop in prior.drops]
    [0.5, 0.125, 0.25]
    >>> [round(spread, 3) for spread in prior.spreads]
    [0.15, 0.15, 0.05]
    """
    require_number("spread", spread, above=0, below=1)
    schedules = [_learning_rates(run) for run in runs]
    if not schedules:
        raise ValueError("runs must hold at least one run, got none")
    groups = tuple(schedules[0])
    for i, schedule in enumerate(schedules):
        if tuple(schedule) != groups:
            raise ValueError(
                f"runs must have the same parameter groups, got {list(groups)} and, in run {i}, "
                f"{list(schedule)}: pass runs of one model"
            )
    if len(groups) < 2:
        raise ValueError(
            f"runs must have trained parameter groups with learning rates of their own, got {list(groups)}: "
            "train with several groups and LearningRate(per_group=True)"
        )
    for name in groups:
        if any(max(schedule[name]) <= 0 for schedule in schedules):
            raise ValueError(
                "runs must train every parameter group, got a learning rate of zero throughout for "
                f"{name!r}: leave the group out"
            )
    logs = [[_mean_log(schedule[name]) for name in groups] for schedule in schedules]
    apart = [[value - statistics.fmean(row) for value in row] for row in logs]
    distances = [math.sqrt(statistics.fmean(row[i] ** 2 for row in apart)) for i in range(len(groups))]
    mean = statistics.fmean(distances)
    shares = [min(_WIDEST, max(1 / _WIDEST, d / mean)) if mean > 0 else 1.0 for d in distances]
    drops = [
        math.exp(statistics.fmean(math.log(max(_LOWEST, s[name][-1] / max(s[name]))) for s in schedules))
        for name in groups
    ]
    return Prior(groups, tuple(min(_MOST, spread * share) for share in shares), tuple(drops))


def _learning_rates(run: str | Path | Sequence[RoundRecord]) -> dict[str, list[float]]:
    if isinstance(run, (str, Path)):
        path = Path(run)
        run = list(read_records(path / "records.jsonl" if path.is_dir() else path))
    schedule = export_schedule(run)
    # lr[1], lr[2] are not groups of their own: they follow lr.
    return {n: values for n, values in schedule.items() if is_learning_rate(n) and not n.startswith("lr[")}


def _mean_log(values: Sequence[float]) -> float:
    return statistics.fmean(math.log(max(value, 1e-300)) for value in values)
