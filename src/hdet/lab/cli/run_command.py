"""Train, and say what came of it: what ``hdet run`` and ``hdet resume`` share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from hdet.lab.cli.processes import chosen_device, in_ranks, is_rank, is_writer, leave
from hdet.lab.cli.screen import Exit, Screen, number, usage_errors, write_report
from hdet.lab.page import Run, headline, read_run
from hdet.lab.page.run_numbers import main_metrics
from hdet.lab.page.sentences import method_parts, search_sentence
from hdet.lab.pool import stop_on_signal
from hdet.lab.tasks.task import Task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder
from hdet.lab.train.runner import Result, task_facts
from hdet.lab.train.runner import run as run_training
from hdet.records import RecordSink, Tee
from hdet.search.decisions import LEAST_STEPS
from hdet.search.found import FoundLR
from hdet.trackers import TensorBoardSink, WandbSink


def screen_of_rank(is_json: bool, is_quiet: bool) -> Screen:
    """Make the screen of this process, silent on all ranks but zero. Sets the threads of torch too."""
    if not is_writer():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  # one rank speaks
        is_json, is_quiet = False, True
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return Screen(is_json=is_json, is_quiet=is_quiet)


@dataclass
class RunCommand:
    """Trains the run of a folder, writes its report, and exits with the code that its end asks for."""

    config: RunConfig
    path: Path
    """The folder of the run; that of rank zero counts."""
    screen: Screen
    device: str
    """``auto``, or what torch calls it."""
    trackers: Sequence[Enum]
    """Names of trackers that take the records too."""
    new_task: Task | None = None
    """The task of a new run, whose folder is made once training can begin."""
    overwrites: bool = False
    """A new run takes the place of one that is in the folder."""
    is_resumed: bool = False
    """The run goes on from its last checkpoint."""

    def __post_init__(self) -> None:
        engine, count = "virtual", self.config.replicas
        if is_rank():
            engine, count = "torchrun", int(os.environ["WORLD_SIZE"])
        self.config = dataclasses.replace(self.config, engine=engine, replicas=count)
        self._is_main = is_writer()
        self._is_searching = self.config.find and not self.is_resumed
        self._was_search_ended = False

    def train_and_report(self) -> None:
        """Train, write the report, and leave."""
        with usage_errors(), in_ranks(self.path) as path:
            folder, screen = RunFolder(path), self.screen
            if self._is_main and not self.is_resumed:
                self._announce()
            try:
                result = self._train(folder)
            except BaseException:
                # Ranks that another one leaves raise what they like.
                if not self._was_search_ended:
                    raise
                screen.say("stopped while searching for the learning rate: nothing was trained")
                screen.give({"status": "stopped", "steps": 0})
                leave(Exit.STOPPED)
        if self._is_main:
            _conclude(result, folder, screen)
        leave(Exit.of(result.status))

    def _announce(self) -> None:
        config, screen = self.config, self.screen
        screen.say(
            f"{config.task}: {config.replicas} replicas, {config.steps} steps, "
            f"learning rate {config.lr:g}, controllers: {', '.join(config.controllers) or 'none'}"
        )
        if self._is_searching and not screen.shows_progress:
            screen.say("searching for the learning rate ...")
        elif not self._is_searching and config.steps < LEAST_STEPS:
            screen.say(f"no search for the learning rate, because it needs {LEAST_STEPS} steps")

    def _train(self, folder: RunFolder) -> Result:
        screen = self.screen
        label = "searching for the learning rate" if self._is_searching else "training"
        with (
            contextlib.closing(Tee(*(self._sinks(folder) if self._is_main else []))) as sinks,
            stop_on_signal(insist=not is_rank(), ends_at_once=self._ends_at_once) as should_stop,
            screen.progress(self.config.steps, label) as bar,
        ):

            def begin() -> None:
                self._is_searching = False
                bar.begin("training")
                if self._is_main:
                    self._create(folder.path)

            return run_training(
                self.config,
                folder,
                resume=self.is_resumed,
                sinks=[sinks],
                on_found=lambda found: screen.say(_told(found)),
                on_note=screen.say,
                on_progress=bar.update,
                should_stop=should_stop,
                task=self.new_task,
                device=chosen_device(self.device),
                on_ready=begin,
            )

    def _ends_at_once(self) -> bool:
        """Take note of a signal, and tell whether there is nothing to save."""
        self._was_search_ended = self._was_search_ended or self._is_searching
        return self._is_searching

    def _create(self, path: Path) -> None:
        if self.new_task is not None:
            if self.overwrites:
                RunFolder(path).remove_run()
            RunFolder.create(path, self.config, task_facts(self.new_task))

    def _sinks(self, folder: RunFolder) -> list[RecordSink]:
        named = {"name": self.config.name or folder.path.name, "config": self.config.to_json()}
        build: dict[str, Callable[[], RecordSink]] = {
            "tensorboard": lambda: TensorBoardSink(folder.path / "tensorboard"),
            "wandb": lambda: WandbSink(folder=folder.path, **named),
        }
        return [build[tracker.value]() for tracker in self.trackers]


def _conclude(result: Result, folder: RunFolder, screen: Screen) -> None:
    report = write_report([folder.path], folder.report, screen)
    rows = {"held-out loss": number(result.final_loss), "status": result.status}
    rows |= {name.replace("_", " "): number(value) for name, value in main_metrics(result.metrics).items()}
    found, asked = number(result.found_lr, 3), number(result.base_lr, 3)
    rows["learning rate"] = found if found == asked else f"{found} (guess: {asked})"
    rows["steps"] = f"{result.steps} in {result.seconds:.1f} s"
    screen.show((), [*rows.items(), *method_parts(read_run(folder.path))])
    if report is not None:
        screen.say(f"report: {report}")
    if result.status in ("failed", "diverged"):
        print(f"hdet: training {result.status}: {result.reason}", file=sys.stderr)
    if result.status == "stopped":
        trust = " --trust" if ":" in folder.read_config().task else ""
        screen.say(f"saved at step {result.steps}; go on with: {folder.resume_command}{trust}")
    screen.give(result.to_json())


def _told(found: FoundLR) -> str:
    """Tell what a search has found, in the words of the report."""
    run = Run(path=Path(), name="", search=found.to_record(1).search)
    return f"{headline(run)} {search_sentence(run)}"
