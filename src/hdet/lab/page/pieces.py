"""Pieces of the page as HTML. Every text that comes from a run is escaped here."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hdet.lab.page.chart import Chart
from hdet.lab.page.compare import Cell
from hdet.lab.page.runs import Run
from hdet.lab.page.tiles import Tile
from hdet.lab.page.words import figure

_MAX_TEXT = 4000


def text(value: object) -> str:
    """Any text, safe between tags and in attributes."""
    return html.escape(str(value), quote=True)


def sentence_html(sentence: str, kind: str) -> str:
    """A paragraph of this class."""
    return f'<p class="{kind}">{_unbroken(sentence)}</p>' if sentence else ""


def _unbroken(sentence: str) -> str:
    """Text in which a number does not break at its sign."""
    return re.sub(r"\d[\d.]*e-\d+", r"<span>\g<0></span>", text(sentence))


def tiles_html(tiles: Sequence[Tile]) -> str:
    """Key figures: label, value and hint of each. The first is the one that matters most."""
    items = "".join(
        f'<div class="tile{" first" if i == 0 else ""}"><dt>{text(label)}</dt><dd>{text(value)}'
        f"<small>{_unbroken(hint) or '&nbsp;'}</small></dd></div>"
        for i, (label, value, hint) in enumerate(tiles)
    )
    return f'<dl class="tiles" style="--columns:{len(tiles)}">{items}</dl>' if items else ""


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
        f'<tr><th scope="row">{text(str(key).replace("_", " "))}</th><td>{text(_shown(value))}</td></tr>'
        for key, value in entries.items()
    )


def _shown(value: Any) -> str:
    try:
        shown = _plain(value)
    except RecursionError:
        shown = "nested too deeply"
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"


def _plain(value: Any) -> str:
    """A setting as one would read it: a line for each entry, and numbers without their noise.

    >>> print(_plain({"a": [0.1 + 0.2, True], "b": None}))
    a: 0.3, yes
    b: none
    """
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_plain(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return figure(value, 6)
    return "none" if value is None or value == "" else str(value)
