"""AutoLR: the recommended recipe under one name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hdet.checks import require_kind, require_number
from hdet.ensemble import Ensemble
from hdet.errors import warn
from hdet.explore import Hyperparameter, LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.method.guard import Guard
from hdet.method.recipe import Recipe
from hdet.method.thermostat import FOUND, Thermostat
from hdet.method.weight_decay import HeldOutWeightDecay
from hdet.records import RecordSink
from hdet.replicas import ReplicaGroup
from hdet.replicas.exchange import raising_together
from hdet.replicas.optimizers import peak_rate, plain_optimizer, unchanged_on_error, unused_answer
from hdet.replicas.probe import Probe
from hdet.replicas.tensors import parameters_of
from hdet.search.found import FoundLR
from hdet.steering.needs import NEEDS, AnyController, controllers_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def settings_of(
    recipe: Recipe,
    optimizer: Optimizer,
    found: FoundLR | None = None,
    controllers: Sequence[AnyController] = (),
) -> dict[str, Any]:
    """Give the arguments of :class:`hdet.Ensemble` or :class:`hdet.VirtualEnsemble` for this recipe.

    The learning rates that the optimizer has now are the peaks of the schedule. Where a OneCycleLR was there
    before, its peaks are.
    """
    if found is not None:
        (found.to_be_steered if _is_steered(controllers) else found).write(optimizer)
    for group in optimizer.param_groups:
        if "max_lr" in group:
            group["initial_lr"] = group.pop("max_lr")
    return {
        "scheduler": _RecipeLR(optimizer, recipe.shape),
        "explore": [LearningRate(0.0)],
        "sync_every": recipe.steps_per_round,
        "total_steps": recipe.total_steps,
        "controllers": with_guard(controllers, found),
        "average_tail": recipe.average_tail,
    }


def _is_steered(controllers: Sequence[AnyController]) -> bool:
    return any(isinstance(one, Thermostat) for one in controllers_of(controllers))


class _RecipeLR(LambdaLR):
    """The schedule of the recipe: one factor for all parameter groups, written by a short step."""

    def step(self, epoch: int | None = None) -> None:
        """See torch's, which also looks after first steps, tensors, and a lambda for each group."""
        groups = self.optimizer.param_groups
        if epoch is not None or self._step_count < 2 or any(isinstance(g["lr"], Tensor) for g in groups):
            return super().step(epoch)
        self._step_count += 1
        self.last_epoch += 1
        factor = self.lr_lambdas[0](self.last_epoch)
        for group, peak in zip(groups, self.base_lrs, strict=True):
            group["lr"] = peak * factor
        self._last_lr = [group["lr"] for group in groups]


def with_guard(controllers: Sequence[AnyController], found: FoundLR | None) -> list[AnyController]:
    """Add the guard of the recipe, unless there is one, and tell controllers what a search has found."""
    kinds = {type(one) for one in controllers_of(controllers)}
    guard = Guard(
        expected_loss=None if found is None else found.expected_loss,
        # Where a model knows its data by heart, decay that is added makes the loss jump for a round or two.
        patience=4 if HeldOutWeightDecay in kinds else Guard.patience,
    )
    told = [
        replace(one, priors=FOUND) if isinstance(one, Thermostat) and found and not one.priors else one
        for one in controllers
    ]
    return told if Guard in kinds else [guard, *told]


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
        found: what :func:`hdet.find_lr` has returned; with a thermostat the run begins at twice its answer.
            None to train with the learning rates that the optimizer has, or to load a checkpoint.
        spread: half-width of the replicas' learning rates around the schedule; 0 keeps replicas equal, and
            splits what hdet keeps of the parameters between them. The paper has 1/9.
        explore: further hyperparameters in which replicas differ.
        controllers: what steers beside the guard. ``hdet.Thermostat()`` moves the learning rate until its
            peak, and ``hdet.HeldOutWeightDecay()`` the weight decay. Both need a probe. See also
            :class:`hdet.Ensemble`. An ``hdet.Guard`` among them takes the place of the recipe's.
        probe: held-out data, ``hdet.Probe(batches, loss)``.
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
        controllers: Sequence[AnyController] = (),
        probe: Probe | None = None,
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
                require_number("spread", spread, at_least=0, below=1)
                settings = settings_of(recipe, plain, found, controllers)
                settings |= {"probe": probe, "records": records}
                further = hyperparameters_of(explore, may_be_empty=True)
                settings["explore"] = [LearningRate(spread), *further]
            super().__init__(optimizer, model=model, replicas=group, seed=seed, **settings)
        self._found = "" if found is None else str(found)
        if found is not None and found.to_be_steered is not found and _is_steered(controllers):
            self._found += " The run begins at twice that: the thermostat takes back what is too high."
        if found is None and self.replicas.is_writer:
            unused = unused_answer(plain)
            if unused is not None:
                shown = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(unused))
                warn(
                    f"find_lr has found a learning rate of {shown} for this optimizer, but found is None, so "
                    "the run trains with your guess: pass found=found"
                )
        is_scored = self.replicas.differ or any(
            need.argument == "probe" for c in controllers for need in NEEDS[type(c)]
        )
        if probe is not None and not is_scored and self.replicas.is_writer:
            warn(
                "the probe is not used, because replicas are equal and no controller looks at it",
                argument="probe",
                remedy="pass controllers=[hdet.Thermostat(), hdet.HeldOutWeightDecay()], one or both, or "
                "leave the probe out",
            )
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
        return super().state_dict() | {"found": self._found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`hdet.Ensemble.load_state_dict`."""
        super().load_state_dict(state_dict)
        self._found = str(state_dict.get("found", self._found))
