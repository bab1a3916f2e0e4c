"""Charts of losses and metrics: over learning rates, and over steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Color, Trace, band, dots, line, series_color
from hdet.lab.page.read_runs import Run, loss_title, number
from hdet.lab.page.sentences import figure

Point = tuple[float, float | None, str]
"""Learning rate, loss if it is finite, and name."""
_HOVER = "%{customdata}<br>learning rate %{x:.4~g}<extra></extra>"


def against_rates(title: str, what: str, points: list[Point], untrained: float | None, unit: str) -> Chart:
    """Losses over learning rates, each with its name; a bad one does not flatten the rest.

    What is far above the untrained loss, or not finite, is a cross at the top.
    """
    losses = [loss for _, loss, _ in points if loss is not None]
    high, bottom, top = shown_range(losses, untrained)
    good, bad = list[Point](), list[Point]()
    for lr, loss, name in sorted(points, key=lambda point: point[0]):
        is_good = loss is not None and loss <= high
        said = f"{name}, loss {'not finite' if loss is None else figure(loss, 6)} {unit}"
        (good if is_good else bad).append((lr, loss if is_good else (high + top) / 2, said))
    traces = [
        dots(good, what, "--accent", mode="lines+markers", hovertemplate=_HOVER),
        dots(bad, "far above, or not finite", "--alarm", "x", hovertemplate=_HOVER),
    ]
    layout = {"xaxis": {"type": "log"}, "yaxis": {"range": [bottom, top]}}
    return Chart(title, "", traces, loss_title(unit), "learning rate", layout=layout)


def shown_range(losses: Sequence[float], untrained: float | None) -> tuple[float, float, float]:
    """Find the highest loss that is shown, and where the axis begins and ends.

    A loss far above that of the untrained weights would flatten the others.

    >>> [round(x, 2) for x in shown_range([0.5, 1.0, 90.0], 2.0)]
    [2.3, 0.36, 2.44]
    """
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    if untrained is not None:
        high = max(low, min(high, untrained + 0.2 * (untrained - low)))
    room = 0.08 * (high - low) or 0.1
    return high, low - room, high + room


def search_charts(run: Run) -> Iterator[Chart]:
    """Trials over learning rates, with the guess, what was found, and its likely range."""
    search = run.search
    if search is None:
        return
    trials: list[Point] = [(lr, number(y), "trial") for lr, y in search.trials if lr and 0 < lr < math.inf]
    untrained = number(search.ramp[0][1]) if search.ramp else None
    chart = against_rates("Search for the learning rate", "trials", trials, untrained, run.loss_unit)
    bottom, top = chart.layout["yaxis"]["range"]
    mark: dict[str, Any] = {"meta": ["", "mark"], "hovertemplate": "%{fullData.name}<extra></extra>"}
    if 0 < search.low < search.high < math.inf and search.found != search.asked:  # else it could not tell
        likely = f"likely: {figure(search.low, 2)} to {figure(search.high, 2)} (80 %)"
        chart.traces[:0] = band([search.low, search.high], [bottom] * 2, [top] * 2, likely, **mark)
    guess: Color = ("--muted", "dot")
    for what, lr, color in (("guess", search.asked, guess), ("found", search.found, "--strong")):
        if 0 < lr < math.inf:
            marked = line([lr, lr], [bottom, top], f"{what}: {figure(lr)}", color, width=2.5, **mark)
            chart.traces.append(marked)
    origin = search.reason.replace("your guess", "the guess")
    chart.caption = f"Each dot is a short trial. The answer comes from {origin}."
    yield chart


def loss_charts(run: Run) -> Iterator[Chart]:
    """The loss over the run, held-out and of the training."""
    held_out, trained, unit = numbers.evaluated(run), numbers.training_losses(run), run.loss_unit
    color, width = ("--replica", 1.5) if held_out[0] else ("--accent", 2.2)
    traces = [line(*trained, "training loss", color, width=width, unit=unit)]
    traces.append(_evaluated(run, "loss", "held-out loss", "--strong", width=3, unit=unit))
    caption = "The training loss is a mean over the replicas and each round."
    if run.records and run.records[-1].num_averaged_steps:
        caption += " The last held-out loss is that of the mean of the weights over the last steps."
    # A few losses far above the others would flatten them.
    known = [*held_out[1], *trained[1]]
    usual = max(held_out[1][0], statistics.median(held_out[1])) if held_out[1] else math.inf
    is_log = bool(known) and min(known) > 0 and max(known) > 5 * usual
    yield Chart("Loss", caption, traces, loss_title(unit), is_log=is_log, max_decades=4)


def metric_charts(run: Run) -> Iterator[Chart]:
    """Metrics on held-out data; parts of one metric share a chart."""
    names = dict.fromkeys(name for e in run.evaluations for name in e.metrics if name != "loss")
    notes = run.config.get("metric_notes")
    for family, members in numbers.families(names, "_").items():
        shown = (family if len(members) > 1 else members[0]).replace("_", " ")
        traces = [
            _evaluated(run, name, name.replace("_", " "), series_color(i, len(members)), width=2.5)
            for i, name in enumerate(members)
        ]
        note = notes.get(family) if isinstance(notes, dict) else None
        caption = "Measured on held-out data." + (f" {family} is {note}." if note else "")
        yield Chart(f"Metric: {shown}", caption, traces, shown, hover="x unified", height=260)


def _evaluated(run: Run, metric: str, label: str, color: Color, **style: Any) -> Trace:
    """The held-out loss, or a metric, over the run, with a dot for each evaluation where these are few."""
    steps, values = numbers.evaluated(run, metric)
    few = {"mode": "lines+markers", "marker": {"size": 6}} if len(steps) <= 60 else {}
    return line(steps, values, label, color, **few, **style)
