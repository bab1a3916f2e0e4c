"""VirtualEnsemble: the method with N replicas in one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hdet.core.checks import require_choice, require_count, require_flag
from hdet.ensemble import Ensemble
from hdet.ensemble.losses import LossSum
from hdet.replicas import Replicas
from hdet.virtual.rules import Hyper, Moments, rule_for
from hdet.virtual.stack import Stack

__all__ = ["VirtualEnsemble"]


class VirtualEnsemble:
    """Train N replicas of a model in one process, with the same engine as on N ranks.

    The model and the optimizer that you give are templates: the replicas' parameters live in matrices with
    one row each, and one broadcast step updates them all. After every sync and :meth:`converge`, the model
    holds the mean.

    Args:
        model: what to train; all replicas start from its parameters.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` over the model's parameters. It is never stepped
            itself: its groups hold the shared hyperparameters.
        loss: ``loss(model, batch)``, a scalar tensor.
        num_replicas: how many replicas.
        gradients: ``"shared"``, the mean over replicas as in data-parallel training, or ``"local"``, each its
            own.
        vectorize: compute all replicas at once (``torch.func.vmap``), or one after the other, which takes any
            model and any hyperparameter.
        probe: ``probe(model)``, the loss that replicas are compared by, evaluated for each at every sync.
        **settings: everything else that :class:`hdet.Ensemble` takes.

    >>> model = nn.Linear(2, 1)
    >>> ensemble = VirtualEnsemble(model, torch.optim.SGD(model.parameters(), lr=0.1),
    ...                            lambda m, x: m(x).square().mean(), num_replicas=4, sync_every=2)
    >>> losses = ensemble.step(torch.ones(3, 2))       # one batch for all replicas
    >>> losses = ensemble.step([torch.ones(3, 2)] * 4) # a list: one batch each
    >>> losses.shape, ensemble.engine.num_steps
    (torch.Size([4]), 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        num_replicas: int = 8,
        gradients: Literal["shared", "local"] = "shared",
        vectorize: bool = True,
        probe: Callable[[nn.Module], Tensor | float] | None = None,
        **settings: Any,
    ) -> None:
        require_count("num_replicas", num_replicas)
        require_choice("gradients", gradients, ("shared", "local"))
        require_flag("vectorize", vectorize)
        self._rule = rule_for(optimizer)
        self._gradients = gradients
        self._moments: list[Moments] = [{} for _ in optimizer.param_groups]
        self._num_updates = 0
        self._stack = Stack(model, optimizer, loss, num_replicas=num_replicas, vectorize=vectorize)
        self._num_replicas = num_replicas
        self.model = model
        self.engine = _Engine(
            optimizer,
            stack=self._stack,
            virtual_moments=self._moments,
            num_replicas=num_replicas,
            has_local_gradients=gradients == "local",
            score=probe,
            **settings,
        )
        static = [d.name for d in self.engine.dials if any(field.is_static for field in d.fields)]
        if vectorize and static:
            raise ValueError(
                f"vectorize must be False to explore {static}, got True: they are read by the model itself, "
                "which then runs once for all replicas. Pass vectorize=False"
            )

    def step(self, batch: Any) -> Tensor:
        """One optimizer step of every replica; returns their losses.

        Args:
            batch: a **list** with one batch per replica, or one batch (a tensor, a tuple, ...) for all.
        """
        is_common = not isinstance(batch, list)
        if not is_common and len(batch) != self._num_replicas:
            raise ValueError(
                f"batch must be a list of {self._num_replicas} batches, one per replica, got {len(batch)}: "
                "pass a tuple or a tensor for one batch that all replicas share"
            )
        engine = self.engine
        try:
            losses, gradients = self._stack.losses_and_gradients(
                batch, is_common=is_common, before=engine.put_static_values_of
            )
        finally:
            engine.put_static_bases()
        if self._gradients == "shared":
            gradients = [gradient.mean(dim=0, keepdim=True) for gradient in gradients]
        self._num_updates += 1
        with torch.no_grad():
            for i, group in enumerate(engine.optimizer.param_groups):
                flags = {
                    "has_momentum": bool(group.get("momentum", 0)),
                    "nesterov": group.get("nesterov", False),
                    "is_decoupled": group.get("decoupled_weight_decay", isinstance(engine.optimizer, AdamW)),
                }
                matrix = self._stack.matrices[i]
                hyper = engine.hyper_of_group(i, matrix)
                self._rule(matrix, gradients[i], self._moments[i], hyper, self._num_updates, flags)
        engine.take_losses(losses)
        # The template is never stepped; this is how torch's schedulers know that a step has been made.
        engine.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        engine.step()
        return losses

    def converge(self) -> None:
        """Average the replicas now: before a save or an evaluation of :attr:`model`."""
        self.engine.converge()

    def state_dict(self) -> dict[str, Any]:
        """Everything: parameters, moments, schedule and controller. Call :meth:`converge` first."""
        return {
            "engine": self.engine.state_dict(),
            "model": {name: value.detach().clone() for name, value in self.model.state_dict().items()},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.engine.optimizer.state_dict()["param_groups"]
            ],
            "moments": [{name: m.clone() for name, m in moments.items()} for moments in self._moments],
            "num_updates": self._num_updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint; with another number of replicas, each takes the mean of the moments."""
        self.model.load_state_dict(state_dict["model"])
        self._stack.read_template()
        for moments, saved in zip(self._moments, state_dict["moments"], strict=True):
            moments.clear()
            for name, value in saved.items():
                same = value.shape[0] == self._num_replicas
                mean = value.mean(dim=0, keepdim=True).expand(self._num_replicas, -1)
                moments[name] = (value if same else mean).clone()
        self._num_updates = state_dict["num_updates"]
        optimizer_state = self.engine.optimizer.state_dict()
        for group, saved in zip(optimizer_state["param_groups"], state_dict["param_groups"], strict=True):
            group.update(saved)
        self.engine.optimizer.load_state_dict(optimizer_state)
        self.engine.load_state_dict(state_dict["engine"])


class _Engine(Ensemble):
    """The ensemble for all replicas at once: the optimizer holds the bases, each row has its own values."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        stack: Stack,
        virtual_moments: list[Moments],
        num_replicas: int,
        has_local_gradients: bool,
        score: Callable[[nn.Module], Tensor | float] | None,
        **settings: Any,
    ) -> None:
        self._stack, self._virtual_moments, self._score = stack, virtual_moments, score
        self._has_local_gradients = has_local_gradients
        self._loss_sums: Tensor | None = None
        self._scores: list[float] = []
        probe = None if score is None else self._score_all
        super().__init__(optimizer, replicas=Replicas(0, num_replicas), probe=probe, **settings)
        self._has_rounds = True  # without a spread too: the user's model is written at syncs

    @property
    def dials(self) -> list[Any]:
        """What is explored."""
        return self._dials

    # --- values by row -------------------------------------------------------------------------------

    def _assign_multipliers(self, *, narrow: bool = True) -> None:
        super()._assign_multipliers(narrow=narrow)
        places = self._positions(self._round)
        self._rows = {dial.name: dial.multipliers(places[dial.name]) for dial in self._dials}
        for dial in self._dials:
            dial.set_fields(1.0)  # the optimizer holds the base

    def hyper_of_group(self, index: int, matrix: Tensor) -> Hyper:
        """The hyperparameters of a group, each a column with one entry per replica."""
        group = self.optimizer.param_groups[index]
        shared = {
            key: group[key] for key in ("lr", "weight_decay", "momentum", "dampening", "eps") if key in group
        }
        if "betas" in group:
            shared["beta1"], shared["beta2"] = group["betas"]
        columns = {key: [float(value)] * self.replicas.count for key, value in shared.items()}
        for dial in self._dials:
            for i, field in enumerate(dial.fields):
                if not field.is_static and field.group_index == index:
                    columns[field.column] = [dial.value_with(rho, i) for rho in self._rows[dial.name]]
        dtype = torch.float32 if matrix.device.type == "mps" else torch.float64
        return {
            key: torch.tensor(values, dtype=dtype, device=matrix.device).unsqueeze(1)
            for key, values in columns.items()
        }

    def put_static_values_of(self, replica: int) -> None:
        """Before a replica's own pass: put its values where the model reads them."""
        self._put_static({name: row[replica] for name, row in self._rows.items()})

    def put_static_bases(self) -> None:
        """After it: put the shared values there."""
        self._put_static(dict.fromkeys(self._rows, 1.0))

    def _put_static(self, multipliers: dict[str, float]) -> None:
        static = [dial for dial in self._dials if dial.fields[0].is_static]
        if static:
            self._panel.put_plans()
            for dial in static:
                dial.set_fields(multipliers[dial.name])
            self._panel.put_values()

    @contextmanager
    def base_values(self) -> Iterator[None]:
        """The optimizer and the model hold the shared values already."""
        yield

    def restart_at(self, num_steps: int, *, narrow: bool = True) -> None:
        """See :class:`Ensemble`."""
        self._loss_sums = None
        super().restart_at(num_steps, narrow=narrow)

    # --- a round -------------------------------------------------------------------------------------

    def take_losses(self, losses: Tensor) -> None:
        """Add one loss per replica, on the device."""
        finite = torch.isfinite(losses)
        row = torch.stack(
            [torch.where(finite, losses, 0.0), finite.to(losses.dtype), (~finite).to(losses.dtype)]
        )
        self._loss_sums = row.double() if self._loss_sums is None else self._loss_sums + row

    @property
    def _has_others(self) -> bool:
        return self.replicas.count > 1

    def _score_all(self) -> float:
        """What the engine calls as its probe: it keeps every row's score, and the number is not used."""
        assert self._score is not None
        try:
            self._scores = self._stack.scores(self._score, self.put_static_values_of)
        finally:
            self.put_static_bases()
        return 0.0

    def _exchange(self, probe_loss: float | None) -> dict[int, str]:
        sums = torch.zeros(3, self.replicas.count) if self._loss_sums is None else self._loss_sums
        self._loss_sums = None
        return self._measure.take(
            self.num_steps,
            losses=[LossSum(*column) for column in sums.t().tolist()],
            are_healthy=self._stack.are_finite(),
            probes=None if probe_loss is None else self._scores,
        )

    def _converge(self, excluded: dict[int, str]) -> None:
        if self._explores or self._has_local_gradients:
            included = [r for r in range(self.replicas.count) if r not in excluded]
            averages_moments = self._averages_moments or self._has_local_gradients
            kept = [m for moments in self._virtual_moments for m in moments.values()]
            self._stack.average_(included, kept if averages_moments else ())
        else:
            self._stack.write_template(0)
        self._converged_at, self._has_moved = self.num_steps, False
