"""Key figures of a run, and of several, as tiles: the learning rate comes first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import short
from hdet.lab.page.facts import (
    are_comparable,
    asked_lr,
    compares,
    corrections,
    excluded_events,
    found_lr,
    group_peaks,
    main_metrics,
    num_brakes,
    training_losses,
)
from hdet.lab.page.runs import Run, number
from hdet.lab.page.words import count, duration, figure

_MAX_METRICS = 2

Tile = tuple[str, str, str]
"""Label, value and hint of a key figure."""


def run_tiles(run: Run) -> Iterable[Tile]:
    """Key figures of a run; what is unknown has no tile."""
    is_found = run.search is not None and not num_brakes(run)
    found = run.search.found if run.search is not None and is_found else found_lr(run)
    if found is not None:
        yield "Learning rate", figure(found), _origin(run, found)
    trained = training_losses(run)
    if run.final_loss is not None:
        yield "Held-out loss", figure(run.final_loss, 4), run.loss_unit
    elif trained:
        yield "Training loss", figure(trained[-1][1], 4), run.loss_unit or "last round"
    yield from _metric_tiles(run)
    seconds = number(run.result.get("seconds"))
    if run.last_step:
        planned = number(run.config.get("steps"))
        hints = [f"of {int(planned):,}"] if planned and planned != run.last_step else []
        hints += [f"in {duration(seconds)}"] if seconds is not None else []
        yield "Steps", f"{run.last_step:,}", " ".join(hints)
    events = excluded_events(run)
    if events:
        left_out = str(len({replica for _, replica, _ in events}))
        yield "Replicas left out", left_out, f"of {run.num_replicas}, {count(len(events), 'time')} in all"
    if run.records:
        milliseconds = sum(v for record in run.records for v in record.milliseconds.values())
        if seconds and math.isfinite(milliseconds) and milliseconds:
            share = figure(milliseconds / seconds / 10, 2)
            yield "Time in syncs", f"{share} %", f"{duration(milliseconds / 1000)} in all"


def _metric_tiles(run: Run) -> Iterable[Tile]:
    """The main metrics of a run."""
    for name, value in list(main_metrics(run.final_metrics).items())[:_MAX_METRICS]:
        yield short(name.replace("_", " "), 30), figure(value, 4), "held-out"


def _origin(run: Run, found: float) -> str:
    """Where the learning rate comes from, in a few words."""
    brakes, asked = num_brakes(run), asked_lr(run)
    if brakes:
        return f"lowered {count(brakes, 'time')} by the guard"
    if len(group_peaks(run)) > 1:
        return "peak of the first group"
    if asked is None or math.isclose(asked, found, rel_tol=1e-6):
        return "peak, as asked for"
    if compares(run) and run.search is None:
        mean = "mean of all groups, " if len(set(corrections(run))) > 1 else ""
        return f"{mean}as the controller asks"
    return f"you asked for {figure(asked)}"


def comparison_tiles(runs: Sequence[Run]) -> Iterable[Tile]:
    """Key figures of the best of several runs, and of all together."""
    ended = [(run.final_loss, run) for run in runs if run.final_loss is not None]
    if len(ended) > 1 and are_comparable(runs):
        loss, best = min(ended, key=lambda pair: pair[0])
        found = found_lr(best)
        if found is not None:
            yield "Learning rate", figure(found), "of the best run"
        yield "Lowest held-out loss", figure(loss, 4), best.loss_unit
        yield from _metric_tiles(best)
    statuses = [run.status for run in runs if run.status not in ("finished", "recorded")]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    yield "Runs", str(len(runs)), ", ".join(counts)
    seconds = [time for run in runs if (time := number(run.result.get("seconds"))) is not None]
    if seconds:
        yield "Time of all runs", duration(math.fsum(seconds)), ""
