"""``hdet sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hdet.lab.cli.options import Jobs, Json, Quiet, TaskName, TaskOptions
from hdet.lab.cli.output import Exit, Screen, number, numbers, usage_errors
from hdet.lab.cli.report import write_report
from hdet.lab.train.config import RunConfig
from hdet.lab.train.signals import stop_on_signal


def sweep(
    task: TaskName = "feed",
    lrs: Annotated[str, typer.Option(help="Learning rates, with commas, in place of a range.")] = "",
    low: Annotated[float | None, typer.Option(help="Lowest LR (default: a hundredth of the task's).")] = None,
    high: Annotated[
        float | None, typer.Option(help="Highest LR (default: a hundred times the task's).")
    ] = None,
    per_decade: Annotated[int, typer.Option(help="Points per factor of ten.")] = 2,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default: the task's).")] = None,
    replicas: Annotated[int, typer.Option(help="Batches per step, as N replicas would take.")] = 8,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    anneal: Annotated[str, typer.Option(help="Fall after the warm-up: linear, cosine or none.")] = "linear",
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the LR rises.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    option: TaskOptions = None,
    jobs: Jobs = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep (default: runs/sweep-TASK).")] = None,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train with every learning rate of a grid, and mark the best.

    Runs that are already in the folder are not repeated. So a sweep that was stopped goes on, and more points
    refine it.
    """
    from hdet.lab.tasks.task import load_task, parse_options
    from hdet.lab.train.sweep import log_grid
    from hdet.lab.train.sweep import sweep as run_sweep

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        options = parse_options(option or [])
        built = load_task(task, options)
        middle = built.learning_rate
        if lrs:
            grid = sorted(numbers("--lrs", lrs))
        else:
            grid = log_grid(
                middle / 100 if low is None else low, middle * 100 if high is None else high, per_decade
            )
        config = RunConfig(
            task=task,
            task_options=options,
            lr=grid[0],
            steps=built.num_steps if steps is None else steps,
            replicas=replicas,
            optimizer=optimizer,  # pyright: ignore[reportArgumentType]  # RunConfig checks what is typed
            weight_decay=weight_decay,
            anneal=anneal,  # pyright: ignore[reportArgumentType]
            warmup=warmup,
            controller="none",
            find=False,
            probe=False,
            seed=seed,
        )
        path = out or Path("runs") / f"sweep-{config.slug.split('-lr')[0]}-{optimizer}-seed{seed}"
        with stop_on_signal() as should_stop, screen.progress(len(grid), "sweep", shows_loss=False) as bar:
            outcome = run_sweep(
                config, grid, path, num_jobs=jobs, on_done=bar.update, should_stop=should_stop
            )
    table = Table("learning rate", "held-out loss", "status", "seconds", box=None, pad_edge=False)
    for point in outcome.points:
        is_best = outcome.best is not None and point["base_lr"] == outcome.best["base_lr"]
        table.add_row(
            number(point["base_lr"]),
            number(point["final_loss"], 5),
            point["status"] + (" ← best" if is_best else ""),
            f"{point['seconds']:.1f}",
            style="bold" if is_best else None,
        )
    screen.show(table)
    if outcome.best is not None and outcome.best["base_lr"] in (grid[0], grid[-1]) and len(grid) > 1:
        screen.say("the best is at the edge of the grid: widen it with --low or --high")
    page = write_report([Path(p["run_dir"]) for p in outcome.points], path / "comparison.html", screen)
    if page is not None:
        screen.say(f"report: {page}")
    screen.give({"points": outcome.points, "best": outcome.best, "run_dir": str(path)})
    if not outcome.is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)
    raise typer.Exit(Exit.OK if outcome.best is not None else Exit.FAILED)
