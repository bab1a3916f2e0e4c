"""``hdet run``."""

from __future__ import annotations

import dataclasses
import itertools
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hdet.checks import require_number
from hdet.lab.cli.options import Device, Json, Live, Quiet, TaskName, TaskOptions, Track
from hdet.lab.cli.output import usage_errors
from hdet.lab.train.config import RunConfig


class Engine(str, Enum):
    """Where replicas live."""

    virtual = "virtual"
    torchrun = "torchrun"


def run(
    task: TaskName = "feed",
    lr: Annotated[
        float | None, typer.Option(help="Your guess of the learning rate (default: the task's).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (default: the task's).")] = None,
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")] = 8,
    engine: Annotated[
        Engine, typer.Option(help="All replicas in this process, or one process each.")
    ] = Engine.virtual,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.9,
    anneal: Annotated[str, typer.Option(help="Fall after the warm-up: linear, cosine or none.")] = "linear",
    anneal_to: Annotated[
        float | None,
        typer.Option(help="Share of the peak at which the anneal ends (default: 0.15 with a tail, else 0)."),
    ] = None,
    average_tail: Annotated[
        float | None,
        typer.Option(
            help="Average the weights over this share of the steps, the last ones "
            "(default: 0.075 with the guard, else 0)."
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(help="Share of the steps in which the LR rises (default: 0.4 with guard, else 0.1)."),
    ] = None,
    spread: Annotated[
        float | None,
        typer.Option(
            help="How far the replicas' LRs reach to both sides of the plan (default: 1/9 with a controller "
            "that compares replicas, else 0)."
        ),
    ] = None,
    per_group: Annotated[bool, typer.Option(help="Give each parameter group a factor of its own.")] = False,
    explore: Annotated[
        list[str] | None,
        typer.Option(
            help="Explore another hyperparameter too: NAME=SPREAD, such as weight_decay=0.5. Repeatable."
        ),
    ] = None,
    gradients: Annotated[
        str, typer.Option(help="shared: replicas step with the mean. local: each with its own.")
    ] = "shared",
    sync_every: Annotated[
        int | None,
        typer.Option(help="Steps per round, T (default: 25, or by length with the guard)."),
    ] = None,
    find: Annotated[
        bool | None,
        typer.Option(
            help="Find the LR by short trials before the run (default: if the run has 50 steps or more)."
        ),
    ] = None,
    controller: Annotated[
        str,
        typer.Option(
            help="guard: if the run collapses, go back and lower the LR. log: move the LR by comparing "
            "replicas. paper: the same by eq. 7. none: follow the plan."
        ),
    ] = "guard",
    controller_start: Annotated[int, typer.Option(help="Step from which the controller acts.")] = 0,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of the paper's controller (default: how far losses differ)."),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Compare replicas on one held-out batch, not on their training losses.")
    ] = True,
    noise_scale: Annotated[float, typer.Option(help="Noise on each replica's first weights.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and assignments.")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between evaluations. 0 gives about 20 evaluations.")
    ] = 0,
    option: TaskOptions = None,
    log: Annotated[Path | None, typer.Option(help="A CSV file of real events for the feed task.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: a new one in runs/).")] = None,
    name: Annotated[str, typer.Option(help="Name in the report (default: the folder's name).")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")] = False,
    live: Live = False,
    track: Track = None,
    device: Device = "auto",
    is_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the learning rate, train once, and write a report.

    Short trials find the learning rate. The run then has a warm-up and an anneal, and ends with the mean of
    the weights of its last steps. With --spread above 0, replicas train with different learning rates and
    average their parameters every T steps. Ctrl-C saves the run, and `hdet resume` goes on with it.
    """
    from hdet.lab.cli.launch import is_rank
    from hdet.lab.cli.training import screen_of_rank, train_and_report
    from hdet.lab.tasks.task import load_task, parse_options
    from hdet.lab.train.folder import RunFolder
    from hdet.lab.train.runner import task_facts

    screen = screen_of_rank(is_json, quiet)
    with usage_errors():
        options = parse_options(option or [])
        if log is not None:
            options["log"] = str(log)
        built = load_task(task, options)
        count = int(os.environ["WORLD_SIZE"]) if is_rank() else replicas
        num_steps = built.num_steps if steps is None else steps
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
            anneal_to=anneal_to,  # pyright: ignore[reportArgumentType]  # None: RunConfig chooses
            average_tail=average_tail,  # pyright: ignore[reportArgumentType]
            warmup=warmup,  # pyright: ignore[reportArgumentType]
            spread=spread,  # pyright: ignore[reportArgumentType]
            per_group=per_group,
            explore={
                name: require_number(f"--explore {name}", spread, at_least=0)
                for name, spread in parse_options(explore or [], "--explore").items()
            },
            gradients=gradients,  # pyright: ignore[reportArgumentType]
            sync_every=sync_every,  # pyright: ignore[reportArgumentType]
            find=find,  # pyright: ignore[reportArgumentType]
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
    train_and_report(
        config,
        path,
        screen,
        resume=False,
        trackers=track or [],
        device=device,
        is_live=live,
        task=built,
        create=create,
    )


def _free_path(path: Path) -> Path:
    candidates = itertools.chain([path], (path.with_name(f"{path.name}-{i}") for i in itertools.count(2)))
    return next(p for p in candidates if not p.exists())
