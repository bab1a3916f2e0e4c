"""Run a task from the first step to the last, and leave a folder that tells what happened."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from hdet.checkpoints import Checkpoint
from hdet.errors import AllReplicasFailedError, CheckpointError, HdetWarning, warn
from hdet.lab.tasks.task import Task, load_task, options_of
from hdet.lab.train.config import RunConfig
from hdet.lab.train.folder import RunFolder, write_json
from hdet.lab.train.trainers import RankTrainer, Trainer, VirtualTrainer, to_device
from hdet.method.fan_out import derived_seed
from hdet.records import JsonlSink, RecordSink, RoundRecord, Tee, read_records
from hdet.replicas.copies import generator_states, restore_generators
from hdet.round_record import is_learning_rate
from hdet.search.found import FoundLR

_LOOK_EVERY = 10
"""Steps between updates of the progress, and between looks at a stop that was asked for."""


_DIVERGED = 0.05
"""A run diverged if it ends above its first held-out loss by more than this share of it."""

Status = Literal["finished", "diverged", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, for a progress bar."""

    step: int
    steps: int
    loss: float
    """Mean training loss of the last steps."""
    base_lr: float
    evaluation: float | None
    """Last held-out loss."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to."""

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
        """Plain values; numbers that are not finite become None."""
        return _plain(asdict(self))


def run(
    config: RunConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    sinks: Sequence[RecordSink] = (),
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_record: Callable[[RoundRecord], None] = lambda _: None,
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
        on_progress: called every few steps on every rank.
        on_record: called for every record on rank zero.
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
        watch = _Watch(Tee(JsonlSink(folder.records), *sinks), on_record)
        trainer: Trainer = (VirtualTrainer if config.engine == "virtual" else RankTrainer)(
            task, config, watch, device, searches=config.find and not resume
        )
        on_ready()
        if trainer.found is not None and trainer.is_main:
            watch.write(trainer.found.to_record(config.replicas))
            on_found(trainer.found)
        seconds_before, first_loss = 0.0, math.nan
        if checkpoint is not None:
            checkpoint.load_into(trainer=trainer)
            seconds_before, first_loss = checkpoint.values["seconds"], checkpoint.values["first_loss"]
            if trainer.is_main:  # those of other ranks are not saved
                restore_generators(checkpoint.values["generators"])
        return _Run(task, config, folder, trainer, watch, seconds_before, first_loss, device).train(
            on_progress, should_stop
        )


_VALUES = ("settings", "seconds", "generators", "first_loss")
"""What a checkpoint holds beside the trainer."""


def _checkpoint(config: RunConfig, folder: RunFolder, on_note: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to go on from; raises if it is of another run."""
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
    """Within the block torch's generators follow from the seed, others on each rank, so dropout repeats."""
    before = generator_states()
    rank = int(os.environ.get("RANK", "0")) if config.engine == "torchrun" else 0
    torch.manual_seed(derived_seed(config.seed, "training", rank))
    try:
        yield
    finally:
        restore_generators(before)


class _Watch:
    """Takes the engine's records and passes them on."""

    def __init__(self, sinks: Tee, on_record: Callable[[RoundRecord], None]) -> None:
        self._sinks, self._on_record = sinks, on_record

    def write(self, record: RoundRecord) -> None:
        self._sinks.write(record)
        self._on_record(record)

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._sinks.write_metrics(step, metrics)


class _Run:
    def __init__(
        self,
        task: Task,
        config: RunConfig,
        folder: RunFolder,
        trainer: Trainer,
        watch: _Watch,
        seconds_before: float,
        first_loss: float,
        device: str,
    ) -> None:
        self._task, self._config, self._folder, self._trainer, self._watch = (
            task,
            config,
            folder,
            trainer,
            watch,
        )
        self._seconds_before, self._start, self._device = seconds_before, time.monotonic(), device
        self._first_loss = first_loss
        self._losses: list[torch.Tensor] = []
        self._train_loss = math.nan
        self._metrics: dict[str, float] = {}
        self._evaluated_at = -1

    def train(self, on_progress: Callable[[Progress], None], should_stop: Callable[[], bool]) -> Result:
        config, engine, trainer = self._config, self._trainer.engine, self._trainer
        try:
            if engine.num_steps == 0 and config.evaluation_interval < config.steps:
                self._evaluate()
            while engine.num_steps < config.steps:
                self._losses.append(trainer.step())
                step = engine.num_steps
                is_end = step >= config.steps
                if step % _LOOK_EVERY == 0 or is_end:
                    self._take_losses()
                    on_progress(self._progress(step))
                if not is_end and self._may_stop(step) and trainer.any_process(should_stop()):
                    self._evaluate()
                    self._save()
                    return self._finish("stopped", "asked to stop")
                if is_end or step % config.evaluation_interval == 0:
                    self._evaluate()
                    self._save()
            if self._evaluated_at != engine.num_steps:  # resumed at the very end
                self._evaluate()
            on_progress(self._progress(engine.num_steps))
            if not math.isfinite(self._metrics["loss"]):
                return self._finish("failed", "the held-out loss is not finite: lower --lr")
            first, last = self._first_loss, self._metrics["loss"]
            if last - first > _DIVERGED * abs(first):
                reason = f"the held-out loss was {first:.4g} at first and is {last:.4g} now: lower --lr"
                return self._finish("diverged", reason)
            return self._finish("finished")
        except AllReplicasFailedError as error:
            return self._finish("failed", str(error))

    def _may_stop(self, step: int) -> bool:
        """Where a run can be saved without changing it: averaging within a round would."""
        config = self._config
        differ = config.spread > 0 or bool(config.explore) or config.noise_scale > 0
        anywhere = not (differ or config.gradients == "local")
        return step % (_LOOK_EVERY if anywhere else config.sync_every) == 0

    def _progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            steps=self._config.steps,
            loss=self._train_loss,
            base_lr=max(float(v) for k, v in self._trainer.engine.base.items() if is_learning_rate(k)),
            evaluation=self._metrics.get("loss"),
        )

    def _take_losses(self) -> None:
        if self._losses:
            self._train_loss = torch.stack([loss.mean() for loss in self._losses]).mean().item()
            self._losses = []

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._start

    def _evaluate(self) -> None:
        self._take_losses()
        step = self._trainer.engine.num_steps
        if step:  # not before the first one: a warm start would be lost
            self._trainer.converge()
        with self._trainer.engine.base_values():
            self._metrics = evaluate(self._task, self._trainer.model, self._device)
        self._evaluated_at = step
        if step == 0:
            self._first_loss = self._metrics["loss"]
        if self._trainer.is_main:
            train_loss = self._train_loss if math.isfinite(self._train_loss) else None
            self._folder.add_evaluation(step, train_loss, _plain(self._metrics), self._seconds())
            self._watch.write_metrics(step, self._metrics)

    def _save(self) -> None:
        # Replicas have converged, so that one rank's state is everybody's.
        if self._trainer.is_main and math.isfinite(self._metrics["loss"]):
            self._folder.save_checkpoint(
                self._trainer.engine.num_steps,
                trainer=self._trainer,
                settings=self._config.to_json(),
                seconds=self._seconds(),
                generators=generator_states(),
                first_loss=self._first_loss,
            )

    def _finish(self, status: Status, reason: str = "") -> Result:
        config = self._config
        loss = math.nan if status == "failed" else self._metrics["loss"]
        result = Result(
            status=status,
            final_loss=loss if math.isfinite(loss) else None,
            metrics=_plain(self._metrics),
            found_lr=self._found_lr(),
            base_lr=config.lr,
            steps=self._trainer.engine.num_steps,
            seconds=self._seconds(),
            run_dir=str(self._folder.path),
            reason=reason,
        )
        if self._trainer.is_main:
            write_json(self._folder.result, result.to_json())
        return result

    def _found_lr(self) -> float:
        """The peaks as the run has corrected them; the largest base where a controller holds its own."""
        if self._config.controller == "paper":
            records = read_records(self._folder.records) if self._folder.records.exists() else []
            bases = [
                lr
                for r in records
                for n, trace in r.base_trace.items()
                if is_learning_rate(n)
                for lr in trace
            ]
            return max(bases, default=self._config.lr)
        return statistics.geometric_mean(self._trainer.engine.found_lr.values())


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, device: str = "cpu") -> dict[str, float]:
    """The task's metrics on its evaluation batches, in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        metrics = task.metrics(model, [to_device(device, batch) for batch in task.evaluation_batches()])
    finally:
        for module, mode in modes:
            module.training = mode
    if "loss" not in metrics:
        raise ValueError(
            f"metrics of task {type(task).__name__} must hold 'loss', got {sorted(metrics)}: add it"
        )
    return {name: float(value) for name, value in metrics.items()}


def task_facts(task: Task) -> dict[str, Any]:
    """What config.json tells about the task beside the settings."""
    return {"loss_unit": task.loss_unit, "task_settings": _plain(options_of(task))}


def resume_hint(folder: RunFolder) -> str:
    """The command that goes on with a run."""
    return f"hdet resume {shlex.quote(str(folder.path))}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else repr(value)
