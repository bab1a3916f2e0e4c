"""Ablation: configurations of the paper's method and of what it leaves out, and runs of its Table 1."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdet.errors import AllReplicasFailedError
from hdet.lab.intervals import Runs
from hdet.lab.pool import Pool
from hdet.lab.stability import Stability, is_lost, judge
from hdet.lab.tasks.task import Task, load_task
from hdet.lab.train.config import RunConfig
from hdet.lab.train.runner import evaluate
from hdet.lab.train.trainers import Trainer
from hdet.method.controller import decay_to, first_controlled_sync, num_controlled_rounds
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from hdet.records import Records
from hdet.round_record import RoundRecord, is_learning_rate

SPREAD = 1 / 9
NOISE_SCALE = 0.01
LOW_FACTOR = 9
"""The high learning rate of the paper's Table 1 over the low one."""
WARMUP = 0.1
RESIDUAL = 0.22
"""Where the learning rate ends over its peak: near .0002 of .0009 in the paper's figure 3."""
FLOOR = 1 / (25 * 1e4)
"""The same by OneCycleLR, which the paper says that eq. 8 aims at."""
_CHECKPOINT_SEED = 1000
_CURVE_POINTS = 100


def sync_every(steps: int) -> int:
    """T, scaled to the length of the run: the paper's 1000 for a run of hours.

    >>> sync_every(300), sync_every(5000)
    (5, 50)
    """
    return max(5, steps // 100)


def controller_start(steps: int) -> int:
    """The step from which the controller acts: a fifth of the run.

    >>> controller_start(300)
    60
    """
    return round(0.2 * steps)


def taken_over(steps: int) -> float:
    """Factor on the peak that the controller begins with: that of the last step before its first sync."""
    return one_cycle(first_controlled_sync(controller_start(steps), sync_every(steps)) - 1, steps)


def decay_shape(step: int, *, steps: int, end: float = RESIDUAL) -> float:
    r"""Factor on the peak where the controller's decay acts and its signal does not (eq. 7 with v = 0).

    .. math:: c(t) = c(t_0 - 1)\,(1-\gamma)^{1 + \lfloor (t-t_0)/T \rfloor}, \qquad t \ge t_0

    Before :math:`t_0`, the first sync that the controller acts at, it is the plan: warmup and linear anneal.
    ``end`` is the factor of the last step.

    >>> decay_shape(10, steps=100), round(decay_shape(99, steps=100), 6)
    (1.0, 0.22)
    """
    start, interval = controller_start(steps), sync_every(steps)
    first = first_controlled_sync(start, interval)
    if step < first:
        return one_cycle(step, steps)
    gamma = decay_to(end / taken_over(steps), num_controlled_rounds(start, interval, steps))
    return taken_over(steps) * (1 - gamma) ** (1 + (step - first) // interval)


def replica_settings(steps: int, **changes: Any) -> dict[str, Any]:
    """Settings of RunConfig for equal replicas that average every T; they add up to plain training.

    ``checkpoint``, which RunConfig does not have, starts from a trained model; see :func:`train`.
    """
    equal = {"spread": 0.0, "controllers": [], "noise_scale": 0.0, "sync_every": sync_every(steps)}
    return {**equal, "per_group": True, **changes}


def method_settings(steps: int, *, end: float | None = RESIDUAL, **changes: Any) -> dict[str, Any]:
    """Settings for the whole method, and what differs from it; losses are the replicas' own, as in the paper.

    Args:
        steps: length of the run.
        end: where the controller's decay ends, over the peak; None without a controller.
        changes: other settings.
    """
    settings: dict[str, Any] = {"spread": SPREAD, "noise_scale": NOISE_SCALE}
    if end is not None:
        settings |= {"controllers": ["paper"], "controller_start": controller_start(steps), "floor": end}
    return replica_settings(steps, **settings | changes)


def warm_init_settings(steps: int, **changes: Any) -> dict[str, Any]:
    """Settings of noise without averaging, but at the end."""
    return replica_settings(steps, noise_scale=NOISE_SCALE, sync_every=steps, **changes)


@dataclass(frozen=True)
class Row:
    """One configuration. Its name means the same in every table, and so does its key in every record."""

    key: str
    name: str
    description: str
    settings: Callable[..., dict[str, Any]]
    """By the number of steps; takes changes, too."""
    paper: str = ""
    """Training loss in the paper's Table 1; empty for a row that it leaves out."""
    share: float = 1.0
    """Of the learning rate that is given."""


_WARM: dict[str, Any] = {"checkpoint": 1 / LOW_FACTOR}
_full = partial(method_settings, **_WARM)
_no_controller = partial(_full, end=None)
_warm_init = partial(warm_init_settings, **_WARM)
_plain_warm = partial(replica_settings, **_WARM)
_cold = partial(method_settings, noise_scale=0.0)
_equal = partial(_full, spread=0.0)
FULL, EQUAL = "hdet_checkpoint", "equal_checkpoint"

TABLE_1 = (
    Row("plain", "Baseline-Low", "plain", replica_settings, "3.294", 1 / LOW_FACTOR),
    Row("grid", "Baseline-High", "plain", replica_settings, "4.169 †"),
    Row(
        "warm_init_checkpoint",
        "Warm-Init, checkpoint",
        "noise, averaged at the end only",
        _warm_init,
        "4.674 †",
    ),
    Row(
        "hdet_no_controller_checkpoint",
        "HDET without controller, checkpoint",
        "spread and noise",
        _no_controller,
        "3.280",
    ),
    Row("hdet_no_warm_start", "HDET without warm start", "spread and controller", _cold, "3.281"),
    Row(FULL, "HDET (full), checkpoint", "from a trained checkpoint with noise", _full, "3.277"),
    Row("plain_checkpoint", "Plain, checkpoint", "from the same checkpoint", _plain_warm),
    Row(
        EQUAL,
        "Equal replicas, checkpoint, same decay",
        "HDET (full), checkpoint, with zero spread",
        _equal,
    ),
)
"""The paper's six, and the two that tell what of them is due to the checkpoint and to the decay."""


@dataclass(frozen=True)
class Training:
    """What became of one run."""

    final_loss: float
    """Held-out loss of the averaged model; NaN if it was lost."""
    untrained_loss: float
    losses: list[float]
    """Mean training loss of the replicas, by step."""
    lrs: dict[str, list[list[float]]]
    """Steps and the shared learning rate at them, by hyperparameter."""
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Others of the averaged model on held-out data, those that the task explains: AUC and NE of the feed."""
    records: list[RoundRecord] = field(default_factory=list)
    """Of the rounds."""
    is_warm: bool = False
    """It began from a checkpoint."""
    seed: int = 0
    low_loss: float = math.nan
    """Held-out loss of Baseline-Low with this seed, which a run that learns comes half way to."""

    @property
    def stability(self) -> Stability:
        """Tell whether its loss jumped, and whether it crashed."""
        found = judge(
            self.losses,
            num_warmup_steps=round(WARMUP * len(self.losses)),
            final_loss=self.final_loss,
            untrained_loss=self.untrained_loss,
            first_loss=self.untrained_loss if self.is_warm else None,
        )
        if found.crash or not is_lost(
            self.final_loss, untrained_loss=self.untrained_loss, best_loss=self.low_loss
        ):
            return found
        return Stability(found.has_spike, "less than half of what Baseline-Low has learned")

    @property
    def is_crash(self) -> bool:
        """Tell whether it crashed."""
        return bool(self.stability.crash)

    @property
    def end_loss(self) -> float:
        """Mean training loss of the last tenth."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return statistics.fmean(last) if last else math.nan


def train(task: Task, base: Mapping[str, Any], settings: Mapping[str, Any]) -> Training:
    """Train one row of an ablation.

    Args:
        task: what to train on.
        base: fields of RunConfig that all rows share: task, lr, steps, replicas, optimizer, seed.
        settings: those that make the row. ``checkpoint`` starts it from the weights of a plain run of another
            seed at this share of the learning rate, as long as the row itself.
    """
    settings = dict(settings)
    share = settings.pop("checkpoint", 0.0)
    config = RunConfig(**{**base, "find": False, "probe": False, "warmup": WARMUP, **settings})
    start, untrained = time.monotonic(), evaluate(task, task.build_model(config.seed))["loss"]
    records, losses = Records(), list[float]()
    lrs: dict[str, list[list[float]]] = {}
    final: dict[str, float] = {}
    # One attention kernel for all rows: replicas that run at once have no other, and at a learning rate that
    # makes logits huge it stays finite where others do not.
    with torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(derived_seed(config.seed, "training"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the controller has nothing to compare")  # its decay is the row
            trainer = Trainer(_from_checkpoint(task, base, share), config, records, "cpu")
        engine = trainer.engine
        while engine.num_steps < config.steps:
            if engine.num_steps % max(1, -(-config.steps // _CURVE_POINTS)) == 0:
                for name, value in engine.base.items():
                    if is_learning_rate(name):
                        lrs.setdefault(name, []).append([engine.num_steps + 1, float(f"{float(value):.5g}")])
            try:
                seen = trainer.step()
            except AllReplicasFailedError:
                break
            finite = seen[seen.isfinite()]  # the engine leaves out a replica that is lost
            losses.append(finite.mean().item() if len(finite) else math.nan)
            if not len(finite):
                break
        else:
            trainer.converge()
            final = evaluate(task, trainer.model)
    metrics = {name: final[name] for name in task.metric_notes if name in final}
    seconds = time.monotonic() - start
    loss = final.get("loss", math.nan)
    return Training(loss, untrained, losses, lrs, seconds, metrics, [*records], bool(share), config.seed)


def _from_checkpoint(task: Task, base: Mapping[str, Any], share: float) -> Task:
    """The task, whose model begins with the weights of a plain run; as it is where the share is zero."""
    if not share:
        return task
    plain = {"lr": base["lr"] * share, "seed": base["seed"] + _CHECKPOINT_SEED, "find": False, "probe": False}
    config = RunConfig(**{**base, **plain, "controllers": (), "warmup": WARMUP})
    trained = _checkpoint(json.dumps(config.to_json(), sort_keys=True))
    task = copy.copy(task)
    object.__setattr__(task, "build_model", lambda seed: copy.deepcopy(trained))  # tasks may be frozen
    return task


@functools.lru_cache(maxsize=16)
def _checkpoint(settings: str) -> nn.Module:
    config = RunConfig.from_json(json.loads(settings))
    trainer = Trainer(load_task(config.task, config.task_options), config, None, "cpu")
    while trainer.engine.num_steps < config.steps:
        trainer.step()
    trainer.converge()
    return trainer.model


@dataclass
class Result:
    """A row and its runs, one per seed."""

    row: Row
    lr: float
    runs: list[Training] = field(default_factory=list)

    @property
    def loss_text(self) -> str:
        """Mean of the held-out losses, their deviation with several seeds, and a mark for crashes."""
        mark = "†" if any(run.is_crash for run in self.runs) else ""
        return " ".join(filter(None, [mean_text([run.final_loss for run in self.runs]), mark])) or "-"

    def metric_text(self, name: str) -> str:
        """The same of another metric."""
        return mean_text([run.metrics.get(name, math.nan) for run in self.runs]) or "-"

    @property
    def outcomes(self) -> Runs:
        """Final loss and crash by seed."""
        return {run.seed: (run.final_loss, run.is_crash) for run in self.runs}


def mean_text(values: Sequence[float]) -> str:
    """Mean and deviation of the values that are finite; empty if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    spread = f" ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else ""
    return f"{statistics.fmean(finite):.4f}{spread}" if finite else ""


def metric_names(results: Sequence[Result]) -> list[str]:
    """Names of the other metrics that the runs have."""
    return list(dict.fromkeys(name for result in results for run in result.runs for name in run.metrics))


def ablate(
    base: Mapping[str, Any],
    *,
    seeds: int = 1,
    num_jobs: int = 0,
    on_done: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Result]:
    """Train the rows of Table 1 with every seed; rows that were stopped have fewer runs.

    Args:
        base: fields of RunConfig: task, task_options, lr, steps, replicas, optimizer.
        seeds: how many.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done.
        should_stop: asked now and then.
    """
    results = [Result(row, base["lr"] * row.share) for row in TABLE_1]
    # Rows with a checkpoint last: a worker trains one checkpoint for all of them.
    order = sorted(results, key=lambda result: "checkpoint" in result.row.settings(base["steps"]))
    places = [(result, seed) for seed in range(seeds) for result in order]
    jobs = [
        ({**base, "lr": result.lr, "seed": seed}, result.row.settings(base["steps"]))
        for result, seed in places
    ]
    with Pool(num_jobs) as pool:
        for done, (place, run) in enumerate(pool.run(_train_one, jobs, should_stop=should_stop), start=1):
            places[place][0].runs.append(run)
            on_done(done)
    lows = {run.seed: run.final_loss for run in results[0].runs}
    for result in results:
        result.runs = [
            dataclasses.replace(run, low_loss=lows.get(run.seed, math.nan))
            for run in sorted(result.runs, key=lambda run: run.seed)
        ]
    return results


def _train_one(base: dict[str, Any], settings: dict[str, Any]) -> Training:
    return train(load_task(base["task"], base["task_options"]), base, settings)
