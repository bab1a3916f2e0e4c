"""The chart of the search before the run: what it tried, and what it found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.lab.page.chart import Chart, Trace, line
from hdet.lab.page.facts import highest_shown
from hdet.lab.page.runs import Run, number
from hdet.lab.page.words import figure
from hdet.records import SearchRecord

_Point = tuple[float, float | None]


def search_charts(run: Run) -> Iterable[Chart]:
    """Trials and ramp over learning rates, with what was asked for, what was found, and its likely range."""
    search = run.search
    if search is None:
        return
    ramp, trials = _points(search.ramp), sorted(_points(search.trials), key=lambda point: point[0])
    losses = [loss for _, loss in [*ramp, *trials] if loss is not None]
    if not losses:
        return
    untrained = next((loss for _, loss in ramp if loss is not None), None)
    low, high = min(losses), highest_shown(losses, untrained)
    room = 0.08 * (high - low) or 0.1
    bottom, top = low - room, high + room
    yield Chart(
        title="Search for the learning rate",
        caption="Each dot is a short trial. The light line is the quick ramp before the trials. The answer "
        f"comes from {search.reason}.",
        traces=[
            *_band(search, bottom, top),
            *_ramp(ramp, top, run.loss_unit),
            *_trials(trials, high, high + room / 2, run.loss_unit),
            *_mark(search.asked, "asked for", "--muted", "dot", bottom, top),
            *_mark(search.found, "found", "--strong", "solid", bottom, top),
        ],
        x_title="learning rate",
        y_title=run.loss_title,
        is_wide=False,
        height=290,
        is_table_of_points=True,
        layout={"xaxis": {"type": "log"}, "yaxis": {"range": [bottom, top]}},
    )


def _points(pairs: Sequence[Sequence[float | None]]) -> list[_Point]:
    """Learning rates that a logarithmic axis can show, with a finite loss or none."""
    return [(lr, number(loss)) for rate, loss in pairs if (lr := number(rate)) is not None and lr > 0]


def _ramp(ramp: Sequence[_Point], top: float, unit: str) -> Iterable[Trace]:
    """Up to where the loss leaves the chart."""
    known = [(lr, loss) for lr, loss in ramp if loss is not None]
    end = next((i + 1 for i, (_, loss) in enumerate(known) if loss > top), len(known))
    if known:
        x, y = [lr for lr, _ in known[:end]], [min(loss, top) for _, loss in known[:end]]
        yield line(x, y, "ramp", "--replica", width=1.5, unit=unit) | {"hovertemplate": _hover("%{y:.6~g}")}


def _trials(trials: Sequence[_Point], high: float, at: float, unit: str) -> Iterable[Trace]:
    shown = [(lr, None if loss is None or loss > high else loss) for lr, loss in trials]
    kept = [(lr, loss) for lr, loss in shown if loss is not None]
    if kept:
        x, y = [lr for lr, _ in kept], [loss for _, loss in kept]
        trace = line(x, y, "trials", "--accent", width=2, unit=unit)
        yield trace | {
            "mode": "lines+markers",
            "marker": {"size": 9},
            "hovertemplate": _hover("%{y:.6~g}"),
        }
    failed = [lr for lr, loss in shown if loss is None]
    if failed:
        yield line(failed, [at] * len(failed), "failed trials", "--alarm") | {
            "mode": "markers",
            "marker": {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": "--alarm"}},
            "hovertemplate": _hover("far above the others, or not finite"),
        }


def _band(search: SearchRecord, bottom: float, top: float) -> Iterable[Trace]:
    low, high = search.low, search.high
    if 0 < low < high < math.inf and search.found != search.asked:  # else the search could not tell
        x, y = [low, low, high, high, low], [bottom, top, top, bottom, bottom]
        yield line(x, y, "likely range", "--band", width=0) | {
            "fill": "toself",
            "fillcolor": "--band",
            "hoveron": "fills",
            "hovertemplate": None,
            "text": f"between {figure(low, 2)} and {figure(high, 2)} (80 %)",
            "hoverinfo": "text",
            "meta": ["", "mark"],
        }


def _mark(lr: float, what: str, color: str, dash: str, bottom: float, top: float) -> Iterable[Trace]:
    if 0 < lr < math.inf:
        label = f"{what}: {figure(lr)}"
        yield line([lr, lr], [bottom, top], label, color, width=2.5, dash=dash) | {
            "hovertemplate": f"{label}<extra></extra>",
            "meta": ["", "mark"],
        }


def _hover(loss: str) -> str:
    return f"%{{fullData.name}}<br>learning rate %{{x:.4~g}}<br>loss {loss} %{{meta[0]}}<extra></extra>"
