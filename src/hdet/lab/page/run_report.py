"""The report of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import hdet
from hdet.lab.page import html_page, run_comparison, sentences
from hdet.lab.page import loss_charts as losses
from hdet.lab.page import method_charts as method
from hdet.lab.page import paper_figures as paper
from hdet.lab.page.html_page import PageCharts, Section
from hdet.lab.page.read_runs import Run

CHARTS = {
    "": (losses.search_charts, method.rate_charts, method.said_charts, losses.loss_charts),
    "Steering": (method.averaging_charts, method.signal_charts, method.value_charts, method.look_charts),
    "The paper's figures": (paper.cycle_charts, paper.schedule_charts),
    "Metrics": (losses.metric_charts,),
    "Cost and health": (method.cost_charts, method.left_out_charts),
}
"""What makes the charts of a run, by their section; a function is given the run."""


def build_report(runs: Sequence[Run], out: str | Path) -> Path:
    """Write one self-contained page about one or several runs, and return its path.

    The page replaces an older one only when it is complete.

    Args:
        runs: what :func:`read_run` has read.
        out: the file.

    Raises:
        ValueError: there is no run.
        HdetError: plotly, which draws the charts, is not installed.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    return html_page.build_page(
        out,
        title=(runs[0].name if len(runs) == 1 else f"{len(runs)} runs") + " - hdet report",
        footer=f"Written by hdet {hdet.__version__}. The page is one file and loads nothing from elsewhere.",
        body=lambda charts: _one_run(runs[0], charts) if len(runs) == 1 else _several_runs(runs, charts),
    )


def _one_run(run: Run, charts: PageCharts) -> str:
    return html_page.body_html(run.name, _introduction_of(run), _parts_of(run, charts, level=2))


def _several_runs(runs: Sequence[Run], charts: PageCharts) -> str:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    table = html_page.results_html(*run_comparison.comparison_table(runs), label="Results of all runs")
    sections = [Section("", run_comparison.comparison_charts(runs)), Section("Results", before=table)]
    num_steps = max(run.num_planned_steps for run in runs)
    main = html_page.sections_html(sections, charts, 2, num_steps) + '<h2 class="part">Every run</h2>'
    for run in runs:
        loss = run.final_loss
        said = "no held-out loss" if loss is None else f"held-out loss {sentences.figure(loss, 4)}"
        name, said = html_page.text(run.name), html_page.text(f"{said}, {run.status}")
        main += f'<details class="run"><summary><h2>{name}</h2><span>{said}</span></summary>'
        main += f"{_introduction_of(run)}{_parts_of(run, charts, level=3)}</details>"
    introduction = html_page.introduction_html(*run_comparison.comparison_words(runs), [], notes)
    return html_page.body_html(sentences.count(len(runs), "run"), introduction, main)


def _introduction_of(run: Run) -> str:
    said = sentences.headline(run), sentences.sentence(run), sentences.run_tiles(run)
    return html_page.introduction_html(*said, run.notes)


def _parts_of(run: Run, charts: PageCharts, level: int) -> str:
    tables = {"Settings": run.config, "Result": run.result, "Environment": run.environment}
    sections = [
        Section(heading, chain.from_iterable(charts_of(run) for charts_of in functions))
        for heading, functions in CHARTS.items()
    ]
    sections.append(Section("Settings and environment", before=html_page.settings_html(tables, level + 1)))
    return html_page.sections_html(sections, charts, level, run.num_planned_steps)
