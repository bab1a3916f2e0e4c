"""Train, and say what came of it: what ``hdet run`` and ``hdet resume`` share."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from hdet.lab.cli.launch import chosen_device, hears_signals, in_ranks, is_launched, is_rank, launch
from hdet.lab.cli.options import Tracker
from hdet.lab.cli.output import Exit, Screen, number, usage_errors
from hdet.lab.cli.report import write_report
from hdet.lab.page import LivePage, Run, headline
from hdet.lab.page.run_numbers import main_metrics
from hdet.lab.page.sentences import search_sentence
from hdet.lab.tasks.task import Task, load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import Result, resume_hint
from hdet.lab.train.runner import run as run_training
from hdet.lab.train.signals import stop_on_signal
from hdet.records import RecordSink, Tee
from hdet.search.decisions import LEAST_STEPS
from hdet.search.found import FoundLR
from hdet.trackers.mlflow import MLflowSink
from hdet.trackers.tensorboard import TensorBoardSink
from hdet.trackers.wandb import WandbSink


def screen_of_rank(is_json: bool, is_quiet: bool) -> Screen:
    """The screen of this process, which is silent on all ranks but zero. Sets the threads of torch too."""
    if is_rank() and os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  # one rank speaks
        is_json, is_quiet = False, True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return Screen(is_json=is_json, is_quiet=is_quiet)


def train_and_report(
    config: RunConfig,
    path: Path,
    screen: Screen,
    *,
    resume: bool,
    trackers: list[Tracker],
    device: str,
    is_live: bool = False,
    task: Task | None = None,
    create: Callable[[], None] | None = None,
) -> None:
    """Train the run of a folder, write its report, and exit with the code that its end asks for.

    Args:
        config: settings of the run.
        path: its folder.
        screen: where progress and outcome are shown.
        resume: go on from the last checkpoint.
        trackers: where records go as well.
        device: ``auto``, or what torch calls it.
        is_live: write the page while the run trains too.
        task: the task of ``config``, if it is built already.
        create: makes the folder of a new run; rank zero calls it once training can begin.
    """
    if config.engine == "torchrun" and not is_rank():
        more = ["--device", device, *(f"--track={tracker.value}" for tracker in trackers)]
        more += ["--live"] * is_live
        raise typer.Exit(_launch(config, path, screen, more, is_new=create is not None))
    search = _Search(is_on=config.find and not resume)
    with usage_errors(), in_ranks(path) as shared:
        assert shared is not None
        folder = RunFolder(shared)
        is_main = not is_rank() or os.environ["RANK"] == "0"
        task = task or load_task(config.task, config.task_options)
        if is_main and not resume:
            screen.say(
                f"{config.task}: {config.replicas} replicas, {config.steps} steps, "
                f"learning rate {config.lr:g}, controller {config.controller}"
            )
            if search.is_on and not screen.shows_progress:
                screen.say("searching for the learning rate ...")
            elif not search.is_on and config.steps < LEAST_STEPS:
                screen.say(f"no search for the learning rate, because it needs {LEAST_STEPS} steps")
        files = _files(folder.path)
        label = "searching for the learning rate" if search.is_on else "training"
        try:
            with (
                contextlib.closing(
                    Tee(*(_sinks(trackers, folder, config, is_live=is_live) if is_main else []))
                ) as sinks,
                stop_on_signal(insist=not is_rank(), ends_at_once=search.ends) as should_stop,
                screen.progress(config.steps, label) as bar,
            ):
                hears_signals()

                def begin() -> None:
                    search.is_on = False
                    bar.begin("training")
                    if is_main and create is not None:
                        create()
                    if is_main and is_live:
                        screen.say(f"watch: {folder.report}")

                result = run_training(
                    config,
                    folder,
                    resume=resume,
                    sinks=[sinks],
                    on_found=lambda found: screen.say(_told(found)),
                    on_note=screen.say,
                    on_progress=lambda p: bar.update(p.step, p.loss, p.base_lr),
                    should_stop=should_stop,
                    task=task,
                    device=chosen_device(device),
                    on_ready=begin,
                )
        except BaseException:
            # Ranks that another one leaves raise what they like.
            if not search.has_ended:
                raise
            if is_main:  # a tracker may have begun
                for file in _files(folder.path) - files:
                    shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)
            screen.say("stopped while searching for the learning rate: nothing was trained")
            screen.give({"status": "stopped", "steps": 0})
            raise typer.Exit(Exit.OK if is_launched() else Exit.STOPPED) from None
    if is_main:
        _conclude(result, folder, screen)
    raise typer.Exit(Exit.OK if is_launched() else Exit.of(result.status))


def _files(folder: Path) -> set[Path]:
    """The folder and what is in it."""
    return {folder, *folder.iterdir()} if folder.is_dir() else set()


class _Search:
    """Whether the search before the run is under way, and whether a signal has ended it."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on, self.has_ended = is_on, False

    def ends(self) -> bool:
        """A signal has come."""
        self.has_ended = self.has_ended or self.is_on
        return self.is_on


def _launch(config: RunConfig, path: Path, screen: Screen, options: list[str], *, is_new: bool) -> int:
    """One process per replica, each of which goes on with (or begins) the run in the folder."""
    arguments = ["resume", str(path), *options]
    arguments += ["--json"] * screen.is_json + ["--quiet"] * screen.console.quiet
    code, is_stopped = launch(arguments, config.replicas)
    folder = RunFolder(path)
    result = folder.read_result()
    if is_stopped and is_new and result is None and not folder.has_checkpoint:  # nothing was trained
        folder.remove_run()
        with contextlib.suppress(OSError):  # there is something else in it
            path.rmdir()
    if is_stopped and (code or result is None):
        return Exit.STOPPED
    return code or (Exit.FAILED if result is None else Exit.of(result["status"]))


def _conclude(result: Result, folder: RunFolder, screen: Screen) -> None:
    report = write_report([folder.path], folder.report, screen)
    table = Table(title=None, show_header=False, box=None, pad_edge=False)
    table.add_row("status", result.status)
    table.add_row("held-out loss", number(result.final_loss))
    for name, value in main_metrics(result.metrics).items():
        table.add_row(name.replace("_", " "), number(value))
    found, asked = number(result.found_lr, 3), number(result.base_lr, 3)
    table.add_row("learning rate", found if found == asked else f"{found} (you asked for {asked})")
    table.add_row("steps", f"{result.steps} in {result.seconds:.1f} s")
    screen.show(table)
    if report is not None:
        screen.say(f"report: {report}")
    if result.status in ("failed", "diverged"):
        print(f"hdet: training {result.status}: {result.reason}", file=sys.stderr)
    if result.status == "stopped":
        screen.say(f"saved at step {result.steps}; go on with: {resume_hint(folder)}")
    screen.give(result.to_json())


def _told(found: FoundLR) -> str:
    """What a search has found, in the words of the report."""
    run = Run(path=Path(), name="", search=found.to_record(1).search)
    return f"{headline(run)} {search_sentence(run)}"


def _sinks(
    trackers: list[Tracker], folder: RunFolder, config: RunConfig, *, is_live: bool
) -> list[RecordSink]:
    name, settings = config.name or folder.path.name, config.to_json()
    build: dict[Tracker, Any] = {
        Tracker.tensorboard: lambda: TensorBoardSink(folder.path / "tensorboard"),
        Tracker.wandb: lambda: WandbSink(project="hdet", name=name, config=settings, folder=folder.path),
        Tracker.mlflow: lambda: MLflowSink(name=name, config=settings, folder=folder.path),
    }
    sinks: list[RecordSink] = [build[tracker]() for tracker in trackers]
    if is_live:
        sinks.append(LivePage(folder.path, folder.report))
    return sinks
