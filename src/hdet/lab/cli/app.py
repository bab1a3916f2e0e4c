"""The ``hdet`` command and its subcommands.

A command imports torch, and what needs it, in its function, so that ``--help`` does not wait for torch.
"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

import hdet
from hdet.errors import bad_argument
from hdet.lab.cli.ablate_command import ablate
from hdet.lab.cli.options import FOLDER, Device, Jobs, Json, Quiet, Ranks, TaskOptions, Track, takes
from hdet.lab.cli.plan_command import plan
from hdet.lab.cli.screen import Exit, Screen, number, numbers, usage_errors, write_report
from hdet.lab.pool import stop_on_signal
from hdet.lab.train.config import RunConfig

_PANELS = {
    "": ("task", "seed", "evaluate_every"),
    "The method: fan-out, converge, steer": (
        *("replicas", "spread", "sync_every", "explore", "probe", "controllers", "controller_start"),
        *("temperature", "floor", "noise_scale", "noise_norm", "assignment", "per_group", "gradients"),
    ),
    "The search: a wide fan-out before the run": ("lr", "find"),
    "The schedule and the optimizer": (
        *("steps", "warmup", "anneal", "anneal_to", "average_tail"),
        *("optimizer", "weight_decay", "momentum"),
    ),
}
"""Options of ``hdet run``, by heading of its help."""


@takes(RunConfig, _PANELS, task="feed", lr=None, steps=None, spread=1 / 9, floor=0.22, controllers=None)
def run(
    context: typer.Context,
    paper: Annotated[
        bool, typer.Option("--paper", help="The paper's own settings, but for what else is given here.")
    ] = False,
    task_options: TaskOptions = None,
    out: Annotated[
        Path | None, typer.Option(**FOLDER, help="Folder of the run (default: a new one in runs/).")
    ] = None,
    name: Annotated[str, typer.Option(help="Name in the report (default: the folder's name).")] = "",
    ranks: Ranks = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Find the learning rate, train replicas that differ and converge, and write a report.

    A wide fan-out of short trials finds the learning rate. Then each replica trains with a learning rate of
    its own (fan-out), every T steps they are compared and averaged (converge), and what averaging gains moves
    the shared value (steer). The run ends with the mean of the weights of its last steps. Ctrl-C saves it,
    and `hdet resume` goes on.
    """
    from hdet.lab.cli.processes import start_ranks
    from hdet.lab.cli.run_command import RunCommand, screen_of_rank
    from hdet.lab.tasks.task import load_task, parse_options
    from hdet.lab.train.folder import RunFolder

    start_ranks(ranks)
    screen = screen_of_rank(is_json, quiet)
    with usage_errors({*settings, "out", "device"}):
        options = parse_options(task_options or [])
        task = load_task(settings["task"], options)
        defaults = {"lr": task.learning_rate, "steps": task.num_steps}
        settings |= {key: value for key, value in defaults.items() if settings[key] is None}
        if paper:
            of_paper = RunConfig.of_paper(settings["steps"])
            of_paper["controllers"] = ",".join(of_paper["controllers"])
            for key, value in of_paper.items():
                if str(context.get_parameter_source(key)).endswith("DEFAULT"):
                    settings[key] = value
            screen.say(
                f"as in the paper: a sync every {settings['sync_every']} steps, and the controller from step "
                f"{settings['controller_start']} on; 1000 and 100,000 where a run has 300,000 steps"
            )
        settings["explore"] = parse_options(settings["explore"] or [], "--explore")
        names = settings.pop("controllers")
        if names is not None:
            settings["controllers"] = tuple(part.strip() for part in names.split(","))
        config = RunConfig(**settings, task_options=options, name=name)
        if names is None:
            config = config.with_usual_controllers(task.num_examples, task.batch_size)
        path = out or _free_path(Path("runs") / config.slug)
        if not overwrite:
            RunFolder(path).require_free()
    RunCommand(config, path, screen, device, track or [], task, overwrite).train_and_report()


def _free_path(path: Path) -> Path:
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(p for p in candidates if not p.exists())


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    ranks: Ranks = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run Python code that the folder names.")] = False,
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its last checkpoint.

    It ends bit-exactly as it would have without the stop. A run without a checkpoint begins anew.
    """
    from hdet.lab.cli.processes import start_ranks
    from hdet.lab.cli.run_command import RunCommand, screen_of_rank
    from hdet.lab.train.folder import RunFolder

    start_ranks(ranks)
    screen = screen_of_rank(is_json, quiet)
    with usage_errors():
        config = RunFolder(folder).read_config()
        if ":" in config.task and not trust:
            must, got = "must be given for a task of your own", f"{config.task!r}, which the folder names"
            raise bad_argument("--trust", must, got, "resuming runs this Python code. Look at it first")
        is_begun = RunFolder(folder).has_checkpoint
        result = RunFolder(folder).read_result()
        if is_begun and result is not None and result["status"] in ("finished", "diverged"):
            screen.say(f"{folder} has {result['status']}: there is nothing to go on with")
            screen.give(result)
            raise typer.Exit(Exit.of(result["status"]))
    RunCommand(config, folder, screen, device, track or [], is_resumed=is_begun).train_and_report()


_OF_SWEEP = ("task", "steps", "replicas", "optimizer", "weight_decay", "anneal", "warmup", "seed")


@takes(RunConfig, {"": _OF_SWEEP}, task="feed", steps=None, warmup=0.1)
def sweep(
    lrs: Annotated[str, typer.Option(help="Learning rates, with commas, in place of a range.")] = "",
    low: Annotated[float | None, typer.Option(help="Lowest LR (default: a hundredth of the task's).")] = None,
    high: Annotated[
        float | None, typer.Option(help="Highest LR (default: a hundred times the task's).")
    ] = None,
    per_decade: Annotated[int, typer.Option(help="Points per factor of ten.")] = 2,
    option: TaskOptions = None,
    jobs: Jobs = 0,
    out: Annotated[
        Path | None, typer.Option(**FOLDER, help="Folder of the sweep (default: runs/sweep-TASK).")
    ] = None,
    is_json: Json = False,
    quiet: Quiet = False,
    **settings: Any,
) -> None:
    """Train plainly with every learning rate of a grid, and mark the best.

    Runs that are already in the folder are not repeated. So a sweep that was stopped goes on, and more points
    refine it.
    """
    from hdet.lab.sweep import log_grid
    from hdet.lab.sweep import sweep as run_sweep
    from hdet.lab.tasks.task import load_task, parse_options

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors({*settings, "low", "high", "per_decade", "lrs"}):
        options = parse_options(option or [])
        task = load_task(settings["task"], options)
        low = task.learning_rate / 100 if low is None else low
        high = task.learning_rate * 100 if high is None else high
        grid = sorted(numbers("--lrs", lrs)) if lrs else log_grid(low, high, per_decade)
        settings |= {"controllers": (), "find": False, "probe": False, "task_options": options}
        settings["steps"] = task.num_steps if settings["steps"] is None else settings["steps"]
        config = RunConfig(**settings, lr=task.learning_rate)  # each point has its own
        path = (
            out or Path("runs") / f"sweep-{config.slug.split('-lr')[0]}-{config.optimizer}-seed{config.seed}"
        )
        with stop_on_signal() as should_stop, screen.progress(len(grid), "sweep", shows_loss=False) as bar:
            done = run_sweep(config, grid, path, num_jobs=jobs, on_done=bar.update, should_stop=should_stop)
    rows = []
    for point in done.points:
        lr, loss = number(point["base_lr"]), number(point["final_loss"], 5)
        row = [lr, loss, point["status"], f"{point['seconds']:.1f}"]
        if point is done.best:
            row = [f"[bold]{cell}[/]" for cell in (lr, loss, f"{row[2]} ← best", row[3])]
        rows.append(row)
    screen.show(("learning rate", "held-out loss", "status", "seconds"), rows)
    if done.best is not None and done.best["base_lr"] in (grid[0], grid[-1]) and len(grid) > 1:
        screen.say("the best is at the edge of the grid: widen it with --low or --high")
    page = write_report([Path(p["run_dir"]) for p in done.points], path / "comparison.html", screen)
    if page is not None:
        screen.say(f"report: {page}")
    screen.give({"points": done.points, "best": done.best, "run_dir": str(path)})
    if not done.is_complete:
        screen.say("stopped; the same command goes on")
        raise typer.Exit(Exit.STOPPED)
    raise typer.Exit(Exit.OK if done.best is not None else Exit.FAILED)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of a sweep. Several runs are compared.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            **FOLDER, help="The page (default: report.html in the folder, comparison.html for several)."
        ),
    ] = None,
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the page of a run again, or a page that compares several."""
    from hdet.lab.page import build_report, read_run, runs_within

    screen = Screen(is_json=is_json, is_quiet=quiet)
    with usage_errors():
        place = folders[0] if len(folders) == 1 else Path()
        folders = [run for folder in folders for run in runs_within(folder)]
        page = out or place / ("report.html" if folders == [place] else "comparison.html")
        runs = [read_run(folder) for folder in folders]
        build_report(runs, page)
    for run in runs:
        for note in run.notes:
            screen.say(f"note: {run.name}: {note}")
    screen.say(f"report: {page}")
    screen.give({"report": str(page), "notes": {run.name: run.notes for run in runs}})


app = typer.Typer(
    help="Hyperparameter-divergent ensemble training: replicas fan out, converge and steer.",
    epilog="Exit codes: 0 done. 1 training failed. 2 an argument or a file is not right. "
    "3 training diverged. 130 stopped.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (run, resume, sweep, ablate, report, plan):
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(lines.split()) for lines in paragraphs))(command)


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(hdet.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
