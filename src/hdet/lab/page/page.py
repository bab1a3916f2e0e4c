"""The report of one or several runs: what was found, charts, settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hdet.lab.page.chart import Chart
from hdet.lab.page.compare import comparison_charts, comparison_table, metric_charts
from hdet.lab.page.document import Pieces, Section, body_html, build_page, sections_html
from hdet.lab.page.pieces import notes_html, results_html, sentence_html, settings_html, text, tiles_html
from hdet.lab.page.runs import Run
from hdet.lab.page.schedules import rate_charts
from hdet.lab.page.search import search_charts
from hdet.lab.page.steering import controller_charts, hyperparameter_charts
from hdet.lab.page.tiles import comparison_tiles, run_tiles
from hdet.lab.page.training import health_charts, loss_charts, training_charts
from hdet.lab.page.words import comparison_headline, comparison_sentence, count, figure, headline, sentence


def build_report(runs: Sequence[Run], out: str | Path, *, refresh_seconds: float = 0) -> Path:
    """Write one self-contained page about one or several runs, and return its path.

    The page replaces an older one only when it is complete.

    Args:
        runs: what :func:`read_run` has read.
        out: the file.
        refresh_seconds: how often an open page loads itself again, for a run that still trains; 0 for never.

    Raises:
        ValueError: there is no run.
        HdetError: plotly, which draws the charts, is not installed.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    return build_page(
        out,
        title=(runs[0].name if len(runs) == 1 else f"{len(runs)} runs") + " - hdet report",
        footer=_footer(runs),
        body=lambda pieces: _one_run(runs[0], pieces) if len(runs) == 1 else _several_runs(runs, pieces),
        refresh_seconds=refresh_seconds,
    )


def _one_run(run: Run, pieces: Pieces) -> str:
    return body_html(run.name, _introduction(run), _parts_of(run, pieces, level=2))


def _several_runs(runs: Sequence[Run], pieces: Pieces) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    introduction = (
        sentence_html(comparison_headline(runs), "headline")
        + sentence_html(comparison_sentence(runs), "sentence")
        + tiles_html(list(comparison_tiles(runs)))
        + notes_html(notes)
    )
    points = pieces.max_points
    head, rows, shared = comparison_table(runs)
    said = ", ".join(f"{name} {value}" for name, value in shared.items())
    table = results_html(head, rows, label="Results of all runs") + sentence_html(
        f"In all runs: {said}." if said else "", "common"
    )
    sections = [
        Section("", _over(runs, comparison_charts(runs, points))),
        Section("Results", _over(runs, metric_charts(runs, points)), before=table),
    ]
    comparison = sections_html(sections, pieces, level=2) + '<h2 class="part">Every run</h2>'
    parts = []
    for run in runs:
        loss = (
            f"held-out loss {figure(run.final_loss, 4)}" if run.final_loss is not None else "no held-out loss"
        )
        parts.append(
            f'<details class="run"><summary><h2>{text(run.name)}</h2>'
            f"<span>{text(loss)}, {text(run.status)}</span></summary>"
            f"{_introduction(run, is_small=True)}{_parts_of(run, pieces, level=3)}</details>"
        )
    return body_html(count(len(runs), "run"), introduction, comparison + "".join(parts))


def _introduction(run: Run, *, is_small: bool = False) -> str:
    size = " small" if is_small else ""
    said = sentence_html(headline(run), f"headline{size}") + sentence_html(sentence(run), f"sentence{size}")
    return f"{said}{tiles_html(list(run_tiles(run)))}{notes_html(run.notes)}"


def _parts_of(run: Run, pieces: Pieces, level: int) -> str:
    points = pieces.max_points
    found = [*search_charts(run), *rate_charts(run, points), *loss_charts(run, points)]
    sections = [
        Section("", _over([run], found)),
        Section("Training", _over([run], training_charts(run, points))),
        Section("Hyperparameters", _over([run], hyperparameter_charts(run, points))),
        Section("Replicas and controller", _over([run], controller_charts(run, points))),
        Section("Cost and health", _over([run], health_charts(run, points))),
        Section("Settings and environment", before=settings_html(run, level + 1)),
    ]
    return sections_html(sections, pieces, level)


def _over(runs: Sequence[Run], charts: Iterable[Chart]) -> list[Chart]:
    """The charts with axes that reach over all steps of the runs."""
    num_steps = max(run.num_planned_steps for run in runs)
    return [replace(chart, num_steps=num_steps) for chart in charts]


def _footer(runs: Sequence[Run]) -> str:
    versions = (run.environment.get("hdet") for run in runs)
    version = next((f" {version}" for version in versions if isinstance(version, str)), "")
    return f"Written by hdet{version}. The page is one file and loads nothing from elsewhere."
