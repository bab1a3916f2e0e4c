"""Several runs side by side: in words, in common charts, and in a table of results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hdet.lab.page import run_numbers as numbers
from hdet.lab.page.chart import Chart, curve, series_color, unzip
from hdet.lab.page.html_page import Cell
from hdet.lab.page.loss_charts import final_loss_charts
from hdet.lab.page.read_runs import Run, loss_title
from hdet.lab.page.sentences import count, duration, figure


def comparison_headline(runs: Sequence[Run]) -> str:
    """Name the best of several runs, in one sentence; empty where they cannot be compared."""
    losses = _by_loss(runs)
    if len(losses) < 2 or not numbers.are_comparable(runs):
        return ""
    best, run = losses[0]
    if numbers.is_sweep(runs):
        return f"The best of {len(runs)} learning rates is {figure(numbers.asked_lr(run))}."
    return f"“{run.name}” ended best, with a held-out loss of {figure(best, 4)}."


def comparison_sentence(runs: Sequence[Run]) -> str:
    """Tell of several runs what there is to say beside which of them ended best."""
    losses = _by_loss(runs)
    if len(losses) < 2:
        known = "one has" if losses else "none has"
        return f"{count(len(runs), 'run')}, of which {known} a held-out loss."
    if not numbers.are_comparable(runs):
        what = count(len(runs), "run")
        return f"{what} on different tasks. Their losses cannot be compared with each other."
    (best, first), (next_best, second), (worst, last) = losses[0], losses[1], losses[-1]
    if numbers.is_sweep(runs):
        text = f"It ended at a held-out loss of {figure(best, 4)}. "
        text += f"The next best is {figure(numbers.asked_lr(second))}, {_above(next_best, best)}."
        rates = sorted(rate for run in runs if (rate := numbers.asked_lr(run)) is not None)
        if numbers.asked_lr(first) in (rates[0], rates[-1]):
            text += " The best is at the edge of the sweep, so a better one may lie beyond it."
    else:
        text = f"Next comes “{second.name}”, {_above(next_best, best)}."
        if len(losses) > 2:
            text += f" The last is “{last.name}”, {_above(worst, best)}."
    lost = len(runs) - len(losses)
    return text + (f" {count(lost, 'run')} ended without a loss." if lost else "")


def _by_loss(runs: Sequence[Run]) -> list[tuple[float, Run]]:
    known = [(run.final_loss, run) for run in runs if run.final_loss is not None]
    return sorted(known, key=lambda pair: pair[0])


def _above(loss: float, best: float) -> str:
    """Tell how far a loss is above the best."""
    if loss == best:
        return "at the same loss"
    share = 100 * (loss / best - 1) if best > 0 else math.inf
    return f"{figure(share, 2)} % above" if share < 100 else f"at {figure(loss)}"


def comparison_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Loss against learning rate, and held-out loss and learning rate of all runs over steps."""
    unit = runs[0].loss_unit if numbers.are_comparable(runs) else ""
    yield from final_loss_charts(runs, _untrained(runs, "loss"), unit)
    losses = _held_out_chart(runs, "loss", "Held-out loss", loss_title(unit), max_points)
    if losses.traces:
        yield replace(losses, is_log=False)
    rates, peaks = [], []
    for index, run in enumerate(runs):
        steps, values = numbers.base_series(run, next(iter(numbers.learning_rates(run)), ""))
        known = [lr for lr in values if 0 < lr < math.inf]
        if known:
            rates += curve(steps, values, run.name, series_color(index), max_points, width=2.2)
            peaks.append(max(known))
    if rates:
        caption = "The base of each run. Of several parameter groups, the first is shown."
        style = {"is_log": True, "max_decades": 2 + math.log10(max(peaks) / min(peaks))}
        title = "Learning rate over the run"
        yield Chart(title, caption, rates, "learning rate", hover=_hover(runs), **style)


def comparison_metric_charts(runs: Sequence[Run], max_points: int) -> Iterable[Chart]:
    """Metrics that several runs share, over steps."""
    names = dict.fromkeys((name for run in runs for e in run.evaluations for name in e.metrics), 0.0)
    for name in numbers.main_metrics(names):
        shown = name.replace("_", " ")
        chart = _held_out_chart(runs, name, f"Metric: {shown}", shown, max_points)
        if len(chart.traces) > 1:
            yield replace(chart, height=280)


def _held_out_chart(runs: Sequence[Run], name: str, title: str, y_title: str, max_points: int) -> Chart:
    traces, limits = [], _limits(runs, name)
    for index, run in enumerate(runs):
        points = unzip(numbers.evaluated(run, name))
        traces += curve(*points, run.name, series_color(index), max_points, width=2.2)
    caption = "Measured on held-out data. Compare where the curves end, not where they cross."
    caption += " Values far worse than the first one are cut off." if limits else ""
    return Chart(title, caption, traces, y_title, hover=_hover(runs), layout=limits)


def _hover(runs: Sequence[Run]) -> str:
    return "x unified" if len(runs) <= 12 else "closest"


def _untrained(runs: Sequence[Run], name: str) -> float | None:
    """The value before the first step, of the run in the middle where they differ."""
    first = [value for run in runs for step, value in numbers.evaluated(run, name)[:1] if step == 0]
    return statistics.median_low(first) if first else None


def _limits(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """An axis on which a run that went wrong does not flatten the others; empty where there is none.

    The loss, and what falls in most runs, is cut above its first value, and what rises below it.
    """
    untrained = _untrained(runs, name) if numbers.are_comparable(runs) else None
    if untrained is None:
        return {}
    curves = [[value for _, value in numbers.evaluated(run, name)] for run in runs]
    is_falling = name == "loss" or statistics.median(c[-1] for c in curves if c) <= untrained
    sign = 1 if is_falling else -1
    signed = [sign * value for values in curves for value in values]
    low, high = min(signed), numbers.highest_shown(signed, sign * untrained)
    room = 0.05 * (high - low) or 0.1
    ends = sorted([sign * (low - room), sign * (high + room)])
    return {} if high == max(signed) else {"yaxis": {"range": ends}}


def comparison_table(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]], dict[str, str]]:
    """Final results: a head, a row of cells per run, and what is the same in all runs and has no column.

    The best loss is marked if losses are comparable.
    """
    metrics = numbers.main_metrics({name: 0.0 for run in runs for name in run.final_metrics})
    known = [run.final_loss for run in runs if run.final_loss is not None]
    best = min(known) if len(known) > 1 and numbers.are_comparable(runs) else None
    table = [_row(run, list(metrics), best) for run in runs]
    kept, shared = list[str](), dict[str, str]()
    for name in table[0]:
        cells = [row[name] for row in table]
        is_setting = name in ("controller", "replicas", "steps", "left out", "status")
        if is_setting and len(runs) > 1 and len({cell.text for cell in cells}) == 1:
            shared |= {name: cells[0].text} if cells[0].value is not None else {}
        elif any(cell.value is not None for cell in cells):
            kept.append(name)
    return kept, [[row[name] for name in kept] for row in table], shared


def _row(run: Run, metrics: Sequence[str], best: float | None) -> dict[str, Cell]:
    """The results of a run, by the head of their column."""
    controller = run.config.get("controller")
    left_out = len(run.excluded_events) if run.records else None
    return {
        "run": Cell(run.name, run.name.lower()),
        "held-out loss": _cell(run.final_loss, 5, is_best=best is not None and run.final_loss == best),
        **{name.replace("_", " "): _cell(run.final_metrics.get(name), 5) for name in metrics},
        "learning rate guessed": _cell(numbers.asked_lr(run)),
        "learning rate found": _cell(numbers.found_lr(run)),
        "controller": _cell(controller if isinstance(controller, str) else None),
        "replicas": _cell(run.num_replicas),
        "steps": Cell(f"{run.last_step:,}", run.last_step),
        "time": Cell("-" if run.seconds is None else duration(run.seconds), run.seconds),
        "left out": _cell(left_out),
        "status": _cell(run.status),
    }


def _cell(value: float | str | None, digits: int = 3, *, is_best: bool = False) -> Cell:
    if isinstance(value, str):
        return Cell(value, value.lower())
    return Cell("-" if value is None else figure(value, digits), value, is_best)
