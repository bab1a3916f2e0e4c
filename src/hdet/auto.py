"""AutoLR: the recommended recipe under one name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.checks import require_kind
from hdet.ensemble import Ensemble
from hdet.errors import warn
from hdet.explore import Hyperparameter, LearningRate, WeightDecay
from hdet.explore.values import hyperparameters_of
from hdet.method.controller import Controller
from hdet.method.guard import Guard
from hdet.method.recipe import Recipe
from hdet.method.thermostat import FOUND, Thermostat
from hdet.method.weight_decay import START, WeightDecayController
from hdet.records import RecordSink
from hdet.replicas import ReplicaGroup
from hdet.replicas.exchange import raising_together
from hdet.replicas.optimizers import (
    decay_per_step,
    peak_rate,
    plain_optimizer,
    unchanged_on_error,
    unused_answer,
)
from hdet.replicas.probe import AnyProbe
from hdet.replicas.tensors import parameters_of
from hdet.search.found import FoundLR

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def settings_of(recipe: Recipe, optimizer: Optimizer, found: FoundLR | None = None) -> dict[str, Any]:
    """Give the arguments of :class:`hdet.Ensemble` or :class:`hdet.VirtualEnsemble` for this recipe.

    The learning rates that the optimizer has now are the peaks of the schedule. Where a OneCycleLR was there
    before, its peaks are.
    """
    if found is not None:
        found.write(optimizer)
    for group in optimizer.param_groups:
        if "max_lr" in group:
            group["initial_lr"] = group.pop("max_lr")
    return {
        "scheduler": LambdaLR(optimizer, recipe.shape),
        "explore": [LearningRate(0.0)],
        "sync_every": recipe.steps_per_round,
        "total_steps": recipe.total_steps,
        "controller": Guard(expected_loss=None if found is None else found.expected_loss),
        "average_tail": recipe.average_tail,
    }


def steering_decay(settings: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Give the settings that let held-out data move the weight decay, where no replica differs in it."""
    explore: list[Hyperparameter] = []
    for one in settings["explore"]:
        if isinstance(one, WeightDecay):
            if one.start == "auto":
                for group in optimizer.param_groups:
                    rate = peak_rate(group) * decay_per_step(optimizer, group) * settings["total_steps"]
                    if group.get("weight_decay") and rate:
                        group["weight_decay"] = START / rate
            one = replace(one, spread=0.0, per_group=False, group_spreads=None, start=None)
        explore.append(one)
    other = settings["controller"]
    if isinstance(other, Guard):
        # Where a model knows its data by heart, decay that is added makes the loss jump for a round or two.
        other = replace(other, patience=4)
    return {"explore": explore, "controller": [other, WeightDecayController()]}


def add_thermostat(settings: dict[str, Any], thermostat: Thermostat, found: FoundLR | None) -> None:
    """Let a thermostat steer beside what the settings have. An answer of a search is its prior."""
    if found is not None and thermostat.priors is None:
        thermostat = replace(thermostat, priors=FOUND)
    others = settings["controller"]
    settings["controller"] = [*(others if isinstance(others, list) else [others]), thermostat]


def _unused(
    explore: Sequence[Hyperparameter], has_probe: bool, *, steers: bool, differ: bool
) -> Iterator[str]:
    """Tell what was asked for and is not used.

    Args:
        explore: further hyperparameters.
        has_probe: a probe was given.
        steers: held-out data moves the weight decay.
        differ: replicas do.
    """
    if has_probe and not steers and not differ:
        yield (
            "the probe is not used, because replicas are equal and no weight decay is explored: pass "
            "explore=[hdet.WeightDecay()], or leave the probe out"
        )
    for one in explore:
        if isinstance(one, WeightDecay):
            is_default = one.spread == WeightDecay.spread and one.group_spreads is None
            if steers and one.spread > 0 and not is_default:
                yield (
                    "held-out data moves the weight decay, and replicas do not differ in it, so its spread "
                    f"of {one.spread:g} is not used. Leave the spread out. For a weight decay of "
                    f"{one.spread:g} set weight_decay={one.spread:g} in the optimizer"
                )
            elif is_default and not steers:
                yield (
                    "a controller is given, so held-out data does not move the weight decay. Replicas differ "
                    f"in it by {one.spread:g}, and the controller compares them. Leave the controller out to "
                    "steer by held-out data"
                )


class AutoLR(Ensemble):
    """Train with the learning rate that :func:`hdet.find_lr` has found.

    It takes the place of a scheduler. Call ``step(loss)`` after every optimizer step. The learning rate rises
    linearly over 40 % of the steps, and falls linearly. After the last step the model holds the mean of the
    weights of the last steps. If a run collapses, the guard goes back and lowers the learning rate. It is an
    :class:`hdet.Ensemble` with the settings of :class:`hdet.method.recipe.Recipe`.

    Args:
        optimizer: the optimizer of this rank.
        total_steps: length of training in optimizer steps, without those of the search.
        model: the model, in DistributedDataParallel if there are several ranks.
        found: what :func:`hdet.find_lr` has returned. None to train with the learning rates that the
            optimizer has, or to load a checkpoint.
        spread: half-width of the replicas' learning rates around the schedule; 0 keeps replicas equal, and
            splits what hdet keeps of the parameters between them. The paper has 1/9.
        explore: further hyperparameters. ``hdet.WeightDecay()`` is moved by what held-out data says, which
            needs a probe. In others replicas differ.
        probe: held-out data, ``hdet.Probe(batches, loss)``; see also :class:`hdet.Ensemble`.
        controller: an :class:`hdet.Thermostat`, which steers the learning rate until its peak and needs an
            ``hdet.Probe``; or a :class:`hdet.Controller` that moves what is explored, instead of the guard.
        sync_every: steps per round, and between two looks of the guard; None for a good number.
        records: takes a record of every round, such as ``hdet.Records("records.jsonl")``.
        replicas: the process group that joins the replicas; None for the world, or for this process alone.
            For a sharded model see :class:`hdet.Ensemble`.
        seed: the same on every replica.

    >>> import torch
    >>> from hdet import find_lr
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    >>> loss_of = lambda model, x: (model(x) - 1).square().mean()
    >>> batches = [torch.randn(4, 2) for _ in range(50)]
    >>> found = find_lr(model, optimizer, batches, loss_of, total_steps=500)
    >>> auto = AutoLR(optimizer, total_steps=500, model=model, found=found)
    >>> for step in range(500):
    ...     loss = loss_of(model, batches[step % 50])
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     auto.step(loss)
    >>> auto.found_lr["lr"] > 1e-4, loss.item() < 0.1
    (True, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        model: nn.Module | None = None,
        found: FoundLR | None = None,
        spread: float = 0.0,
        explore: Sequence[Hyperparameter] = (),
        probe: AnyProbe | None = None,
        controller: Controller | Thermostat | None = None,
        sync_every: int | None = None,
        records: RecordSink | None = None,
        replicas: dist.ProcessGroup | DeviceMesh | ReplicaGroup | None = None,
        seed: int = 0,
    ) -> None:
        plain = plain_optimizer(optimizer)
        group = ReplicaGroup.of_parameters(replicas, parameters_of(plain))
        with unchanged_on_error(plain):
            with raising_together(group):
                recipe = Recipe(total_steps=total_steps, sync_every=sync_every)
                is_found = found is None or isinstance(found, FoundLR)
                must = "found must be what hdet.find_lr returned, or None"
                require_kind(must, found, is_found, "pass all of it, not found.lr")
                if found is None and not any(peak_rate(group) for group in plain.param_groups):
                    raise ValueError(
                        "optimizer's lr must be above 0 in one group at least, got 0 in all: give any "
                        "guess, and find_lr improves it"
                    )
                settings = settings_of(recipe, plain, found) | {"probe": probe, "records": records}
                further = hyperparameters_of(explore, may_be_empty=True)
                settings["explore"] = [LearningRate(spread), *further]
                thermostat = controller if isinstance(controller, Thermostat) else None
                if controller is not None and thermostat is None:
                    settings["controller"] = controller
                elif any(isinstance(h, WeightDecay) for h in further):
                    settings |= steering_decay(settings, plain)
                if thermostat is not None:
                    add_thermostat(settings, thermostat, found)
            super().__init__(optimizer, model=model, replicas=group, seed=seed, **settings)
        self._found = "" if found is None else str(found)
        if found is None and self.replicas.is_writer:
            unused = unused_answer(plain)
            if unused is not None:
                shown = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(unused))
                warn(
                    f"find_lr has found a learning rate of {shown} for this optimizer, but found is None, so "
                    "the run trains with your guess: pass found=found"
                )
        if self.replicas.is_writer:
            kinds = {type(one) for one in self._parts.settings.controllers}
            unused = probe is not None and Thermostat not in kinds
            steers = WeightDecayController in kinds
            for text in _unused(further, unused, steers=steers, differ=self.replicas.differ):
                warn(text)
        if found is not None and self.replicas.is_writer:
            found.warn_of_other_length(total_steps)
        if found is not None and records is not None and self.replicas.is_writer:
            records.write(found.to_record(self.replicas.count))

    def summary(self) -> str:
        """Tell in a few plain lines what was found, and where the run stands."""
        lines = [f"found: {self._found}"] if self._found else []
        return "\n".join([*lines, super().summary()])

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`hdet.Ensemble.state_dict`; also what was found, in words."""
        state = super().state_dict()
        # A distributed checkpoint of an earlier version could not be loaded into one entry more.
        return state if self.replicas.is_sharded else state | {"found": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`hdet.Ensemble.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._found = str(state_dict.get("found", self._found))
