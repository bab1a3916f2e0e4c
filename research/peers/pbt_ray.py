"""Population-based training by Ray Tune: a process per member, and Ray's own scheduler."""

from __future__ import annotations

import importlib
import math
import os
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.lab.train.runner import evaluate
from hdet.method.fan_out import derived_seed
from hdet.method.recipe import one_cycle
from research.peers.base import Diverged, Job, Method, Trained, load_package
from research.peers.pbt import FACTORS, NUM_ROUNDS, first_lrs

__all__ = ["METHODS"]

_FILE = "member.pt"
_LOST = 1e30
"""Score of a member that has diverged; Ray wants numbers."""


def _run(job: Job) -> Trained:
    generator = torch.Generator().manual_seed(derived_seed(job.seed, "population"))
    with tempfile.TemporaryDirectory(prefix="hdet-ray-") as path, _quiet(job.seed), _ray(job.num_replicas):
        best = _tune(job, first_lrs(job, generator), Path(path))
        if best.metrics is None or best.metrics["score"] >= _LOST or best.checkpoint is None:
            raise Diverged
        model = job.build_model()
        with best.checkpoint.as_directory() as folder:
            model.load_state_dict(torch.load(Path(folder) / _FILE, weights_only=True)["model"])
        return Trained(evaluate(job.task, model), best.metrics["lr"])


def _tune(job: Job, lrs: list[float], path: Path) -> Any:
    """The best member at the end."""
    tune, schedulers, cloudpickle = map(_part, ("tune", "tune.schedulers", "cloudpickle"))
    num_rounds = min(NUM_ROUNDS, job.steps)
    module = sys.modules[type(job.task).__module__]
    is_own = module.__name__.partition(".")[0] == "hdet"
    if not is_own:  # a user's file, which the members' processes cannot import
        cloudpickle.register_pickle_by_value(module)
    try:
        scheduler = schedulers.PopulationBasedTraining(
            time_attr="training_iteration",
            metric="score",
            mode="min",
            perturbation_interval=1,
            hyperparam_mutations={"lr": tune.loguniform(min(lrs) / 1e3, max(lrs) * 1e3)},
            quantile_fraction=0.25,
            resample_probability=0.0,
            perturbation_factors=FACTORS,
            synch=True,
            log_config=False,
        )
        tuner = tune.Tuner(
            tune.with_resources(partial(_train_member, job=job), {"cpu": 1}),
            param_space={"lr": tune.grid_search(lrs)},
            tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
            run_config=tune.RunConfig(
                storage_path=str(path),
                verbose=0,
                stop={"training_iteration": num_rounds},
                failure_config=tune.FailureConfig(fail_fast=True),  # the others would wait for ever
            ),
        )
        results = tuner.fit()
        if results.errors:
            raise results.errors[0]
        if any((result.metrics or {}).get("training_iteration") != num_rounds for result in results):
            raise KeyboardInterrupt  # Ray has taken the signal, and gives what there is
        return results.get_best_result(metric="score", mode="min", scope="last")
    finally:
        if not is_own:
            cloudpickle.unregister_pickle_by_value(module)


def _part(name: str) -> Any:
    return importlib.import_module(f"ray.{name}")


def _train_member(config: dict[str, Any], *, job: Job) -> None:
    """What Ray runs in a member's process: train, and report at the end of every round."""
    tune = _part("tune")
    torch.set_num_threads(1)
    # Ray copies the settings of a better member: the batches must stay this one's.
    replica = int(str(tune.get_context().get_trial_id()).rpartition("_")[2])
    model = job.build_model()
    optimizer = job.optimizer(model, config["lr"])
    first = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as path:
            saved = torch.load(Path(path) / _FILE, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    interval = max(1, job.steps // NUM_ROUNDS)
    batches = job.task.train_batches(seed=job.seed, replica=replica, start=first)
    torch.manual_seed(derived_seed(job.seed, "member", replica, first))
    for step in range(first, job.steps):
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * one_cycle(step, job.steps, anneal="linear")
        loss = job.task.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends_round = (step + 1) % interval == 0 and (step + 1) // interval < NUM_ROUNDS
        if ends_round or step + 1 == job.steps:
            _report(job, model, optimizer, step + 1, config["lr"])


def _report(job: Job, model: nn.Module, optimizer: Optimizer, step: int, lr: float) -> None:
    tune = _part("tune")
    model.eval()
    with torch.no_grad():
        score = float(job.task.loss(model, job.task.probe_batch()))
    model.train()
    with tempfile.TemporaryDirectory() as path:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, Path(path) / _FILE)
        score = score if math.isfinite(score) else _LOST
        tune.report({"score": score, "lr": lr}, checkpoint=tune.Checkpoint.from_directory(path))


@contextmanager
def _ray(num_members: int) -> Iterator[None]:
    """Ray on this machine alone, with a slot for every member; one that runs already is used as it is."""
    ray = load_package("ray", "ray")
    if ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=num_members,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Ray draws from Python's own generator, reads the environment, and warns of what is meant."""
    settings = {
        "OMP_NUM_THREADS": "1",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",
    }
    before, drawn = {name: os.environ.get(name) for name in settings}, random.getstate()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    os.environ.update(settings)
    random.seed(derived_seed(seed, "ray"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(drawn)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


METHODS = (
    Method(
        name="pbt_ray",
        description="population-based training as pbt, by Ray Tune's scheduler, a process per member; "
        "10 % warmup, linear anneal",
        run=_run,
        package="ray",
        extra="ray",
        is_default=False,
        runs_here=False,
    ),
)
