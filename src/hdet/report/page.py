"""The report of one or several runs: header, sections of charts, settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hdet.report.compare import comparison_charts, comparison_table
from hdet.report.document import Pieces, Section, body_html, build_page, sections_html
from hdet.report.pieces import notes_html, results_html, sentence_html, settings_html, text, tiles_html
from hdet.report.runs import Run
from hdet.report.schedules import rate_charts
from hdet.report.search import search_charts
from hdet.report.steering import controller_charts, hyperparameter_charts
from hdet.report.training import health_charts, training_charts
from hdet.report.words import comparison_sentence, count, figure, headline, sentence

__all__ = ["build_report"]


def build_report(runs: Sequence[Run], out: str | Path) -> Path:
    """Write one self-contained page about one or several runs, and return its path.

    The page replaces an older one only when it is complete.

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
    )


def _one_run(run: Run, pieces: Pieces) -> str:
    return body_html(run.name, _introduction(run), _parts_of(run, pieces, level=2))


def _several_runs(runs: Sequence[Run], pieces: Pieces) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    introduction = sentence_html(comparison_sentence(runs), "sentence") + notes_html(notes)
    charts = pieces.add(comparison_charts(runs, pieces.max_points), level=3)
    table = results_html(*comparison_table(runs), label="Final results of all runs")
    comparison = (
        f'<h2 class="part">Comparison</h2>{table}'
        f'<div class="charts">{charts}</div><h2 class="part">Every run</h2>'
    )
    sections = []
    for run in runs:
        loss = (
            f"held-out loss {figure(run.final_loss, 4)}" if run.final_loss is not None else "no held-out loss"
        )
        sections.append(
            f'<details class="run"><summary><h2>{text(run.name)}</h2>'
            f"<span>{text(loss)}, {text(run.status)}</span></summary>"
            f"{_introduction(run, is_small=True)}{_parts_of(run, pieces, level=3)}</details>"
        )
    return body_html(count(len(runs), "run"), introduction, comparison + "".join(sections))


def _introduction(run: Run, *, is_small: bool = False) -> str:
    size = " small" if is_small else ""
    said = sentence_html(headline(run), f"headline{size}") + sentence_html(sentence(run), f"sentence{size}")
    return f"{said}{tiles_html(run)}{notes_html(run.notes)}"


def _parts_of(run: Run, pieces: Pieces, level: int) -> str:
    points = pieces.max_points
    sections = [
        Section("Learning rate", [*search_charts(run), *rate_charts(run, points)]),
        Section("Training", training_charts(run, points)),
        Section("Hyperparameters", hyperparameter_charts(run, points)),
        Section("Replicas and controller", controller_charts(run, points)),
        Section("Cost and health", health_charts(run, points)),
        Section("Settings and environment", before=settings_html(run, level + 1)),
    ]
    return sections_html(sections, pieces, level)


def _footer(runs: Sequence[Run]) -> str:
    versions = (run.environment.get("hdet") for run in runs)
    version = next((f" {version}" for version in versions if isinstance(version, str)), "")
    return f"Written by hdet{version}. The page is one file and loads nothing from elsewhere."
