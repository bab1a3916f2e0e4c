"""Charts of losses and metrics: over learning rates, over steps, and of every replica."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, Color, Trace, band, curve, line, series_color, unzip
from hdet.lab.page.read_runs import Run, loss_title, number
from hdet.lab.page.sentences import figure

_HOVER = "<br>learning rate %{x:.4~g}<br>loss %{y:.6~g} %{meta[0]}<extra></extra>"


def search_charts(run: Run) -> Iterable[Chart]:
    """Trials and ramp over learning rates, with the guess, what was found, and its likely range."""
    search = run.search
    if search is None:
        return
    ramp, trials = _points(search.ramp), sorted(_points(search.trials), key=lambda point: point[0])
    losses = [loss for _, loss in [*ramp, *trials] if loss is not None]
    if not losses:
        return
    untrained = next((loss for _, loss in ramp if loss is not None), None)
    high, bottom, top = _limits(losses, untrained)
    hover = "%{fullData.name}" + _HOVER
    style: dict[str, Any] = {"unit": run.loss_unit, "hovertemplate": hover}
    mark: dict[str, Any] = {"meta": ["", "mark"]}
    traces: list[Trace] = []
    low_lr, high_lr = search.low, search.high
    if 0 < low_lr < high_lr < math.inf and search.found != search.asked:  # else the search could not tell
        likely = f"{figure(low_lr, 2)} to {figure(high_lr, 2)} (80 %)"
        traces += band([low_lr, high_lr], [bottom] * 2, [top] * 2, f"likely: {likely}", **mark)
    known = [(lr, min(loss, top)) for lr, loss in ramp if loss is not None]
    # Up to where the loss leaves the chart.
    end = next((i + 1 for i, (_, loss) in enumerate(known) if loss == top), len(known))
    traces += curve(*unzip(known[:end]), "ramp", "--replica", end, width=1.5, **style)
    kept = [(lr, loss) for lr, loss in trials if loss is not None and loss <= high]
    dots = {"mode": "lines+markers", "marker": {"size": 9}}
    traces += curve(*unzip(kept), "trials", "--accent", len(kept), **dots, **style)
    failed = [lr for lr, loss in trials if loss is None or loss > high]
    why = hover.replace("%{y:.6~g}", "far above the others, or not finite")
    traces += _crosses(failed, high, top, "failed trials", hovertemplate=why)
    asked, found = ("guess", search.asked, ("--muted", "dot")), ("found", search.found, "--strong")
    for what, lr, color in (asked, found):
        if 0 < lr < math.inf:
            label = f"{what}: {figure(lr)}"
            mark["hovertemplate"] = f"{label}<extra></extra>"
            traces.append(line([lr, lr], [bottom, top], label, color, width=2.5, **mark))
    caption = "Each dot is a short trial. The light line is the quick ramp before the trials. "
    caption += f"The answer comes from {search.reason.replace('your guess', 'the guess')}."
    title, y_title = "Search for the learning rate", loss_title(run.loss_unit)
    yield Chart(title, caption, traces, y_title, "learning rate", layout=_layout(bottom, top))


def final_loss_charts(runs: Sequence[Run], untrained: float | None, unit: str) -> Iterable[Chart]:
    """Draw where each run ended, by the learning rate it came to; one bad run does not flatten the rest."""
    known = [(lr, run) for run in runs if (lr := numbers.found_lr(run)) is not None and 0 < lr < math.inf]
    known.sort(key=lambda pair: pair[0])
    losses = [run.final_loss for _, run in known if run.final_loss is not None]
    if len({lr for lr, _ in known}) < 2 or len(losses) < 2 or not numbers.are_comparable(runs):
        return
    high, bottom, top = _limits(losses, untrained)
    ends = [(lr, run.final_loss, run.name) for lr, run in known]
    kept = [(lr, loss, name) for lr, loss, name in ends if loss is not None and loss <= high]
    bad = [(lr, loss, name) for lr, loss, name in ends if loss is None or loss > high]
    best = min(kept, key=lambda point: point[1])
    is_line = numbers.is_sweep(runs)
    traces = []
    for points, label, color, mode, marker in (
        (kept, "runs", "--accent", "lines+markers" if is_line else "markers", {"size": 9}),
        ([best], f"best: {figure(best[0])}", "--strong", "markers", {"size": 15, "symbol": "star"}),
    ):
        x, y, names = (list(column) for column in zip(*points, strict=True))
        style = {"mode": mode, "marker": marker | {"color": color}, "customdata": names}
        traces.append(line(x, y, label, color, unit=unit, hovertemplate="%{customdata}" + _HOVER, **style))
    said = [f"{name}, loss {'not finite' if loss is None else figure(loss)}" for _, loss, name in bad]
    more = {"customdata": said, "hovertemplate": "%{customdata}<br>learning rate %{x:.4~g}<extra></extra>"}
    traces += _crosses([lr for lr, _, _ in bad], high, top, "far above", **more)
    caption = f"Each dot is a run{'' if is_line else ', at the learning rate that it found'}."
    if bad:
        caption += " Crosses at the top are runs whose loss is far above the others, or not finite."
    title, y_title = "Loss against learning rate", f"final {loss_title(unit)}"
    yield Chart(title, caption, traces, y_title, "learning rate", layout=_layout(bottom, top))


def _points(pairs: Sequence[Sequence[float | None]]) -> list[tuple[float, float | None]]:
    """Learning rates that a logarithmic axis can show, with a finite loss or none."""
    return [(lr, number(loss)) for rate, loss in pairs if (lr := number(rate)) is not None and lr > 0]


def _limits(losses: Sequence[float], untrained: float | None) -> tuple[float, float, float]:
    """The highest loss that is shown, and where the axis begins and ends."""
    low, high = min(losses), numbers.highest_shown(losses, untrained)
    room = 0.08 * (high - low) or 0.1
    return high, low - room, high + room


def _layout(bottom: float, top: float) -> dict[str, Any]:
    return {"xaxis": {"type": "log"}, "yaxis": {"range": [bottom, top]}}


def _crosses(rates: Sequence[float], high: float, top: float, label: str, **more: Any) -> list[Trace]:
    """Marks for losses above what is shown, just below the end of the axis."""
    marker = {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": "--alarm"}}
    heights = [high + (top - high) / 2] * len(rates)
    return [line(rates, heights, label, "--alarm", mode="markers", marker=marker, **more)] if rates else []


def loss_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The loss over the run, held-out and of the training."""
    held_out, trained, unit = numbers.evaluated(run), numbers.training_losses(run), run.loss_unit
    color, width = ("--replica", 1.5) if held_out else ("--accent", 2.2)
    traces = curve(*unzip(trained), "training loss", color, max_points, width=width, unit=unit)
    traces += evaluated(run, "loss", "held-out loss", "--strong", max_points, width=3, unit=unit)
    caption = "The training loss is a mean over the replicas and each round. " if trained else ""
    if held_out and run.records and run.records[-1].num_averaged_steps:
        caption += "The last held-out loss is that of the mean of the weights over the last steps. "
    if traces:
        is_log = _is_far([loss for _, loss in held_out], [loss for _, loss in trained])
        caption = caption.strip() or "On held-out data."
        yield Chart("Loss", caption, traces, loss_title(unit), is_log=is_log, max_decades=4)


def metric_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """Metrics on held-out data; parts of one metric share a chart."""
    names = dict.fromkeys(name for e in run.evaluations for name in e.metrics if name != "loss")
    for family, members in numbers.families(names, "_").items():
        shown = (family if len(members) > 1 else members[0]).replace("_", " ")
        traces = []
        for i, name in enumerate(members):
            color = series_color(i, len(members))
            traces += evaluated(run, name, name.replace("_", " "), color, max_points, width=2.5)
        title = "Parts of the loss" if shown == "loss" else f"Metric: {shown}"
        notes, layout = run.config.get("metric_notes"), _without_first([trace["y"] for trace in traces])
        note = notes.get(family) if isinstance(notes, dict) else None
        caption = "Measured on held-out data."
        caption += f" {family} is {note}." if note else ""
        caption += " The first values are far off, and cut off." if layout else ""
        yield Chart(title, caption, traces, shown, hover="x unified", height=260, layout=layout)


def _without_first(lines: Sequence[Sequence[float]]) -> dict[str, Any]:
    """An axis for all values but the first of each line, where these would flatten the others.

    >>> _without_first([[3.0, 1.0, 0.5]]), _without_first([[1.2, 1.0, 0.5]])
    ({'yaxis': {'range': [0.475, 1.025]}}, {})
    """
    rest = [value for values in lines for value in values[1:]]
    if not rest:
        return {}
    low, high = min(rest), max(rest)
    room = 0.05 * (high - low)
    is_far = any(not low - (high - low) <= values[0] <= high + (high - low) for values in lines)
    return {"yaxis": {"range": [low - room, high + room]}} if is_far and room else {}


def evaluated(run: Run, metric: str, label: str, color: Color, max_points: int, **style: Any) -> list[Trace]:
    """The held-out loss, or a metric, over the run, with a dot for each evaluation where these are few."""
    traces = curve(*unzip(numbers.evaluated(run, metric)), label, color, max_points, **style)
    for trace in traces:
        trace |= {"mode": "lines+markers", "marker": {"size": 6}} if len(trace["x"]) <= 60 else {}
    return traces


def _is_far(held_out: Sequence[float], trained: Sequence[float]) -> bool:
    """Tell whether a few losses are so far above the others that they would flatten them."""
    known = [loss for loss in [*held_out, *trained] if math.isfinite(loss)]
    if not held_out or min(known, default=0.0) <= 0:
        return False
    return max(known) > 5 * max(held_out[0], statistics.median(held_out))
