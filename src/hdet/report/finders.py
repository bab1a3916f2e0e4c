"""Charts of what looked for the learning rate: the scout before the run, the anchored controller in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hdet.report.chart import Chart, Trace, line, series_color
from hdet.report.found import Anchored, Choice, Fan, Parabola, Scouted, anchored_of, scouted_of
from hdet.report.runs import Run
from hdet.report.series import thin

__all__ = ["finder_charts"]

_STARTS = {"wide": ", from the initial weights", "narrow": ", from the best trial"}


def finder_charts(run: Run, max_points: int) -> Iterable[Chart]:
    """The scout's losses over learning rates, and the anchored factor over steps."""
    scouted, anchored = scouted_of(run), anchored_of(run)
    if scouted is not None:
        yield from _scout(scouted, run.loss_unit)
    if anchored is not None:
        yield from _anchored(anchored, max_points)


def _scout(scouted: Scouted, unit: str) -> Iterable[Chart]:
    finite = [loss for fan in scouted.fans for _, loss in fan.points if loss is not None]
    if not finite:
        return
    low, high = min(finite), _highest_shown(scouted.fans)
    room = 0.06 * (high - low) or 0.1
    traces = [] if scouted.choice is None else list(_choice(scouted.choice, low - room, high + room))
    for index, fan in enumerate(scouted.fans):
        name = f"round {index + 1}" if len(scouted.fans) > 1 else "replicas"
        name += _STARTS.get(fan.stage, "")
        traces += _trials(fan, name, index, high, high + room, unit)
    traces += _fit(scouted, high, unit)
    yield Chart(
        title="Scout",
        caption=_caption(scouted.choice),
        traces=traces,
        x_title="learning rate",
        y_title=f"loss ({unit})" if unit else "loss",
        is_wide=False,
        height=360,
        is_log=False if low > 0 else None,
        is_table_of_points=True,
        layout={"xaxis": {"type": "log"}},
    )


def _caption(choice: Choice | None) -> str:
    caption = (
        "Loss after a miniature run at each learning rate, from the initial weights and then from those of "
        "the best trial. "
    )
    if choice is None:
        return caption + "No decision is recorded."
    caption += (
        "The vertical line is the choice, carried over from one replica's batch to those of all and to the "
        "long run; the band is its uncertainty, about one sigma."
    )
    return caption + (f" Note on the choice: {choice.reason}." if choice.reason else "")


def _highest_shown(fans: Sequence[Fan]) -> float:
    """A loss far above that of the smallest learning rate, which hardly trains, is as good as lost."""
    found = [(lr, loss) for fan in fans for lr, loss in fan.points if loss is not None]
    low, high = min(loss for _, loss in found), max(loss for _, loss in found)
    from_start = [
        (lr, loss) for fan in fans if fan.stage != "narrow" for lr, loss in fan.points if loss is not None
    ]
    _, untrained = min(from_start, default=(0.0, high))
    return min(high, untrained + 0.2 * (untrained - low))


def _trials(fan: Fan, name: str, index: int, high: float, top: float, unit: str) -> Iterable[Trace]:
    """The losses of a fan; those of diverging replicas would flatten the valley and are drawn at the top."""
    color, dash = series_color(index)
    shown = [(lr, None if loss is None or loss > high else loss) for lr, loss in fan.points]
    trace = line(
        [lr for lr, _ in shown], [loss for _, loss in shown], name, color, unit=unit, dash=dash, width=1.5
    )
    yield trace | {"mode": "lines+markers", "marker": {"size": 8}, "hovertemplate": _template("loss")}
    lost = [lr for lr, loss in shown if loss is None]
    if lost:
        yield line(lost, [top] * len(lost), f"{name}: failed", color, unit="") | {
            "mode": "markers",
            "marker": {"size": 9, "symbol": "x-thin", "line": {"width": 2, "color": color}},
            "hovertemplate": "learning rate %{x:.4~g}<br>the loss was far above the others or not finite"
            "<extra></extra>",
        }


def _choice(choice: Choice, bottom: float, top: float) -> Iterable[Trace]:
    low, high = choice.low, choice.high
    if low is not None and high is not None and low < high:
        band = line(
            [low, low, high, high, low], [bottom, top, top, bottom, bottom], "likely range", "--band", width=0
        )
        band |= {"fill": "toself", "fillcolor": "--band", "hoveron": "fills", "hovertemplate": None}
        yield band | {"text": f"likely between {low:.3g} and {high:.3g}", "hoverinfo": "text"}
    mark = line([choice.lr] * 2, [bottom, top], f"chosen: {choice.lr:.3g}", "--strong", width=2.5)
    yield mark | {"hovertemplate": "chosen: %{x:.4~g}<extra></extra>"}


def _fit(scouted: Scouted, top: float, unit: str) -> Iterable[Trace]:
    """The fitted parabola among the points of the last stage."""
    stage = scouted.fans[-1].stage
    tried = [lr for fan in scouted.fans if fan.stage == stage for lr, _ in fan.points]
    if scouted.parabola is None or not tried:
        return
    fitted = [(lr, loss) for lr, loss in _curve(scouted.parabola, min(tried), max(tried)) if loss <= top]
    if len(fitted) < 3:
        return
    x, y = [lr for lr, _ in fitted], [loss for _, loss in fitted]
    trace = line(x, y, "fitted parabola", "--accent", dash="dash", unit=unit)
    yield trace | {"hovertemplate": _template("fit")}


def _curve(parabola: Parabola, low: float, high: float) -> Iterable[tuple[float, float]]:
    first, last = math.log(low), math.log(high)
    for i in range(121):
        x = first + i / 120 * (last - first)
        yield math.exp(x), parabola.minimum + parabola.curvature * (x - parabola.center) ** 2


def _anchored(anchored: Anchored, max_points: int) -> Iterable[Chart]:
    traces = _lines(anchored.steps, anchored.factors, "factor e^u", max_points, width=2.5)
    if not traces:
        return
    caption = (
        "Factor on the planned learning rate, or on the scout's choice if there was one: what the gradients "
        "of the whole run so far asked for, within its limits."
    )
    caption += " A group may rise above what all groups together asked for." if len(traces) > 1 else ""
    at = anchored.held_from
    if at is not None:
        values = [y for trace in traces for y in trace["y"]]
        traces.append(
            line([at, at], [min(values), max(values)], f"held from step {at}", "--alarm", dash="dash")
        )
        caption += f" From step {at:,} on it was held: {anchored.reason}."
    yield Chart(
        title="Anchored controller",
        caption=caption,
        traces=traces,
        y_title="factor",
        is_wide=False,
        height=360,
        is_log=True,
    )
    evidence = _lines(anchored.steps, anchored.signals, "z", max_points, width=1.2)
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
    steps: Sequence[int],
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
        points = [(s, v) for s, v in zip(steps, column, strict=True) if v is not None]
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
