"""``hdet run`` and ``hdet resume``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from hdet.cli.launch import chosen_device, in_ranks, is_rank, launch
from hdet.cli.options import Json, Quiet, TaskName, TaskOptions
from hdet.cli.output import Exit, Screen, number, usage_errors
from hdet.cli.report import write_report
from hdet.core.checks import require_number
from hdet.core.scout import Scout, least_steps
from hdet.run.config import ANNEAL_TO, AVERAGE_TAIL, RunConfig
from hdet.run.folder import RunFolder
from hdet.run.runner import Result, resume_hint, task_facts
from hdet.run.runner import run as run_training
from hdet.run.signals import stop_on_signal
from hdet.tasks.task import Task, load_task, parse_options
from hdet.telemetry import RecordSink
from hdet.telemetry.trackers import MLflowSink, Tee, TensorBoardSink, WandbSink

__all__ = ["resume", "run"]


class Engine(str, Enum):
    """Where replicas live."""

    virtual = "virtual"
    torchrun = "torchrun"


class Tracker(str, Enum):
    """Where records go as well."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")]
Track = Annotated[list[Tracker] | None, typer.Option(help="Write records there too; may be repeated.")]


def run(
    task: TaskName = "feed",
    lr: Annotated[float | None, typer.Option(help="Peak learning rate (default: the task's).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default: the task's).")] = None,
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")] = 8,
    engine: Annotated[
        Engine, typer.Option(help="All replicas in this process, or one process each.")
    ] = Engine.virtual,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.9,
    anneal: Annotated[str, typer.Option(help="After warmup: linear, cosine or none.")] = "linear",
    anneal_to: Annotated[
        float | None,
        typer.Option(help="Share of the peak at which the anneal ends (default: 0.15 with a tail, else 0)."),
    ] = None,
    average_tail: Annotated[
        float | None,
        typer.Option(
            help="Share of the steps, the last ones, whose weights are averaged into the final ones "
            "(default: 0.075 with the anchored controller, else 0)."
        ),
    ] = None,
    warmup: Annotated[float, typer.Option(help="Share of the steps in which the LR rises.")] = 0.1,
    spread: Annotated[
        float | None,
        typer.Option(
            help="Half-width of the replicas' LRs around the plan (default: 1/9 where a controller compares "
            "replicas, else 0)."
        ),
    ] = None,
    per_group: Annotated[
        bool | None,
        typer.Option(
            help="A factor and a correction for each parameter group (default: with the anchored controller, "
            "if nothing but the LR is explored)."
        ),
    ] = None,
    explore: Annotated[
        list[str] | None,
        typer.Option(
            help="Explore another hyperparameter, NAME=SPREAD such as weight_decay=0.5; repeatable."
        ),
    ] = None,
    gradients: Annotated[
        str, typer.Option(help="shared, the mean over replicas, or local, each its own.")
    ] = "shared",
    sync_every: Annotated[int, typer.Option(help="Steps per round, T.")] = 25,
    scout: Annotated[
        bool | None,
        typer.Option(
            help="Find the LR by short trials in the first steps, then start over (default: if the run is "
            "long enough)."
        ),
    ] = None,
    scout_fraction: Annotated[float, typer.Option(help="Share of the steps that the scout takes.")] = 0.03,
    controller: Annotated[
        str,
        typer.Option(
            help="anchored: moves the LR by the gradients' own signal; log: by comparing replicas; paper: "
            "eq. 7; none: follow the plan."
        ),
    ] = "anchored",
    controller_start: Annotated[int, typer.Option(help="Step from which the controller acts.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="Of the paper's controller (default: the spread of the replicas' losses)."),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Compare replicas on one held-out batch, not on their training losses.")
    ] = True,
    noise_scale: Annotated[float, typer.Option(help="Perturb each replica's start (warm start).")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of weights, batches and assignments.")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between evaluations; 0: about 20; all steps: at the end only.")
    ] = 0,
    option: TaskOptions = None,
    log: Annotated[Path | None, typer.Option(help="A CSV file of real events for the feed task.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one in runs/).")] = None,
    name: Annotated[str, typer.Option(help="What the report calls it (default: the folder's name).")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train once and write a report.

    First the scout: every replica tries another learning rate for a few steps, and training starts over with
    what they found. Then the controller moves the plan, and the weights of the last steps are averaged. With
    --spread above 0, replicas train with different learning rates, and average their parameters every T
    steps. Ctrl-C saves; `hdet resume` goes on.
    """
    screen = _screen(is_json, quiet)
    with usage_errors():
        options = parse_options(option or [])
        if log is not None:
            options["log"] = str(log)
        built = load_task(task, options)
        count = int(os.environ["WORLD_SIZE"]) if is_rank() else replicas
        num_steps = built.num_steps if steps is None else steps
        if average_tail is None:
            average_tail = AVERAGE_TAIL if controller == "anchored" else 0.0
        config = RunConfig(
            task=task,
            task_options=options,
            lr=built.learning_rate if lr is None else lr,
            steps=num_steps,
            replicas=count,
            engine="torchrun" if is_rank() else engine.value,
            optimizer=optimizer,  # pyright: ignore[reportArgumentType]  # RunConfig checks what is typed
            weight_decay=weight_decay,
            momentum=momentum,
            anneal=anneal,  # pyright: ignore[reportArgumentType]
            anneal_to=(ANNEAL_TO if average_tail else 0.0) if anneal_to is None else anneal_to,
            average_tail=average_tail,
            warmup=warmup,
            spread=(1 / 9 if controller in ("log", "paper") else 0.0) if spread is None else spread,
            per_group=controller == "anchored" and not explore if per_group is None else per_group,
            explore={
                name: require_number(f"--explore {name}", spread, at_least=0)
                for name, spread in parse_options(explore or [], "--explore").items()
            },
            gradients=gradients,  # pyright: ignore[reportArgumentType]
            sync_every=sync_every,
            scout=num_steps >= least_steps(Scout(), max(1, count)) if scout is None else scout,
            scout_fraction=scout_fraction,
            controller=controller,  # pyright: ignore[reportArgumentType]
            controller_start=controller_start,
            temperature=temperature,
            probe=probe,
            noise_scale=noise_scale,
            seed=seed,
            evaluate_every=evaluate_every,
            name=name,
        )
        if config.spread == 0 and not config.explore and config.controller in ("log", "paper"):
            config = dataclasses.replace(config, controller="none")  # there is nothing to compare
        path = out or _free_path(Path("runs") / config.slug)
        if not overwrite:
            RunFolder(path).require_free()

    def create() -> None:
        if overwrite:
            RunFolder(path).remove_run()
        RunFolder.create(path, config, task_facts(built))

    if config.engine == "torchrun" and not is_rank():
        with usage_errors():
            create()  # the ranks read it
    _train(config, path, screen, task=built, resume=False, create=create, trackers=track or [], device=device)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of a run that was stopped.")],
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its last checkpoint, to the bit; or begin it if there is none yet."""
    screen = _screen(is_json, quiet)
    with usage_errors():
        config = RunFolder(folder).read_config()
        if is_rank():
            config = dataclasses.replace(config, engine="torchrun", replicas=int(os.environ["WORLD_SIZE"]))
        is_begun = RunFolder(folder).checkpoint.exists()
        result = RunFolder(folder).read_result()
        if is_begun and result is not None and result["status"] == "finished":
            screen.say(f"{folder} is finished: there is nothing to go on with")
            screen.give(result)
            raise typer.Exit(Exit.OK)
    _train(
        config, folder, screen, task=None, resume=is_begun, create=None, trackers=track or [], device=device
    )


def _train(
    config: RunConfig,
    path: Path,
    screen: Screen,
    *,
    task: Task | None,
    resume: bool,
    create: Callable[[], None] | None,
    trackers: list[Tracker],
    device: str,
) -> None:
    if config.engine == "torchrun" and not is_rank():
        raise typer.Exit(_launch(config, path, screen, trackers, device))
    with usage_errors(), in_ranks(path) as shared:
        assert shared is not None
        folder = RunFolder(shared)
        is_main = not is_rank() or os.environ["RANK"] == "0"
        task = task or load_task(config.task, config.task_options)
        if is_main and not resume:
            finders = (["scout"] if config.scout else []) + [f"controller {config.controller}"]
            screen.say(
                f"{config.task}: {config.replicas} replicas, {config.steps} steps, peak lr {config.lr:g}, "
                + ", ".join(finders)
            )
        sinks = Tee(*(_sinks(trackers, folder, config) if is_main else []))
        with (
            contextlib.closing(sinks),
            stop_on_signal(insist=not is_rank()) as should_stop,
            screen.progress(config.steps, "training") as bar,
        ):
            result = run_training(
                config,
                folder,
                resume=resume,
                sinks=[sinks],
                on_progress=lambda p: bar.update(p.step, p.loss, p.base_lr),
                should_stop=should_stop,
                task=task,
                device=chosen_device(device),
                on_ready=create if is_main and create is not None else lambda: None,
            )
    if is_main:
        _conclude(result, folder, screen)
    raise typer.Exit({"finished": Exit.OK, "failed": Exit.FAILED, "stopped": Exit.STOPPED}[result.status])


def _launch(config: RunConfig, path: Path, screen: Screen, trackers: list[Tracker], device: str) -> int:
    """One process per replica, each of which goes on with (or begins) the run in the folder."""
    arguments = ["resume", str(path), "--device", device]
    arguments += [f"--track={tracker.value}" for tracker in trackers]
    arguments += ["--json"] * screen.is_json + ["--quiet"] * screen.console.quiet
    code = launch(arguments, config.replicas)
    try:
        status = json.loads(RunFolder(path).result.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        return code or Exit.FAILED
    return {"stopped": Exit.STOPPED, "failed": Exit.FAILED}.get(status, code)


def _conclude(result: Result, folder: RunFolder, screen: Screen) -> None:
    report = write_report([folder.path], folder.report, screen)
    table = Table(title=None, show_header=False, box=None, pad_edge=False)
    table.add_row("status", result.status + (f" ({result.reason})" if result.reason else ""))
    table.add_row("held-out loss", number(result.final_loss))
    for name, value in result.metrics.items():
        if name != "loss":
            table.add_row(name.replace("_", " "), number(value))
    table.add_row("learning rate", f"{number(result.base_lr)} asked, {number(result.found_lr)} found")
    table.add_row("steps", f"{result.steps} in {result.seconds:.1f} s")
    screen.show(table)
    if report is not None:
        screen.say(f"report: {report}")
    if result.status == "failed":
        print(f"hdet: training failed: {result.reason}", file=sys.stderr)
    if result.status == "stopped":
        screen.say(f"saved at step {result.steps}; go on with: {resume_hint(folder)}")
    screen.give(result.to_json())


def _sinks(trackers: list[Tracker], folder: RunFolder, config: RunConfig) -> list[RecordSink]:
    name, settings = config.name or folder.path.name, config.to_json()
    build: dict[Tracker, Any] = {
        Tracker.tensorboard: lambda: TensorBoardSink(folder.path / "tensorboard"),
        Tracker.wandb: lambda: WandbSink(project="hdet", name=name, config=settings, folder=folder.path),
        Tracker.mlflow: lambda: MLflowSink(name=name, config=settings, folder=folder.path),
    }
    return [build[tracker]() for tracker in trackers]


def _screen(is_json: bool, is_quiet: bool) -> Screen:
    if is_rank() and os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  # one rank speaks
        is_json, is_quiet = False, True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return Screen(is_json=is_json, is_quiet=is_quiet)


def _free_path(path: Path) -> Path:
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(p for p in candidates if not p.exists())
