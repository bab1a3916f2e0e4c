"""``hdet ablate``: the rows of the paper's Table 1 on one page with its figures 1 to 3."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdet.lab.cli.options import FOLDER, Jobs, Json, Quiet, Seeds, TaskName, TaskOptions
from hdet.lab.cli.screen import Exit, Screen, usage_errors
from hdet.lab.pool import stop_on_signal

if TYPE_CHECKING:
    from hdet.lab.ablation import Result


def ablate(
    task: TaskName = "feed",
    lr: Annotated[
        float | None,
        typer.Option(help="The high LR; the low one is a ninth (default: the task's)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of every run (default: the task's).")] = None,
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")] = 8,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    seeds: Seeds = 1,
    option: TaskOptions = None,
    jobs: Jobs = 0,
    out: Annotated[Path | None, typer.Option(**FOLDER, help="Folder (default: runs/ablate-TASK).")] = None,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the method of the paper and its parts: the six rows of its Table 1, and two that it leaves out.

    Spread, controller and warm start are each left out once. All rows train with the same steps and batches.
    A page shows Table 1 and the paper's figures: two rounds, the training losses, the learning rates.
    """
    from hdet.checks import require_count
    from hdet.errors import HdetError
    from hdet.lab.ablation import TABLE_1, metric_names
    from hdet.lab.ablation import ablate as run_rows
    from hdet.lab.ablation_page import build_ablation, headline, remarks
    from hdet.lab.tasks.task import load_task, parse_options
    from hdet.lab.train.config import RunConfig

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        options = parse_options(option or [])
        built = load_task(task, options)
        length = built.num_steps if steps is None else steps
        require_count("steps", length, at_least=50, remedy="the controller needs rounds to act in")
        if task == "feed":
            options.setdefault("steps_per_year", length)  # each run sees the whole year
        base = {"task": task, "task_options": options, "lr": built.learning_rate if lr is None else lr}
        base |= {"steps": length, "replicas": replicas, "optimizer": optimizer}
        RunConfig(**base)  # checks them
        require_count("seeds", seeds)
        path = out or Path("runs") / f"ablate-{Path(task.rpartition(':')[2]).stem.lower()}"
        total = seeds * len(TABLE_1)
        with stop_on_signal() as should_stop, screen.progress(total, "ablate", shows_loss=False) as bar:
            results = run_rows(base, seeds=seeds, num_jobs=jobs, on_done=bar.update, should_stop=should_stop)
    path.mkdir(parents=True, exist_ok=True)
    data = {"settings": base, "rows": [_data(result) for result in results]}
    (path / "ablation.json").write_text(json.dumps(data), encoding="utf-8")
    names = metric_names(results)
    rows = [
        (r.row.name, f"{r.lr:.3g}", r.loss_text, *map(r.metric_text, names), r.row.paper or "-")
        for r in results
    ]
    screen.show(("row", "LR", "held-out loss", *map(str.upper, names), "in the paper"), rows)
    for remark in filter(None, [*headline(results), *remarks(results, task)]):
        screen.say(remark)
    try:
        screen.say(f"report: {build_ablation(results, base, path / 'ablation.html')}")
    except HdetError as error:  # the table does not need it
        screen.say(f"no report: {error}")
    screen.give(data | {"run_dir": str(path)})
    if sum(len(result.runs) for result in results) < total:
        screen.say("stopped; what is shown is of the runs that were done")
        raise typer.Exit(Exit.STOPPED)


def _data(result: Result) -> dict[str, Any]:
    return {
        "row": result.row.name,
        "lr": result.lr,
        "losses": [run.final_loss if math.isfinite(run.final_loss) else None for run in result.runs],
        "crashes": [run.stability.crash for run in result.runs],
        "metrics": [run.metrics for run in result.runs],
        "seconds": [run.seconds for run in result.runs],
    }
