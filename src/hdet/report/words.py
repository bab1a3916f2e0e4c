"""The run in plain words, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.report.runs import Run, number
from hdet.report.series import base_series, learning_rates, mean, plan_series
from hdet.telemetry.names import is_learning_rate

__all__ = [
    "are_comparable",
    "asked_lr",
    "compares",
    "comparison_sentence",
    "corrections",
    "count",
    "duration",
    "excluded_events",
    "figure",
    "found_lr",
    "headline",
    "num_brakes",
    "sentence",
    "training_loss",
]


def figure(value: float | None, digits: int = 3) -> str:
    """A number as one would say it: plain where that is short, else with an exponent.

    >>> figure(0.41234), figure(3e-4), figure(0.00039312, 2), figure(1234567.0), figure(0.0), figure(None)
    ('0.412', '3e-4', '3.9e-4', '1.23e6', '0', 'unknown')
    >>> figure(1.0), figure(600.0), figure(43210.0)
    ('1', '600', '43200')
    """
    if value is None:
        return "unknown"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return "not finite"
    rounded = float(f"{value:.{digits}g}")
    if 0.01 <= abs(rounded) < 1e5:
        text = f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def count(amount: int, what: str) -> str:
    """An amount and its noun.

    >>> count(1, "replica"), count(12000, "step")
    ('1 replica', '12,000 steps')
    """
    return f"{amount:,} {what}" + ("" if amount == 1 else "s")


def duration(seconds: float) -> str:
    """A time in its two largest units.

    >>> duration(0.25), duration(41.3), duration(200), duration(7530), duration(200000)
    ('0.25 s', '41 s', '3 min 20 s', '2 h 6 min', '2 d 8 h')
    """
    if seconds < 10:
        return f"{figure(seconds, 2)} s"
    for size, unit, smaller_size, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        whole, rest = divmod(round(seconds / smaller_size), size // smaller_size)
        if whole:
            return f"{whole} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{round(seconds)} s"


def excluded_events(run: Run) -> list[tuple[int, int, str]]:
    """Every replica that was left out of a sync: step, replica, reason."""
    return [(record.step, replica, why) for record in run.records for replica, why in record.excluded.items()]


def headline(run: Run) -> str:
    """The learning rate that was found, in one sentence; empty where nothing is known of one.

    >>> from pathlib import Path
    >>> headline(Run(path=Path("runs/a"), name="a", config={"lr": 3e-4}))
    'Trained with a learning rate of 3e-4, without a search before.'
    """
    search, asked = run.search, asked_lr(run)
    if search is None:
        began = "Started from" if compares(run) else "Trained with"
        return f"{began} a learning rate of {figure(asked)}, without a search before." if asked else ""
    likely = f"likely between {figure(search.low, 2)} and {figure(search.high, 2)}"
    found = figure(search.found, 2)
    if search.found == search.asked:
        return f"Kept your learning rate of {figure(asked)}: {search.reason.rpartition(': ')[2]}."
    if found == figure(search.asked, 2):
        return f"Found a learning rate of {found}, as you asked for; {likely}."
    return f"Found a learning rate of {found}, {likely}; you asked for {figure(search.asked)}."


def sentence(run: Run) -> str:
    """What happened in the run, in a few plain sentences.

    >>> from pathlib import Path
    >>> sentence(Run(path=Path("runs/a"), name="a"))
    'Nothing has been recorded of this run yet.'
    """
    if not (run.search or run.records or run.evaluations or run.result):
        return "Nothing has been recorded of this run yet."
    parts = [_training(run)]
    if run.records:
        parts += [_moved(run), _averaged(run), _left_out(run)]
    return " ".join(part for part in parts if part)


def comparison_sentence(runs: Sequence[Run]) -> str:
    """Which of several runs ended best, where they can be compared at all."""
    losses = [(run.final_loss, run.name) for run in runs if run.final_loss is not None]
    if len(losses) < 2:
        known = "one has" if losses else "none has"
        return f"{count(len(runs), 'run')}, of which {known} a held-out loss."
    if not are_comparable(runs):
        return (
            f"{count(len(runs), 'run')} on different tasks: their losses cannot be compared with each other."
        )
    (best, name), (worst, other) = min(losses), max(losses)
    text = f"{count(len(runs), 'run')} compared. “{name}” has the lowest held-out loss, {figure(best, 4)}"
    if best > 0 and worst > best:
        above = (
            f"{figure(100 * (worst / best - 1), 2)} % above it" if worst < 2 * best else f"{figure(worst)}"
        )
        text += f"; the highest, of “{other}”, is {above}"
    return text + "."


def are_comparable(runs: Sequence[Run]) -> bool:
    """Whether all runs measured the same loss on the same task."""
    return len({(str(run.config.get("task")), run.loss_unit) for run in runs}) == 1


def asked_lr(run: Run) -> float | None:
    """The learning rate that was asked for, as a peak; that of the first group where only records tell."""
    if run.search is not None:
        return run.search.asked
    stated = number(run.config.get("lr"))
    if stated is not None:
        return stated
    name = next(iter(learning_rates(run)), "")
    planned = plan_series(run, name)[1] or base_series(run, name)[1]
    return max((value for value in planned if 0 < value < math.inf), default=None)


def found_lr(run: Run) -> float | None:
    """The peak learning rate that the run came to: stated, or what it began with times what was learned."""
    stated = number(run.result.get("found_lr"))
    if stated is not None:
        return stated
    start, factors = run.search.found if run.search is not None else asked_lr(run), corrections(run)
    if start is None or not factors:
        return start
    return start * math.exp(math.fsum(map(math.log, factors)) / len(factors))


def num_brakes(run: Run) -> int:
    """How often the guard went back."""
    return run.records[-1].num_brakes if run.records else 0


def training_loss(run: Run) -> float | None:
    """Mean over the replicas in the last round that has a loss."""
    means = (mean(record.losses) for record in reversed(run.records))
    return next((loss for loss in means if loss is not None), None)


def compares(run: Run) -> bool:
    """Whether a controller compared the replicas; the guard does not."""
    return any(record.signal for record in run.records)


def corrections(run: Run) -> list[float]:
    """Final factors on the planned learning rates, one per parameter group."""
    if not run.records or run.config.get("controller") == "paper":
        return []  # the paper's form has no factor: it holds the value itself
    last = run.records[-1].correction
    return [c for name, c in last.items() if is_learning_rate(name) and 0 < c < math.inf]


def _training(run: Run) -> str:
    planned, last = number(run.config.get("steps")), run.last_step
    who = count(run.num_replicas, "replica") if run.num_replicas else "The replicas"
    is_short = planned is not None and (last < planned or run.status == "unfinished")
    steps = f"{last:,} of {count(int(planned or 0), 'step')}" if is_short else count(last, "step")
    seconds = number(run.result.get("seconds"))
    time = f" in {duration(seconds)}" if seconds is not None else ""
    where = _loss_so_far(run)
    if run.status in ("failed", "diverged"):
        text = f"The run {run.status} after {steps}{time}" + (f", at {where}" if where else "") + "."
        reason = run.result.get("error") or run.result.get("reason")
        return text + (f" The reason: {reason}." if isinstance(reason, str) else "")
    if run.status == "stopped":
        return f"{who} trained for {steps}{time}, then the run was stopped" + (
            f" at {where}." if where else "."
        )
    if run.status == "unfinished":
        if not last:
            return "This run is unfinished: it has not trained yet."
        has = "has" if run.num_replicas == 1 else "have"
        return f"This run is unfinished: {who.lower()} {has} trained for {steps}" + (
            f" and stand at {where}." if where else "."
        )
    return f"{who} trained for {steps}{time}" + (f" and ended at {where}." if where else ".")


def _averaged(run: Run) -> str:
    num_steps = run.records[-1].num_averaged_steps
    if not num_steps:
        return ""
    return f"The final weights are the mean of those after {num_steps} of the last steps."


def _loss_so_far(run: Run) -> str:
    unit = f" {run.loss_unit}" if run.loss_unit else ""
    if run.final_loss is None:
        trained = training_loss(run)
        return "" if trained is None else f"a training loss of {figure(trained)}{unit}"
    first = next((e.loss for e in run.evaluations if e.loss is not None), None)
    began = f" (it began at {figure(first)})" if first is not None and len(run.evaluations) > 1 else ""
    return f"a held-out loss of {figure(run.final_loss)}{unit}{began}"


def _moved(run: Run) -> str:
    """What the guard, or a controller that compares replicas, made of the learning rate."""
    brakes, found, factors = num_brakes(run), found_lr(run), corrections(run)
    if brakes:
        times = "once" if brakes == 1 else f"{brakes} times"
        lowered = f", to {figure(found, 2)} at its peak" if found is not None else ""
        return f"The run collapsed {times}: the guard went back and lowered the learning rate{lowered}."
    if not compares(run):
        return ""
    if run.config.get("controller") == "paper":
        values = [v for name in learning_rates(run) for v in base_series(run, name)[1]]
        last = [v for name, v in run.records[-1].base.items() if is_learning_rate(name)]
        if not (values and last):
            return ""
        ends = " to ".join(dict.fromkeys((figure(min(last), 2), figure(max(last), 2))))
        peak = figure(max(values + last), 2)
        return f"The controller held the learning rate itself: it peaked at {peak} and ended at {ends}."
    if len(factors) > 1:
        low, high = figure(min(factors)), figure(max(factors))
        by = f"a factor of {low}" if low == high else f"factors from {low} to {high}"
        return f"The controller moved the learning rates of {len(factors)} parameter groups by {by}."
    if not factors:
        return ""
    return (
        f"The controller moved the learning rate by a factor of {figure(factors[0])}, to {figure(found, 2)} "
        "at its peak."
    )


def _left_out(run: Run) -> str:
    events = excluded_events(run)
    replicas = sorted({replica for _, replica, _ in events})
    if not events:
        return "No replica was left out." if run.num_replicas != 1 else ""
    if len(replicas) == 1:
        return f"Replica {replicas[0]} was left out of {count(len(events), 'sync')}."
    if len(replicas) > 5:
        return f"{len(replicas)} replicas were left out, {len(events)} times in all."
    names = f"{', '.join(map(str, replicas[:-1]))} and {replicas[-1]}"
    return f"Replicas {names} were left out, {len(events)} times in all."
