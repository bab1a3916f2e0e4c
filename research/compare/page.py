"""The page of a comparison: a chart and a table per task, in one file that asks for nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from research.compare import NOTES, Case, Cell, Comparison
from research.peers import METHODS

__all__ = ["comparison_page"]

_WIDTH, _HEIGHT = 900, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 16, 44
_LARGEST = 2.0
"""Ratios above it, and runs that diverged, are drawn at the top."""
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b3558f", "#c58a00", "#4aa5dc", "#6f5fb0", "#767b84")
_DASHES = ("", "6 3", "2 3")

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; } tr.own th { font-weight: 700; } tr th { font-weight: 500; }
td small { display: block; opacity: .65; } td.best { font-weight: 700; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
p, dl { max-width: 68ch; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
"""


def comparison_page(comparison: Comparison) -> str:
    """The whole page; every text is escaped."""
    cases = comparison.cases
    used = {row.method for case in cases for row in case.rows}
    words = "".join(
        f"<dt>{_text(method.name)}</dt><dd>{_text(method.description)}</dd>"
        for method in METHODS.values()
        if method.name in used
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>hdet compared</title><style>{_STYLE}</style></head><body><h1>Finding the learning rate</h1>"
        f"<p>{_text(NOTES)}</p>{''.join(_section(case) for case in cases)}"
        f"<h2>Methods</h2><dl>{words}</dl></body></html>\n"
    )


def _section(case: Case) -> str:
    title = f"<section><h2>{_text(case.title)}</h2>"
    if case.best_lr is None:
        return f"{title}<p>The sweep has no result yet.</p></section>"
    best = f"<p>Best of the sweep: held-out loss {case.best_loss:.5g} at LR {case.best_lr:g}.</p>"
    chart = _chart(case) if len(case.starts) > 1 else ""
    return f"{title}{best}{chart}{_table(case, case.best_lr)}</section>"


def _table(case: Case, best_lr: float) -> str:
    names = ["method", *(f"x{start:g}" for start in case.starts), "runs", "time"]
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    # Among what costs one run: the sweep is what they are measured by.
    lowest = {
        start: min(
            (r.cells[start].mean for r in case.rows if r.cost == 1 and start in r.cells), default=math.inf
        )
        for start in case.starts
    }
    lines = []
    for row in case.rows:
        kind = ' class="own"' if row.method.startswith("hdet") else ""
        cells = [_cell(row.cells.get(s), best_lr, row.cost == 1 and lowest[s]) for s in case.starts]
        lines.append(
            f'<tr{kind}><th scope="row">{_text(row.method)}</th>{"".join(cells)}'
            f"<td>{row.cost}</td><td>{row.time}</td></tr>"
        )
    body = "".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell | None, best_lr: float, lowest: float | bool) -> str:
    if cell is None:
        return "<td>-</td>"
    is_best = math.isfinite(cell.mean) and cell.mean == lowest
    found = f"<small>LR x{cell.found_lr / best_lr:.2g}</small>" if cell.found_lr is not None else ""
    kind = ' class="best"' if is_best else ""
    return f"<td{kind}>{_text(cell)}{found}</td>"


def _chart(case: Case) -> str:
    """Ratio by start, both on logarithmic axes; a line per method."""
    xs = [math.log(start) for start in case.starts]
    shown = [min(c.mean, _LARGEST) for row in case.rows for c in row.cells.values()]
    bottom, top = math.log(min(0.98, *shown)), math.log(max(1.1, *shown) * 1.02)

    def x(start: float) -> float:
        return _LEFT + (math.log(start) - xs[0]) / (xs[-1] - xs[0]) * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        share = (math.log(min(ratio, _LARGEST)) - bottom) / (top - bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    last = math.inf
    for ratio in (0.5, 0.7, 0.9, 1.0, 1.02, 1.05, 1.1, 1.2, 1.5, _LARGEST):
        is_apart = last - y(ratio) > 14 or ratio == 1.0
        if bottom <= math.log(ratio) <= top and is_apart:
            last = y(ratio)
            parts.append(_line(_LEFT, last, _WIDTH - _RIGHT, last, strong=ratio == 1.0))
            sign = "≥ " if ratio == _LARGEST else ""
            parts.append(f'<text x="{_LEFT - 8}" y="{last + 4:.1f}" text-anchor="end">{sign}{ratio:g}</text>')
    for start in case.starts:
        parts.append(_line(x(start), _TOP, x(start), _HEIGHT - _BOTTOM))
        parts.append(f'<text x="{x(start):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">x{start:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">start over the best LR</text>')
    for i, row in enumerate(case.rows):
        turn, place = divmod(i, len(_COLORS))
        style = f'stroke="{_COLORS[place]}" stroke-dasharray="{_DASHES[turn % len(_DASHES)]}"'
        style += f' stroke-width="{3 if row.method.startswith("hdet") else 1.5}" fill="none"'
        points = [(x(start), y(row.cells[start].mean)) for start in case.starts if start in row.cells]
        parts.append(
            f'<polyline points="{_points(points)}" {style}><title>{_text(row.method)}</title></polyline>'
        )
        height = _TOP + 4 + i * (_HEIGHT - _TOP - _BOTTOM) / max(1, len(case.rows))
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 14} {height:.1f}h26" {style}/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 46}" y="{height + 4:.1f}">{_text(row.method)}</text>')
    label = (
        "Held-out loss over the best of the sweep, by start and method; the numbers are in the table below"
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _line(x1: float, y1: float, x2: float, y2: float, *, strong: bool = False) -> str:
    opacity = 0.6 if strong else 0.15
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" '
        f'stroke-opacity="{opacity}"/>'
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
