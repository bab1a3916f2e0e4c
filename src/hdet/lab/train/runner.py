"""Run a task from the first step to the last, and leave a folder that tells what happened."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hdet.checkpoints import Checkpoint, save_checkpoint
from hdet.errors import AllReplicasFailedError, CheckpointError, HdetWarning, warn
from hdet.lab.tasks.task import Task, evaluation_mode, load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder, write_json
from hdet.lab.train.trainers import Trainer, to_device
from hdet.method.fan_out import derived_seed
from hdet.records import JsonlSink, RecordSink, Tee, read_records
from hdet.replicas.copies import generator_states, restore_generators
from hdet.round_record import is_learning_rate
from hdet.search.found import FoundLR

_LOOK_EVERY = 10
"""Steps between updates of the progress, and between looks at a stop that was asked for."""


_DIVERGED = 0.05
"""A run diverged if it ends above its first held-out loss by more than this share of it."""

Status = Literal["finished", "diverged", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Tells what a run came to."""

    status: Status
    final_loss: float | None
    """Held-out loss of the averaged model at the last step."""
    metrics: dict[str, float]
    found_lr: float
    """Peak learning rate as the run has corrected it."""
    base_lr: float
    """Peak learning rate that was asked for."""
    steps: int
    """Optimizer steps taken."""
    seconds: float
    run_dir: str
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Give plain values; numbers that are not finite become None."""
        return _plain(dataclasses.asdict(self))


def run(
    config: RunConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    sinks: Sequence[RecordSink] = (),
    on_progress: Callable[[int, float, float], None] = lambda step, loss, lr: None,
    on_found: Callable[[FoundLR], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda text: warn(text, HdetWarning),
    should_stop: Callable[[], bool] = lambda: False,
    task: Task | None = None,
    device: str = "cpu",
    on_ready: Callable[[], None] = lambda: None,
) -> Result:
    """Train, evaluate, save.

    With ``engine="torchrun"`` every rank calls it, with torch.distributed running; rank zero writes.

    Args:
        config: the settings.
        folder: where everything goes.
        resume: go on from the folder's checkpoint.
        sinks: take every record too.
        on_progress: called every few steps on every rank: step, mean training loss of the last steps, and
            learning rate.
        on_found: called on rank zero with what the search before the run has found.
        on_note: called on rank zero with what is worth saying about a checkpoint; it warns by default.
        should_stop: asked every few steps; a run that is stopped converges and saves.
        task: the task, if it is already there.
        device: of model and batches.
        on_ready: called once everything is built and before anything is written; the folder must be there
            when it returns.
    """
    with _own_randomness(config):
        task = task or load_task(config.task, config.task_options)
        checkpoint = _checkpoint(config, folder, on_note) if resume else None
        records = Tee(JsonlSink(folder.records), *sinks)
        trainer = Trainer(task, config, records, device, searches=config.find and not resume)
        on_ready()
        if trainer.found is not None and trainer.is_main:
            records.write(trainer.found.to_record(config.replicas))
            on_found(trainer.found)
        this = _Run(task, config, folder, trainer, records, device)
        if checkpoint is not None:
            checkpoint.load_into(trainer=trainer)
            this.seconds_before = checkpoint.values["seconds"]
            this.first_loss = checkpoint.values["first_loss"]
            if trainer.is_main:  # those of other ranks are not saved
                restore_generators(checkpoint.values["generators"])
        return this.train(on_progress, should_stop)


_VALUES = ("settings", "seconds", "generators", "first_loss")
"""Names of what a checkpoint holds beside the trainer."""


def _checkpoint(config: RunConfig, folder: RunFolder, on_note: Callable[[str], None]) -> Checkpoint:
    """Open the checkpoint to go on from; raises if it is of another run."""
    checkpoint = folder.open_checkpoint()
    if missing := sorted({"trainer", *_VALUES} - {*checkpoint.states, *checkpoint.values}):
        raise CheckpointError(
            f"{checkpoint.path} must be a checkpoint of 'hdet run', but it has no {', '.join(missing)}: give "
            "the folder of a run"
        )
    saved = checkpoint.values["settings"]
    if differing := config.differences(saved):
        raise ValueError(
            f"{folder.config} must have the settings that the run began with, but these differ: "
            f"{', '.join(differing)}. Put them back, or begin another run"
        )
    if int(os.environ.get("RANK", "0")) == 0:
        for reason in checkpoint.skipped:
            on_note(f"{reason}: going on from {checkpoint.path.name}")
        if saved["replicas"] != config.replicas:
            on_note(f"{saved['replicas']} replicas before, {config.replicas} now")
    return checkpoint


@contextmanager
def _own_randomness(config: RunConfig) -> Iterator[None]:
    """Let torch's generators follow from the seed, others on each rank, so dropout repeats."""
    before = generator_states()
    rank = int(os.environ.get("RANK", "0")) if config.engine == "torchrun" else 0
    torch.manual_seed(derived_seed(config.seed, "training", rank))
    try:
        yield
    finally:
        restore_generators(before)


@dataclass
class _Run:
    task: Task
    config: RunConfig
    folder: RunFolder
    trainer: Trainer
    records: Tee
    device: str
    seconds_before: float = 0.0
    first_loss: float = math.nan
    """Held-out loss before the first step."""

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._losses: list[torch.Tensor] = []
        self._train_loss = math.nan
        self._metrics: dict[str, float] = {}

    def train(
        self, on_progress: Callable[[int, float, float], None], should_stop: Callable[[], bool]
    ) -> Result:
        config, engine, trainer = self.config, self.trainer.engine, self.trainer
        try:
            if engine.num_steps == 0 and config.evaluation_interval < config.steps:
                self._evaluate()
            while engine.num_steps < config.steps:
                self._losses.append(trainer.step())
                step = engine.num_steps
                is_end = step >= config.steps
                if step % _LOOK_EVERY == 0 or is_end:
                    self._take_losses()
                    base = [float(value) for name, value in engine.base.items() if is_learning_rate(name)]
                    on_progress(step, self._train_loss, max(base))
                is_stop = not is_end and self._may_stop(step) and trainer.any_process(should_stop())
                if is_stop or is_end or step % config.evaluation_interval == 0:
                    self._evaluate()
                    self._save()
                if is_stop:
                    return self._finish("stopped", "asked to stop")
            if not self._metrics:  # resumed at the very end
                self._evaluate()
        except AllReplicasFailedError as error:
            return self._finish("failed", str(error))
        first, last = self.first_loss, self._metrics["loss"]
        if not math.isfinite(last):
            return self._finish("failed", "the held-out loss is not finite: lower --lr")
        if last - first > _DIVERGED * abs(first):
            reason = f"the held-out loss was {first:.4g} at first and is {last:.4g} now: lower --lr"
            return self._finish("diverged", reason)
        return self._finish("finished")

    def _may_stop(self, step: int) -> bool:
        """Tell whether a run can be saved here without changing it: averaging within a round would."""
        config = self.config
        differ = config.spread or config.explore or config.noise_scale or config.gradients == "local"
        every = config.sync_every if differ else _LOOK_EVERY
        return step % every == 0 and not any(
            one.is_changed_by_saves for one in self.trainer.engine.controllers
        )

    def _take_losses(self) -> None:
        if self._losses:
            self._train_loss = torch.stack([loss.mean() for loss in self._losses]).mean().item()
            self._losses = []

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self._start

    def _evaluate(self) -> None:
        self._take_losses()
        step = self.trainer.engine.num_steps
        if step:  # not before the first one: a warm start would be lost
            self.trainer.converge()
        with self.trainer.engine.base_values():
            self._metrics = evaluate(self.task, self.trainer.model, self.device)
        if step == 0:
            self.first_loss = self._metrics["loss"]
        if self.trainer.is_main:
            line = {"step": step, "train_loss": self._train_loss, "loss": self._metrics["loss"]}
            line |= {"metrics": self._metrics, "seconds": self._seconds()}
            with self.folder.evaluations.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(line)) + "\n")
            self.records.write_metrics(step, self._metrics)

    def _save(self) -> None:
        # Replicas have converged, so that one rank's state is everybody's.
        if self.trainer.is_main and math.isfinite(self._metrics["loss"]):
            save_checkpoint(
                self.folder.checkpoints,
                step=self.trainer.engine.num_steps,
                keep=2,
                trainer=self.trainer,
                settings=self.config.to_json(),
                seconds=self._seconds(),
                generators=generator_states(),
                first_loss=self.first_loss,
            )

    def _finish(self, status: Status, reason: str = "") -> Result:
        loss = math.nan if status == "failed" else self._metrics["loss"]
        result = Result(
            status=status,
            final_loss=loss if math.isfinite(loss) else None,
            metrics=_plain(self._metrics),
            found_lr=self._found_lr(),
            base_lr=self.config.lr,
            steps=self.trainer.engine.num_steps,
            seconds=self._seconds(),
            run_dir=str(self.folder.path),
            reason=reason,
        )
        if self.trainer.is_main:
            write_json(self.folder.result, result.to_json())
        return result

    def _found_lr(self) -> float:
        """Give the peaks as the run has corrected them; the largest base where a controller holds its own."""
        if "paper" in self.config.controllers:
            records = read_records(self.folder.records) if self.folder.records.exists() else []
            traces = [trace for record in records for trace in record.base_trace.items()]
            bases = [max(values) for name, values in traces if values and is_learning_rate(name)]
            return max(bases, default=self.config.lr)
        return statistics.geometric_mean(self.trainer.engine.found_lr.values())


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, device: str = "cpu") -> dict[str, float]:
    """Compute the task's metrics on its evaluation batches, in evaluation mode."""
    with evaluation_mode(model):
        metrics = task.metrics(model, [to_device(device, batch) for batch in task.evaluation_batches()])
    if "loss" not in metrics:
        raise ValueError(
            f"metrics of task {type(task).__name__} must hold 'loss', got {sorted(metrics)}: add it"
        )
    return {name: float(value) for name, value in metrics.items()}


def task_facts(task: Task) -> dict[str, Any]:
    """Tell about the task what config.json has beside the settings: those of its options that are plain."""
    fields = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
    options = {f.name: getattr(task, f.name) for f in fields if f.init and f.name[0] != "_"}
    kinds = (str, int, float, list, tuple, dict, type(None))
    plain = {name: _plain(value) for name, value in options.items() if isinstance(value, kinds)}
    return {"loss_unit": task.loss_unit, "metric_notes": dict(task.metric_notes), "task_settings": plain}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)
