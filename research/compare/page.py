"""The page of a comparison: a table and charts per task, drawn as in the report of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import hdet
from hdet.lab.page.chart import Chart, Trace, line, series_color
from hdet.lab.page.html_page import Cell as TableCell
from hdet.lab.page.html_page import (
    PageCharts,
    Section,
    body_html,
    build_page,
    results_html,
    sections_html,
    sentence_html,
    text,
)
from research.compare import NOTES, Case, Cell, Comparison, Row
from research.peers import METHODS

__all__ = ["build_comparison"]

_LARGEST = 2.0
"""Ratios above it, and runs that diverged, are drawn at it."""


def build_comparison(comparison: Comparison, out: str | Path) -> Path:
    """Write the self-contained page of a comparison, and return its path.

    Raises:
        HdetError: plotly, which draws the charts, is not installed.
    """
    return build_page(
        out,
        title="Comparison - hdet",
        footer=f"Written by hdet {hdet.__version__}. The page is one file and loads nothing from elsewhere.",
        body=lambda charts: _body(comparison, charts),
    )


def _body(comparison: Comparison, charts: PageCharts) -> str:
    cases = comparison.cases
    used = {row.method for case in cases for row in case.rows}
    methods = [
        [TableCell(name, name), TableCell(method.description, method.description)]
        for name, method in METHODS.items()
        if name in used
    ]
    sections = [_section(case) for case in cases]
    if methods:
        table = results_html(["method", "what it does"], methods, label="What each method does")
        sections.append(Section("Methods", before=table))
    introduction = sentence_html(_headline(cases), "headline") + sentence_html(NOTES, "sentence small")
    return body_html("Finding the learning rate", introduction, sections_html(sections, charts, level=2))


def _headline(cases: Sequence[Case]) -> str:
    """The method of one run whose worst result, over all tasks and starts, is the lowest."""
    means: dict[str, list[float]] = {}
    for row in (row for case in cases for row in case.rows if row.cost == 1):
        means.setdefault(row.method, []).extend(cell.mean for cell in row.cells.values())
    most = max(map(len, means.values()), default=0)  # a method that ran from fewer starts has an easier worst
    worst = {name: max(found) for name, found in means.items() if found and len(found) == most}
    if len(worst) < 2 or min(worst.values()) == math.inf:
        return ""
    best = min(worst, key=lambda name: worst[name])
    return f"{best} does best from its worst start: {worst[best]:.3f} times the best loss of the sweep."


def _section(case: Case) -> Section:
    if case.best_lr is None:
        return Section(case.title, before='<p class="fact">The sweep has no result yet.</p>')
    best = f"Best of the sweep: held-out loss {case.best_loss:.5g} at LR {case.best_lr:g}."
    table = results_html(*_table(case), label=f"Results: {case.title}")
    # A star's hidden words would widen a narrow page where their column is scrolled out of sight.
    table = f'<div style="position:relative;overflow:hidden">{table}</div>'
    before = f'<p style="margin-bottom:1rem">{text(best)}</p>{table}'
    return Section(case.title, _charts(case, case.best_lr), before=before)


def _table(case: Case) -> tuple[list[str], list[list[TableCell]]]:
    # Among what costs one run: the sweep is what they are measured by.
    lowest = {
        start: min(
            (row.cells[start].mean for row in case.rows if row.cost == 1 and start in row.cells),
            default=math.inf,
        )
        for start in case.starts
    }

    def ratio(row: Row, start: float) -> TableCell:
        cell = row.cells.get(start)
        if cell is None:
            return TableCell("-", None)
        is_best = row.cost == 1 and cell.mean == lowest[start] < math.inf
        return TableCell(str(cell), cell.mean, is_best)

    rows = [
        [
            TableCell(row.method, row.method),
            *(ratio(row, start) for start in case.starts),
            TableCell(str(row.cost), row.cost),
            TableCell(row.time, row.relative_seconds),
        ]
        for row in case.rows
    ]
    return ["method", *(f"x{start:g}" for start in case.starts), "runs", "time"], rows


def _charts(case: Case, best_lr: float) -> Iterable[Chart]:
    """By start, a line per method: what it ends at, and what it found."""
    if len(case.starts) < 2:
        return
    yield Chart(
        title="Held-out loss from every start",
        caption="Over the best of the sweep. The closer to one a line stays, the less a wrong start matters. "
        f"Ratios above {_LARGEST:g}, and runs that diverged, are crosses at {_LARGEST:g}.",
        traces=_lines(case, lambda cell: (min(cell.mean, _LARGEST), str(cell), cell.mean > _LARGEST)),
        x_title="start over the best LR",
        y_title="held-out loss over the best of the sweep",
        height=460,
        is_wide=True,
        is_log=True,
        layout={"xaxis": {"type": "log"}},
    )

    def found(cell: Cell) -> tuple[float, str, bool] | None:
        return None if cell.found_lr is None else (cell.found_lr / best_lr, f"LR {cell.found_lr:.3g}", False)

    traces = _lines(case, found)
    if traces:
        yield Chart(
            title="Learning rate found",
            caption="Over the best LR of the sweep, for the methods that look for one: geometric mean over "
            "seeds. DoG's is the step of an SGD, whichever optimizer is compared.",
            traces=traces,
            x_title="start over the best LR",
            y_title="found LR over the best",
            is_wide=True,
            is_log=True,
            layout={"xaxis": {"type": "log"}},
        )


def _lines(case: Case, point: Callable[[Cell], tuple[float, str, bool] | None]) -> list[Trace]:
    """A line per method through its points: a height, what is said of it, and whether it is a cross."""
    colored = sorted((row.method for row in case.rows), key=lambda name: not _is_own(name))  # ours are solid
    traces = []
    for row in case.rows:
        known = [(start, point(row.cells[start])) for start in case.starts if start in row.cells]
        points = [(start, *found) for start, found in known if found is not None]
        if not points:
            continue
        starts, heights, words, are_crosses = map(list, zip(*points, strict=True))
        color = series_color(colored.index(row.method))
        width = 3.5 if _is_own(row.method) else 1.5
        trace = line(starts, heights, row.method, color, width=width)
        symbols = ["x" if is_cross else "circle" for is_cross in are_crosses]
        trace |= {
            "mode": "lines+markers",
            "marker": {"size": 7, "symbol": symbols},
            "customdata": words,
            "hovertemplate": "%{fullData.name}<br>start x%{x:~g}<br>%{customdata}<extra></extra>",
        }
        traces.append(trace)
    return traces


def _is_own(method: str) -> bool:
    return method.startswith("hdet")
