"""Pieces of the page as HTML. Every text that comes from a run is escaped here."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hdet.report.chart import Chart, short
from hdet.report.compare import Cell
from hdet.report.runs import Run, number
from hdet.report.words import (
    asked_lr,
    corrections,
    count,
    duration,
    excluded_events,
    figure,
    found_lr,
    num_brakes,
    training_loss,
)

__all__ = [
    "figure_html",
    "notes_html",
    "results_html",
    "sentence_html",
    "settings_html",
    "text",
    "tiles_html",
]

_MAX_METRICS = 4
_MAX_TEXT = 4000


def text(value: object) -> str:
    """Any text, safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def sentence_html(sentence: str, kind: str) -> str:
    """A paragraph of this class; a number does not break at its sign."""
    whole = re.sub(r"\d[\d.]*e-\d+", r"<span>\g<0></span>", text(sentence))
    return f'<p class="{kind}">{whole}</p>' if whole else ""


def tiles_html(run: Run) -> str:
    """Key figures of a run; what is unknown has no tile."""
    tiles = list(_tiles(run))
    items = "".join(
        f'<div class="tile{" first" if i == 0 else ""}"><dt>{text(label)}</dt><dd>{text(value)}'
        f"<small>{text(hint) or '&nbsp;'}</small></dd></div>"
        for i, (label, value, hint) in enumerate(tiles)
    )
    columns = len(tiles) if len(tiles) <= 7 else (len(tiles) + 1) // 2
    return f'<dl class="tiles" style="--columns:{columns}">{items}</dl>' if items else ""


def _tiles(run: Run) -> Iterable[tuple[str, str, str]]:
    """Label, value and hint of each."""
    found = found_lr(run)
    if found is not None:
        yield "Learning rate", figure(found), _origin(run)
    trained = training_loss(run)
    if run.final_loss is not None:
        yield "Held-out loss", figure(run.final_loss, 4), run.loss_unit
    elif trained is not None:
        yield "Training loss", figure(trained, 4), run.loss_unit or "last round"
    for name, value in _main(run.final_metrics):
        yield short(name, 30), figure(value, 4), "held-out"
    if run.last_step:
        planned = number(run.config.get("steps"))
        yield (
            "Steps",
            f"{run.last_step:,}",
            f"of {int(planned):,}" if planned and planned != run.last_step else "",
        )
    seconds = number(run.result.get("seconds"))
    if seconds is not None:
        yield "Time", duration(seconds), run.status if run.status != "finished" else ""
    events = excluded_events(run)
    if events:
        left_out = str(len({replica for _, replica, _ in events}))
        yield "Replicas left out", left_out, f"of {run.num_replicas}, {count(len(events), 'time')} in all"
    if run.records:
        milliseconds = sum(v for record in run.records for v in record.milliseconds.values())
        if seconds and math.isfinite(milliseconds) and milliseconds:
            share = figure(milliseconds / seconds / 10, 2)
            yield "Cost of syncs", f"{share} %", f"{duration(milliseconds / 1000)} in all"


def _origin(run: Run) -> str:
    """Where the learning rate comes from, in a few words."""
    brakes, asked = num_brakes(run), asked_lr(run)
    if brakes:
        return f"lowered {count(brakes, 'time')} by the guard"
    what = "mean peak of all groups" if len(set(corrections(run))) > 1 else "peak"
    return f"{what}, as asked for" if asked == found_lr(run) else f"{what}; asked for {figure(asked)}"


def _main(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Without those that are a part of another, such as ``auc_like`` beside ``auc``."""
    parts = {name for name in metrics for whole in metrics if name.startswith(f"{whole}_")}
    return [(name, value) for name, value in metrics.items() if name not in parts][:_MAX_METRICS]


def notes_html(notes: Sequence[str]) -> str:
    """A visible warning about what could not be read."""
    if not notes:
        return ""
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return (
        f'<div class="notes" role="note"><strong>Not everything could be read.</strong><ul>{items}</ul></div>'
    )


def figure_html(chart: Chart, identity: str, *, level: int, is_wide: bool) -> str:
    """The frame of a chart; the page's script draws into it."""
    key = '<span class="key">lowest value <i></i> highest value</span>' if chart.has_spread_key else ""
    label = text(f"Chart: {chart.title}. {chart.caption} The numbers are in the table below.")
    return (
        f'<figure class="{"wide" if is_wide else "half"}" aria-labelledby="{identity}-title">'
        f'<div class="head"><h{level} class="title" id="{identity}-title">{text(chart.title)}</h{level}>'
        f'<div class="tools" data-choice="{text(chart.choice_label)}">{key}</div></div>'
        f'<div class="plot" id="{identity}" role="group" style="min-height:{chart.height}px" '
        f'aria-label="{label}"></div>'
        f"<figcaption>{text(chart.caption)}</figcaption>"
        '<details class="numbers"><summary>Numbers</summary></details></figure>'
    )


def results_html(head: Sequence[str], rows: Sequence[Sequence[Cell]], *, label: str) -> str:
    """A table of results; its heads are buttons that sort it."""
    numeric = [all(not isinstance(row[i].value, str) for row in rows) for i in range(len(head))]
    heads = "".join(
        f'<th scope="col" class="{"number" * is_number}"><button type="button">{text(name)}</button></th>'
        for name, is_number in zip(head, numeric, strict=True)
    )
    lines = []
    for row in rows:
        cells = [f'<th scope="row" data-value="{text(row[0].value)}">{text(row[0].text)}</th>']
        for i, cell in enumerate(row[1:], 1):
            classes = " ".join(["number"] * numeric[i] + ["best"] * cell.is_best)
            mark = (
                ' <span aria-hidden="true">★</span><span class="hidden-text"> (best)</span>'
                if cell.is_best
                else ""
            )
            value = "" if cell.value is None else cell.value
            cells.append(f'<td class="{classes}" data-value="{text(value)}">{text(cell.text)}{mark}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll results" tabindex="0" role="region" aria-label="{text(label)}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def settings_html(run: Run, level: int) -> str:
    """Settings, result and environment as tables."""
    parts = (("Settings", run.config), ("Result", run.result), ("Environment", run.environment))
    sections = "".join(
        f'<section><h{level} class="title">{name}</h{level}><table>{_rows(entries)}</table></section>'
        for name, entries in parts
        if entries
    )
    return f'<div class="settings">{sections}</div>' if sections else ""


def _rows(entries: Mapping[str, Any]) -> str:
    return "".join(
        f'<tr><th scope="row">{text(key)}</th><td>{text(_shown(value))}</td></tr>'
        for key, value in entries.items()
    )


def _shown(value: Any) -> str:
    try:
        shown = value if isinstance(value, str) else json.dumps(_rounded(value), ensure_ascii=False)
    except RecursionError:
        shown = "nested too deeply"
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"


def _rounded(value: Any) -> Any:
    """Numbers as one would read them, however deep they are."""
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
