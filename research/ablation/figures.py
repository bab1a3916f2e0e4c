"""The paper's figures 2 and 3 of these runs: loss by step, and learning rates by parameter group."""

from __future__ import annotations

import re
from pathlib import Path

from hdet.errors import HdetError, install_command
from hdet.lab.ablation import decay_shape
from hdet.method.recipe import one_cycle
from research.ablation.summary import Ablation, Case

__all__ = ["write_figures"]

_COLORS = ("#767b84", "#222222", "#009e73", "#c58a00", "#b3558f", "#0072b2", "#d55e00", "#4aa5dc")
_LOSS_ROWS = ("plain", "grid", "warm_init", "hdet_no_controller", "hdet_no_warm_start", "hdet")


def write_figures(ablation: Ablation, folder: Path) -> list[Path]:
    """Two PNG files per task, optimizer and length; raises if matplotlib is missing."""
    written = []
    for case in ablation.cases:
        if case.chosen is None:
            continue
        facts = case.facts
        slug = re.sub(r"[^A-Za-z0-9]+", "-", f"{facts['task']}-{facts['optimizer']}-{facts['steps']}").strip(
            "-"
        )
        written += [_losses(case, folder / f"loss-{slug}.png"), _rates(case, folder / f"lr-{slug}.png")]
    return written


def _losses(case: Case, path: Path) -> Path:
    """Figure 2: a line per seed."""
    figure, axes = _axes(case, "training loss")
    at = _at(case)
    results = [r for r in case.results if r.row.key in _LOSS_ROWS and r.row.at in ("low", at)]
    highest = max((run["train_losses"][0][1] or 0.0 for r in results for run in r.runs.values()), default=1.0)
    for result, color in zip(results, _COLORS, strict=False):
        crashed = f", {result.num_crashed}/{len(result.runs)} crashed" if result.num_crashed else ""
        label = f"{result.row.name} ({result.lr:g}{crashed})"
        for run in result.runs.values():
            points = [(step, loss) for step, loss in run["train_losses"] if loss is not None]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.1, alpha=0.75, label=label)
            label = None  # once per row
    seen = [loss for r in results for run in r.runs.values() for _, loss in run["train_losses"] if loss]
    lowest = min(seen, default=0.0)
    room = 0.05 * (highest - lowest)
    axes.set_ylim(lowest - room, 1.5 * highest)  # what explodes leaves the picture
    return _save(figure, axes, path)


def _rates(case: Case, path: Path) -> Path:
    """Figure 3: full HDET by group and seed, the plan, and the controller's decay alone."""
    figure, axes = _axes(case, "learning rate")
    at, steps = _at(case), case.facts["steps"]
    high = case.result("hdet", at).lr
    times = range(1, steps + 1)
    planned = [high * one_cycle(t - 1, steps) for t in times]
    fixed = [high * decay_shape(t - 1, steps=steps) for t in times]
    axes.plot(times, planned, color="#222222", label="plan, no controller")
    axes.plot(times, fixed, color="#222222", linestyle=":", label="the controller's decay alone")
    runs = case.result("hdet", at).runs.values()
    names = sorted({name for run in runs for name in run["lrs"]})
    for name, color in zip(names, _COLORS[2:], strict=False):
        label = name
        for run in runs:
            if name in run["lrs"]:
                points = zip(*run["lrs"][name], strict=True)
                axes.plot(*points, color=color, linestyle="--", linewidth=1, alpha=0.75, label=label)
                label = None
    axes.set_yscale("log")
    axes.set_ylim(bottom=min(fixed) / 3)
    return _save(figure, axes, path)


def _at(case: Case) -> str:
    """The paper's learning rate; the best where none breaks a plain run."""
    return "high" if case.chosen is not None and case.chosen.breaks else "best"


def _axes(case: Case, label: str):
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise HdetError(f"matplotlib is missing. Install it: {install_command('research')}") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=case.title, xlabel="step", ylabel=label)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure, axes, path: Path) -> Path:
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return path
