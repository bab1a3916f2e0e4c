"""What a run tells about itself: its learning rates, its losses, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hdet.lab.page.runs import Run, number
from hdet.lab.page.series import base_series, learning_rates, mean, plan_series
from hdet.round_record import is_learning_rate


def asked_lr(run: Run) -> float | None:
    """The learning rate that was asked for, as a peak; that of the first group where only records tell."""
    if run.search is not None:
        return run.search.asked
    stated = number(run.config.get("lr"))
    if stated is not None:
        return stated
    name = next(iter(learning_rates(run)), "")
    planned = plan_series(run, name)[1] or base_series(run, name)[1]
    return _peak(planned)


def found_lr(run: Run) -> float | None:
    """The peak learning rate that the run came to: stated, or what it began with times what was learned."""
    stated = number(run.result.get("found_lr"))
    if stated is not None:
        return stated
    start, factors = run.search.found if run.search is not None else asked_lr(run), corrections(run)
    if start is None or not factors:
        return start
    return start * math.exp(math.fsum(map(math.log, factors)) / len(factors))


def used_peak(run: Run) -> float | None:
    """The highest learning rate that any step used."""
    return _peak(value for name in learning_rates(run) for value in base_series(run, name)[1])


def group_peaks(run: Run) -> list[float]:
    """The highest learning rate of every parameter group, as planned; those that are equal count once."""
    plans = (plan_series(run, name)[1] or base_series(run, name)[1] for name in learning_rates(run))
    peaks = (_peak(plan) for plan in plans)
    return list({f"{peak:.3g}": peak for peak in peaks if peak is not None}.values())


def corrections(run: Run) -> list[float]:
    """Final factors on the planned learning rates, one per parameter group."""
    if not run.records or run.config.get("controller") == "paper":
        return []  # the paper's form has no factor: it holds the value itself
    last = run.records[-1].correction
    return [c for name, c in last.items() if is_learning_rate(name) and 0 < c < math.inf]


def compares(run: Run) -> bool:
    """Whether a controller compared the replicas; the guard does not."""
    return any(record.signal for record in run.records)


def num_brakes(run: Run) -> int:
    """How often the guard went back."""
    return run.records[-1].num_brakes if run.records else 0


def training_losses(run: Run) -> list[tuple[int, float]]:
    """Step and mean over the replicas, for every round that has a loss."""
    means = ((record.step, mean(record.losses)) for record in run.records)
    return [(step, loss) for step, loss in means if loss is not None]


def excluded_events(run: Run) -> list[tuple[int, int, str]]:
    """Every replica that was left out of a sync: step, replica, reason."""
    return [(record.step, replica, why) for record in run.records for replica, why in record.excluded.items()]


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the loss, and without those that are a part of another.

    >>> main_metrics({"loss": 0.3, "loss_like": 0.2, "auc_like": 0.8, "auc": 0.7})
    {'auc': 0.7}
    """
    wholes = {"loss", *metrics}
    parts = {name for name in metrics for whole in wholes if name.startswith(f"{whole}_")}
    return {name: value for name, value in metrics.items() if name not in parts | {"loss"}}


def are_comparable(runs: Sequence[Run]) -> bool:
    """Whether all runs measured the same loss on the same task."""
    return len({(str(run.config.get("task")), run.loss_unit) for run in runs}) == 1


def is_sweep(runs: Sequence[Run]) -> bool:
    """Whether the runs differ in nothing but their learning rate, which each has taken as it was given."""
    rates = {asked_lr(run) for run in runs}
    varied = ("lr", "name")
    settings = {str({key: value for key, value in run.config.items() if key not in varied}) for run in runs}
    is_plain = not any(run.search or compares(run) or not run.config for run in runs)
    return len(rates) == len(runs) > 2 and None not in rates and len(settings) == 1 and is_plain


def highest_shown(losses: Sequence[float], untrained: float | None) -> float:
    """Where an axis of losses ends: one far above that of the untrained weights would flatten all others.

    >>> highest_shown([0.5, 1.0, 90.0], 2.0), highest_shown([0.5, 1.0], 2.0), highest_shown([3.0], None)
    (2.3, 1.0, 3.0)
    """
    low, high = min(losses), max(losses)
    return high if untrained is None else max(low, min(high, untrained + 0.2 * (untrained - low)))


def _peak(values: Iterable[float]) -> float | None:
    return max((value for value in values if 0 < value < math.inf), default=None)
