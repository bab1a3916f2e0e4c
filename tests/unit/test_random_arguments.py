"""Every public door with random arguments: it works, or the error is one of hdet or names an argument."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet import presets

NUM_CALLS = 1000
MOST_ODD = 3
"""Arguments of a call that are not as they should be."""


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


class Things:
    """Makes what doors are given, anew for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Linear(4, 1))
        groups = [{"params": list(layer.parameters())} for layer in (self.model[0], self.model[2])]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        self.batches = [torch.randn(8, 3) for _ in range(3)]
        self.probe = hdet.Probe(self.batches, loss_of)

    def odd(self) -> list[Any]:
        """List values that somebody may pass by mistake, and some that are right for a few arguments."""
        other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        numbers = [0, 1, 2, 3, 7, 50, 60, -1, 10**9, 10**30, 0.0, 0.5, 1.0, 1.5, -0.1, 1e-300, 1e300]
        numbers += [float("nan"), float("inf"), -float("inf"), 1j, True, False]
        texts = [
            "",
            "auto",
            "log",
            "linear",
            "local",
            "shared",
            "keep",
            "paper",
            "factorial",
            "floor",
            "1",
            b"x",
        ]
        texts += ["lr", "weight_decay", "p"]
        held = [
            [],
            [0.1],
            [0.1, 0.2],
            (0.0, 1.0),
            (1.0, 0.0),
            ("a", None),
            [None],
            {},
            {"lr": 0.1},
            set(),
            range(3),
        ]
        held += [{"lr": [0.1] * 60}, {"lr": []}, {"lr": 3}, {"x": [0.1]}]
        tensors = [
            torch.tensor(0.5),
            torch.zeros(0),
            torch.randn(3),
            torch.randn(8, 3),
            torch.tensor(float("nan")),
        ]
        objects = [
            None,
            object(),
            lambda *_: 0.5,
            int,
            nn.Linear,
            nn.Linear(2, 1),
            nn.LazyLinear(1),
            self.model,
            other,
        ]
        objects += [self.optimizer, self.batches, iter(self.batches), self.probe, loss_of, self.folder, print]
        own = [
            hdet.LearningRate(),
            hdet.LearningRate(0.0),
            hdet.WeightDecay(),
            hdet.Dropout(self.model),
            hdet.Records(),
        ]
        own += [
            hdet.Guard(),
            hdet.Thermostat(),
            hdet.HeldOutWeightDecay(),
            hdet.Controller(),
            hdet.OuterMerge(),
        ]
        own += [
            hdet.Thermostat,
            hdet.Guard,
            hdet.MeanMerge(),
            torch.optim.lr_scheduler.ConstantLR(self.optimizer),
        ]
        lists = [[one] for one in own] + [
            [hdet.Guard(), hdet.Thermostat()],
            [hdet.LearningRate(0.1)] * 2,
            own,
        ]
        return [*numbers, *texts, *held, *tensors, *objects, *own, *lists]


def doors(it: Things) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """List every door by its name, with arguments that work."""
    trained = {"model": it.model, "optimizer": it.optimizer}
    slots = {"scale": "linear", "bounds": None}
    grouped = {"spread": 0.1, **slots, "per_group": True, "group_spreads": None, "floor": None}
    attribute = {"model": it.model, "spread": 0.1, **slots, "pattern": "*"}
    shared = {
        "sync_every": 10,
        "controllers": (),
        "probe": it.probe,
        "records": None,
        "replicas": None,
        "seed": 0,
    }
    engine = {
        "scheduler": None,
        "explore": None,
        "total_steps": 400,
        "bucket_mib": 25.0,
        "assignment": "random",
    }
    engine |= {"gradients": "shared", "merge": None, "moments": "auto", "average_tail": 0.0, "patience": 60.0}
    virtual = {
        name: value for name, value in {**shared, **engine}.items() if name not in ("replicas", "patience")
    }
    found = hdet.FoundLR(
        lr=[0.1, 0.1],
        low=[0.1, 0.1],
        high=[0.1, 0.1],
        asked=[0.1, 0.1],
        reason="",
        ramp=[(0.1, 1.0)],
        trials=[],
        num_steps=1,
    )
    return {
        "Ensemble": (hdet.Ensemble, {**trained, **shared, **engine}),
        "AutoLR": (
            hdet.AutoLR,
            {**trained, **shared, "total_steps": 400, "found": found, "spread": 0.0, "explore": ()},
        ),
        "OneCycleAutoLR": (
            hdet.OneCycleAutoLR,
            {**defaults(hdet.OneCycleAutoLR), "optimizer": it.optimizer, "max_lr": 0.1, "total_steps": 400},
        ),
        "VirtualEnsemble": (
            hdet.VirtualEnsemble,
            {
                **virtual,
                **trained,
                "loss": loss_of,
                "num_replicas": 2,
                "vectorize": True,
                "join_equal": False,
            },
        ),
        "find_lr": (
            hdet.find_lr,
            {
                **trained,
                "batches": it.batches,
                "loss": loss_of,
                "total_steps": 50,
                "probe": None,
                "clip_norm": None,
                "replicas": None,
                "progress": False,
            },
        ),
        "tune": (
            hdet.tune,
            {
                **defaults(hdet.tune),
                **trained,
                "batches": it.batches,
                "loss": loss_of,
                "total_steps": 60,
                "learning_rate": "keep",
                "progress": False,
            },
        ),
        "Probe": (hdet.Probe, {"batches": it.batches, "loss": loss_of}),
        "ReplayLR": (
            hdet.ReplayLR,
            {"optimizer": it.optimizer, "schedule": {"lr": [0.1, 0.2]}, "last_epoch": -1, "explore": ()},
        ),
        "save_checkpoint": (
            hdet.save_checkpoint,
            {"path": it.folder / "c", "step": 1, "keep": 1, "model": it.model, "value": 0.5},
        ),
        "load_checkpoint": (hdet.load_checkpoint, {"path": it.folder, "model": it.model}),
        "Scalar": (
            hdet.Scalar,
            {
                "name": "s",
                "get": lambda: 0.5,
                "set": lambda _: None,
                "spread": 0.1,
                **slots,
                "changes_loss": False,
            },
        ),
        "ModuleAttribute": (hdet.ModuleAttribute, {**attribute, "attribute": "p"}),
        **{
            kind.__name__: (kind, attribute)
            for kind in (hdet.Dropout, hdet.LabelSmoothing, hdet.AttentionTemperature)
        },
        **{
            kind.__name__: (kind, grouped)
            for kind in (hdet.LearningRate, hdet.WeightDecay, hdet.Momentum, hdet.Beta2, hdet.Epsilon)
        },
        **{
            kind.__name__: (kind, defaults(kind))
            for kind in (
                hdet.Controller,
                hdet.Guard,
                hdet.Thermostat,
                hdet.HeldOutWeightDecay,
                hdet.OuterMerge,
                presets.diloco,
                presets.local_sgd,
            )
        },
        "warm_start": (
            hdet.warm_start,
            {
                "model": it.model,
                "noise_scale": 0.01,
                "norm": "tensor",
                "seed": 0,
                "process_group": None,
                "replica": 0,
            },
        ),
        "prior_from": (
            lambda runs, spread, records: hdet.prior_from(runs, spread=spread),
            {"runs": [it.folder], "spread": 0.1, "records": None},
        ),
        "export_schedule": (hdet.export_schedule, {"records": []}),
        "JointOptimizer": (
            lambda optimizers, more: hdet.JointOptimizer(optimizers, more),
            {"optimizers": it.optimizer, "more": torch.optim.SGD(nn.Linear(2, 1).parameters())},
        ),
        "Records": (hdet.Records, {"path": it.folder / "r.jsonl"}),
        "JsonlSink": (hdet.JsonlSink, {"path": it.folder / "j.jsonl"}),
        "read_records": (hdet.read_records, {"path": it.folder / "r.jsonl"}),
        "Tee": (lambda sinks: hdet.Tee(sinks), {"sinks": hdet.Records()}),
        "found.write": (found.write, {"optimizer": it.optimizer}),
    }


def defaults(door: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(door).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def odd_value(draw: random.Random, it: Things, good: Any) -> Any:
    """Draw any value, or one of the kind of the right one."""
    values = it.odd()
    alike = [value for value in values if type(value) is type(good)]
    return draw.choice(alike if alike and draw.random() < 0.6 else values)


def problem_of(error: BaseException, names: Mapping[str, Any]) -> str:
    """Tell what is wrong with an error; empty if it is one that helps."""
    if isinstance(error, (hdet.HdetError, OSError)):
        return ""
    told = str(error)
    if any("called loss(model, batch)" in note for note in getattr(error, "__notes__", ())):
        return ""  # an error of torch, about a batch that the model cannot take
    if not isinstance(error, (ValueError, TypeError)):
        return "of another kind"
    is_ours = " must " in told or " needs " in told
    has_name = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", told) for name in names)
    return "" if is_ours and has_name else "does not name an argument"


@pytest.mark.parametrize("seed", range(4))
def test_random_arguments_work_or_are_named(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    draw, poor = random.Random(seed), []
    torch.manual_seed(seed)
    sizes = {name: len(good) for name, (_, good) in doors(Things(tmp_path)).items()}
    for name in draw.choices(list(sizes), sizes.values(), k=NUM_CALLS // 4):
        it = Things(tmp_path)
        door, good = doors(it)[name]
        chosen = draw.sample(sorted(good), draw.randint(1, min(MOST_ODD, len(good))))
        odd = {argument: odd_value(draw, it, good[argument]) for argument in chosen}
        given = good | odd
        positional = [given.pop("path")] if name.endswith("_checkpoint") else []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                door(*positional, **given)
        except Exception as error:
            if problem := problem_of(error, good):
                poor.append(f"{name}({odd}): {type(error).__name__}: {str(error)[:300]} ({problem})")
    assert not poor, f"{len(poor)} poor errors\n" + "\n".join(poor)
