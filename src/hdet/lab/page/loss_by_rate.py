"""Charts of the loss over learning rates: the trials of a search, and where several runs ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.lab.page.chart import Chart, Trace, line, unzip
from hdet.lab.page.read_runs import Run, loss_title, number
from hdet.lab.page.run_numbers import are_comparable, found_lr, highest_shown, is_sweep
from hdet.lab.page.sentences import figure

_HOVER = "<br>learning rate %{x:.4~g}<br>loss %{y:.6~g} %{meta[0]}<extra></extra>"
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
    high, bottom, top = _limits(losses, next((loss for _, loss in ramp if loss is not None), None))
    style: dict[str, Any] = {"unit": run.loss_unit, "hovertemplate": "%{fullData.name}" + _HOVER}
    traces: list[Trace] = []
    # Else the search could not tell.
    if 0 < search.low < search.high < math.inf and search.found != search.asked:
        likely = f"between {figure(search.low, 2)} and {figure(search.high, 2)} (80 %)"
        x, y = [search.low] * 2 + [search.high] * 2 + [search.low], [bottom, top, top, bottom, bottom]
        fill = {"fill": "toself", "fillcolor": "--band", "hoveron": "fills", "hoverinfo": "text"}
        more = {"hovertemplate": None, "text": likely}
        traces.append(line(x, y, "likely range", "--band", width=0, role="mark", **fill, **more))
    known = [(lr, loss) for lr, loss in ramp if loss is not None]
    if known:  # up to where the loss leaves the chart
        end = next((i + 1 for i, (_, loss) in enumerate(known) if loss > top), len(known))
        x, y = unzip([(lr, min(loss, top)) for lr, loss in known[:end]])
        traces.append(line(x, y, "ramp", "--replica", width=1.5, **style))
    kept = [(lr, loss) for lr, loss in trials if loss is not None and loss <= high]
    if kept:
        dots = {"mode": "lines+markers", "marker": {"size": 9}}
        traces.append(line(*unzip(kept), "trials", "--accent", **dots, **style))
    failed = [lr for lr, loss in trials if loss is None or loss > high]
    if failed:
        hover = style["hovertemplate"].replace("%{y:.6~g}", "far above the others, or not finite")
        traces.append(_crosses(failed, high + (top - high) / 2, "failed trials", hovertemplate=hover))
    for lr, what, color, dash in (
        (search.asked, "asked for", "--muted", "dot"),
        (search.found, "found", "--strong", "solid"),
    ):
        if 0 < lr < math.inf:
            label = f"{what}: {figure(lr)}"
            mark = {"width": 2.5, "dash": dash, "role": "mark", "hovertemplate": f"{label}<extra></extra>"}
            traces.append(line([lr, lr], [bottom, top], label, color, **mark))
    yield Chart(
        title="Search for the learning rate",
        caption="Each dot is a short trial. The light line is the quick ramp before the trials. The answer "
        f"comes from {search.reason}.",
        traces=traces,
        x_title="learning rate",
        y_title=loss_title(run.loss_unit),
        layout={"xaxis": {"type": "log"}, "yaxis": {"range": [bottom, top]}},
    )


def final_loss_charts(runs: Sequence[Run], untrained: float | None, unit: str) -> Iterable[Chart]:
    """Where each run ended, by the learning rate that it came to; one bad run does not flatten the rest."""
    known = [(lr, run) for run in runs if (lr := found_lr(run)) is not None and 0 < lr < math.inf]
    known.sort(key=lambda pair: pair[0])
    ends = [(lr, run.final_loss, run.name) for lr, run in known]
    losses = [loss for _, loss, _ in ends if loss is not None]
    if len({lr for lr, _, _ in ends}) < 2 or len(losses) < 2 or not are_comparable(runs):
        return
    high, bottom, top = _limits(losses, untrained)
    kept = [(lr, loss, name) for lr, loss, name in ends if loss is not None and loss <= high]
    bad = [(lr, loss, name) for lr, loss, name in ends if loss is None or loss > high]
    is_line = is_sweep(runs)

    def dots(points: Sequence[tuple[float, float, str]], label: str, color: str, **marker: Any) -> Trace:
        x, y, names = zip(*points, strict=True)
        style = {"mode": "markers", "marker": marker | {"color": color}, "customdata": list(names)}
        return line(x, y, label, color, unit=unit, **style, hovertemplate="%{customdata}" + _HOVER)

    best = min(kept, key=lambda point: point[1])
    traces = [
        dots(kept, "runs", "--accent", size=9) | ({"mode": "lines+markers"} if is_line else {}),
        dots([best], f"best: {figure(best[0])}", "--strong", size=15, symbol="star"),
    ]
    if bad:
        said = [f"{name}, loss {'not finite' if loss is None else figure(loss)}" for _, loss, name in bad]
        hover = "%{customdata}<br>learning rate %{x:.4~g}<extra></extra>"
        rates = [lr for lr, _, _ in bad]
        traces.append(
            _crosses(rates, high + (top - high) / 2, "far above", customdata=said, hovertemplate=hover)
        )
    yield Chart(
        title="Loss against learning rate",
        caption=f"Each dot is a run{'' if is_line else ', at the learning rate that it found'}."
        + (" Crosses at the top are runs whose loss is far above the others, or not finite." if bad else ""),
        traces=traces,
        x_title="learning rate",
        y_title=f"final {loss_title(unit)}",
        layout={"xaxis": {"type": "log"}, "yaxis": {"range": [bottom, top]}},
    )


def _points(pairs: Sequence[Sequence[float | None]]) -> list[_Point]:
    """Learning rates that a logarithmic axis can show, with a finite loss or none."""
    return [(lr, number(loss)) for rate, loss in pairs if (lr := number(rate)) is not None and lr > 0]


def _limits(losses: Sequence[float], untrained: float | None) -> tuple[float, float, float]:
    """The highest loss that is shown, and where the axis begins and ends."""
    low, high = min(losses), highest_shown(losses, untrained)
    room = 0.08 * (high - low) or 0.1
    return high, low - room, high + room


def _crosses(rates: Sequence[float], height: float, label: str, **more: Any) -> Trace:
    marker = {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": "--alarm"}}
    return line(rates, [height] * len(rates), label, "--alarm", mode="markers", marker=marker, **more)
