"""The run in plain words, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.report.found import Choice, Scouted, anchored_of, scouted_of
from hdet.report.runs import Run, number
from hdet.telemetry.names import is_learning_rate

__all__ = [
    "are_comparable",
    "comparison_sentence",
    "corrections",
    "count",
    "duration",
    "excluded_events",
    "figure",
    "found_lr",
    "sentence",
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


def sentence(run: Run) -> str:
    """What happened in the run, in two to four plain sentences.

    >>> from pathlib import Path
    >>> sentence(Run(path=Path("runs/a"), name="a"))
    'Nothing has been recorded of this run yet.'
    """
    if not (run.records or run.scouting or run.evaluations or run.result):
        return "Nothing has been recorded of this run yet."
    parts = [_training(run), *_learning_rate(run)]
    if run.records:
        parts += [_averaged(run), _left_out(run)]
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


def found_lr(run: Run) -> float | None:
    """The learning rate that the run found, as a peak: stated, or the start times what was learned.

    None where the run ends within the scout, which has found nothing yet.
    """
    if _is_undecided(run):
        return None
    stated = number(run.result.get("found_lr"))
    if stated is not None:
        return stated
    scouted, anchored, factors = scouted_of(run), anchored_of(run), corrections(run)
    chosen = None if scouted is None or scouted.choice is None else scouted.choice.lr
    if anchored is not None:
        factors = anchored.last_factors
    start = chosen or number(run.config.get("lr"))
    if start is None or not factors or (anchored is None and len(factors) > 1):
        return chosen
    return start * math.exp(math.fsum(map(math.log, factors)) / len(factors))


def corrections(run: Run) -> list[float]:
    """Final factors of the controller on the planned learning rates, one per parameter group."""
    if not run.records or not _has_controller(run) or run.config.get("controller") == "paper":
        return []  # the paper's form has no factor: it holds the value itself
    last = run.records[-1].correction
    return [c for name, c in last.items() if is_learning_rate(name) and 0 < c < math.inf]


def _is_undecided(run: Run) -> bool:
    """Whether the run ends within the scout, as far as anybody knows."""
    if run.records:
        return False
    scouted = scouted_of(run)
    if scouted is None:
        return run.config.get("scout") is True and run.status != "finished"
    return scouted.choice is None


def _training(run: Run) -> str:
    planned, last = number(run.config.get("steps")), run.last_step
    who = count(run.num_replicas, "replica") if run.num_replicas else "The replicas"
    is_short = planned is not None and (last < planned or run.status == "unfinished")
    steps = f"{last:,} of {count(int(planned or 0), 'step')}" if is_short else count(last, "step")
    seconds = number(run.result.get("seconds"))
    time = f" in {duration(seconds)}" if seconds is not None else ""
    where = _loss_so_far(run)
    if run.status == "failed":
        text = f"The run failed after {steps}{time}" + (f", at {where}" if where else "") + "."
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
    if run.final_loss is None:
        return ""
    unit = f" {run.loss_unit}" if run.loss_unit else ""
    first = next((e.loss for e in run.evaluations if e.loss is not None), None)
    began = f" (it began at {figure(first)})" if first is not None and len(run.evaluations) > 1 else ""
    return f"a held-out loss of {figure(run.final_loss)}{unit}{began}"


def _learning_rate(run: Run) -> Iterable[str]:
    start, scouted, anchored = number(run.config.get("lr")), scouted_of(run), anchored_of(run)
    if _is_undecided(run):
        yield from _undecided(scouted, start)
        return
    from_start = f"Started from a learning rate of {figure(start)}, the" if start is not None else "The"
    if scouted is not None and scouted.choice is not None:
        yield _scouted(scouted, scouted.choice, start)
        start, from_start = scouted.choice.lr, "From there, the"
    elif scouted is not None:
        yield f"{_tried(scouted, start)}. What it chose is not recorded."
    factors = [] if anchored is None else anchored.last_factors
    if anchored is not None and factors:
        low, high = (figure(f, 2) for f in (min(factors), max(factors)))
        if low == high:
            at_peak = f", to {figure(start * factors[0], 2)} at its peak" if start is not None else ""
            yield f"{from_start} anchored controller moved it by a factor of {low}{at_peak}."
        else:
            moved = f"by factors from {low} to {high}, by parameter group"
            yield f"{from_start} anchored controller moved it {moved}."
        if anchored.num_brakes:
            yield f"It braked {count(anchored.num_brakes, 'time')}, where the training loss jumped up."
        if anchored.held_from is not None:
            yield f"It was held from step {anchored.held_from:,} on: {anchored.reason}."
    elif not _has_controller(run):
        if start is not None and scouted is None:
            yield f"Without a controller, the learning rate kept to its plan, with a peak of {figure(start)}."
    elif run.config.get("controller") == "paper":
        values = [
            v for r in run.records for name, t in r.base_trace.items() if is_learning_rate(name) for v in t
        ]
        last = (
            [v for name, v in run.records[-1].base.items() if is_learning_rate(name)] if run.records else []
        )
        if values and last:
            ends = " to ".join(dict.fromkeys((figure(min(last), 2), figure(max(last), 2))))
            peak = figure(max(values + last), 2)
            yield f"{from_start} controller held it itself: it peaked at {peak} and ended at {ends}."
    else:
        yield _moved(run, start, from_start)


def _moved(run: Run, start: float | None, from_start: str) -> str:
    factors, found = corrections(run), found_lr(run)
    if len(factors) > 1:
        low, high = figure(min(factors)), figure(max(factors))
        by = f"a factor of {low}" if low == high else f"factors from {low} to {high}"
        return f"{from_start} controller moved the learning rates of {len(factors)} parameter groups by {by}."
    if found is not None and start:
        return (
            f"{from_start} controller moved it by a factor of {figure(found / start)}, "
            f"to {figure(found, 2)} at its peak."
        )
    return f"{from_start} controller moved it by a factor of {figure(factors[0])}." if factors else ""


def _scouted(scouted: Scouted, choice: Choice, start: float | None) -> str:
    text = f"{_tried(scouted, start)} and chose {figure(choice.lr, 2)}"
    if choice.low is not None and choice.high is not None:
        text += f" (likely between {figure(choice.low, 2)} and {figure(choice.high, 2)})"
    return text + "."


def _undecided(scouted: Scouted | None, start: float | None) -> Iterable[str]:
    if scouted is None:
        yield "The scout has not ended its first round yet, and the run itself has not begun."
    else:
        yield f"{_tried(scouted, start)}."
        yield "It has not decided yet, and the run itself has not begun."


def _tried(scouted: Scouted, start: float | None) -> str:
    text = f"Started from a learning rate of {figure(start)}, a scout" if start is not None else "A scout"
    if not scouted.lrs:
        return f"{text} ran"
    ends = f"{figure(min(scouted.lrs), 2)} to {figure(max(scouted.lrs), 2)}"
    return f"{text} tried {ends} in {count(len(scouted.fans), 'round')}"


def _left_out(run: Run) -> str:
    events = excluded_events(run)
    replicas = sorted({replica for _, replica, _ in events})
    if not events:
        return "No replica was left out."
    if len(replicas) == 1:
        return f"Replica {replicas[0]} was left out of {count(len(events), 'sync')}."
    if len(replicas) > 5:
        return f"{len(replicas)} replicas were left out, {len(events)} times in all."
    names = f"{', '.join(map(str, replicas[:-1]))} and {replicas[-1]}"
    return f"Replicas {names} were left out, {len(events)} times in all."


def _has_controller(run: Run) -> bool:
    stated = run.config.get("controller")
    if isinstance(stated, str):
        return stated not in ("none", "")
    return any(record.signal for record in run.records)
