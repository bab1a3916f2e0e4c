"""Charts of what looked for the learning rate: the scout before the run, the anchored controller in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hdet.report.chart import Chart, Trace, line, series_color
from hdet.report.runs import Run, by_name, number, numbers
from hdet.report.series import thin

__all__ = ["finder_charts"]

_STARTS = {"wide": ", from the initial weights", "narrow": ", from the best trial"}


def finder_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The scout's losses over learning rates, and the anchored factor over steps."""
    scout, anchored = run.finder.get("scout"), run.finder.get("anchored")
    if isinstance(scout, dict):
        yield from _scout(scout, run.loss_unit)
    if isinstance(anchored, dict):
        yield from _anchored(anchored, max_points)


def _scout(scout: dict[str, Any], unit: str) -> Iterable[Chart]:
    listed = scout.get("rounds")
    rounds = [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
    points = [
        [
            (lr, loss)
            for lr, loss in zip(numbers(r.get("lrs")), numbers(r.get("losses")), strict=False)
            if lr and lr > 0
        ]
        for r in rounds
    ]
    finite = [loss for found in points for _, loss in found if loss is not None]
    if not finite:
        return
    low = min(finite)
    # A loss far above that of the smallest learning rate, which hardly trains, is as good as lost.
    from_start = [
        p for found, r in zip(points, rounds, strict=True) if r.get("stage") != "narrow" for p in found
    ]
    untrained = next(
        (loss for _, loss in sorted(from_start, key=lambda p: p[0]) if loss is not None), max(finite)
    )
    high = min(max(finite), untrained + 0.2 * (untrained - low))
    points = [[(lr, None if loss is None or loss > high else loss) for lr, loss in found] for found in points]
    room = 0.06 * (high - low) or 0.1
    # Losses of a diverging replica would flatten the valley: they are drawn at the top edge instead.
    traces = _choice(scout, low - room, high + room)
    for index, found in enumerate(points):
        color, dash = series_color(index)
        found = sorted(found, key=lambda point: point[0])
        x, y = [lr for lr, _ in found], [loss for _, loss in found]
        name = f"round {index + 1}" if len(points) > 1 else "replicas"
        name += _STARTS.get(str(rounds[index].get("stage")), "")
        trace = line(x, y, name, color, unit=unit, dash=dash, width=1.5)
        trace |= {"mode": "lines+markers", "marker": {"size": 8}, "hovertemplate": _template("loss")}
        traces.append(trace)
        lost = [lr for lr, loss in found if loss is None]
        if lost:
            gone = line(lost, [high + room] * len(lost), f"{name}: failed", color, unit="")
            gone |= {
                "mode": "markers",
                "marker": {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": color}},
            }
            gone["hovertemplate"] = (
                "learning rate %{x:.4~g}<br>the loss was far above the others or not finite<extra></extra>"
            )
            traces.append(gone)
    tried = [lr for lr, _ in points[-1]] or [0.0]
    traces += _parabola(scout.get("curve"), min(tried), max(tried), high, unit)
    reason = scout.get("reason")
    at_edge = bool(rounds and rounds[-1].get("at_edge"))
    caption = (
        "Loss after a miniature run at each learning rate, from the initial weights and then from those of "
        "the best trial. The vertical line is the choice, carried over from one replica's batch to those of "
        "all and to the long run; the band is its uncertainty, about one sigma."
    )
    caption += " The best point lies at the edge of what was tried." if at_edge else ""
    yield Chart(
        title="Scout",
        caption=caption + (f" {reason}" if isinstance(reason, str) and reason else ""),
        traces=traces,
        x_title="learning rate",
        y_title=f"loss ({unit})" if unit else "loss",
        is_wide=False,
        height=360,
        is_log=False if low > 0 else None,
        is_table_of_points=True,
        layout={"xaxis": {"type": "log"}},
    )


def _choice(scout: dict[str, Any], bottom: float, top: float) -> list[Trace]:
    chosen, low, high = (number(scout.get(key)) for key in ("chosen_lr", "low", "high"))
    traces: list[Trace] = []
    if low and high and 0 < low < high:
        band = line(
            [low, low, high, high, low], [bottom, top, top, bottom, bottom], "likely range", "--band", width=0
        )
        band |= {"fill": "toself", "fillcolor": "--band", "hoveron": "fills", "hovertemplate": None}
        traces.append({**band, "text": f"likely between {low:.3g} and {high:.3g}", "hoverinfo": "text"})
    if chosen and chosen > 0:
        mark = line([chosen, chosen], [bottom, top], f"chosen: {chosen:.3g}", "--strong", width=2.5)
        traces.append({**mark, "hovertemplate": "chosen: %{x:.4~g}<extra></extra>"})
    return traces


def _parabola(curve: object, low: float, high: float, top: float, unit: str) -> list[Trace]:
    """The fit, minimum + curvature * (log lr - center)^2, among the points of the last round."""
    if not isinstance(curve, dict) or low >= high:
        return []
    center, curvature, minimum = (number(curve.get(key)) for key in ("center_log_lr", "curvature", "minimum"))
    if center is None or curvature is None or minimum is None or curvature <= 0:
        return []
    logs = [math.log(low) + i / 120 * math.log(high / low) for i in range(121)]
    fitted = [(math.exp(x), minimum + curvature * (x - center) ** 2) for x in logs]
    fitted = [(lr, loss) for lr, loss in fitted if loss <= top]
    if len(fitted) < 3:
        return []
    trace = line(
        [lr for lr, _ in fitted],
        [v for _, v in fitted],
        "fitted parabola",
        "--accent",
        dash="dash",
        unit=unit,
    )
    return [{**trace, "hovertemplate": _template("fit")}]


def _anchored(anchored: dict[str, Any], max_points: int) -> Iterable[Chart]:
    steps = numbers(anchored.get("step"))
    factors = {
        name: [math.exp(u) if u is not None and abs(u) < 300 else None for u in logs]
        for name, logs in by_name(anchored.get("log_factors")).items()
    }
    traces = _lines(steps, factors, "factor e^u", max_points, width=2.5)
    if not traces:
        return
    caption = (
        "Factor on the planned learning rate: what the gradients of the whole run so far asked for, within "
        "its limits."
    )
    caption += " A group may rise above what all groups together asked for." if len(traces) > 1 else ""
    gate = anchored.get("gate")
    at = number(gate.get("step")) if isinstance(gate, dict) else None
    if at is not None and isinstance(gate, dict):
        values = [y for trace in traces for y in trace["y"]]
        traces.append(
            line([at, at], [min(values), max(values)], f"held from step {int(at)}", "--alarm", dash="dash")
        )
        caption += f" From step {int(at):,} on it was held: {gate.get('reason', 'no reason given')}."
    yield Chart(
        title="Anchored controller",
        caption=caption,
        traces=traces,
        y_title="factor",
        is_wide=False,
        height=360,
        is_log=True,
    )
    evidence = _lines(steps, by_name(anchored.get("z")), "z", max_points, width=1.2)
    if evidence:
        yield Chart(
            title="Evidence of the anchored controller",
            caption="The normalised slope z that moves the factor: above zero it falls, below zero it rises. "
            "Around zero it has settled."
            + (
                " By group: its own part; what all ask for together moves every one too."
                if len(evidence) > 1
                else ""
            ),
            traces=evidence,
            y_title="z",
            is_wide=False,
            height=260,
        )


def _lines(
    steps: Sequence[float | None],
    columns: dict[str, list[float | None]],
    label: str,
    max_points: int,
    *,
    width: float,
) -> list[Trace]:
    """A line for each column, all alike drawn once."""
    if len({tuple(column) for column in columns.values()}) == 1:
        columns = {label: next(iter(columns.values()))}
    traces = []
    for index, (name, column) in enumerate(columns.items()):
        points = [(s, v) for s, v in zip(steps, column, strict=False) if s is not None and v is not None]
        kept = thin([[v for _, v in points]], max_points)
        color, dash = series_color(index) if len(columns) > 1 else ("--accent", "solid")
        if kept:
            x, y = [points[i][0] for i in kept], [points[i][1] for i in kept]
            traces.append(line(x, y, name, color, dash=dash, width=width))
    return traces


def _template(what: str) -> str:
    return (
        f"%{{fullData.name}}<br>learning rate %{{x:.4~g}}<br>{what} %{{y:.6~g}} %{{meta[0]}}<extra></extra>"
    )
