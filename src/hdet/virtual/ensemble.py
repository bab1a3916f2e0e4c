"""VirtualEnsemble: the method with N replicas in one process on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hdet.core.checks import require_choice, require_count, require_flag
from hdet.core.scout import Scout
from hdet.ensemble import Ensemble, warm_start
from hdet.ensemble.anchor import decay_terms
from hdet.ensemble.losses import LossSum
from hdet.ensemble.scouting import Scouting
from hdet.explore import Dial
from hdet.replicas import Replicas, widest_float
from hdet.virtual.rules import Hyper, Moments, rule_for
from hdet.virtual.stack import Stack, join

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
        join_equal: while replicas do not differ (no spread, one shared gradient), compute them as one, on all
            their batches joined along the first dimension. The same mean gradient where the loss is a mean
            over examples and the batches have one size, at a fraction of the time; not with BatchNorm.
        probe: ``probe(model)``, the loss that replicas are compared by, evaluated for each at every sync if
            they differ.
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
        join_equal: bool = False,
        probe: Callable[[nn.Module], Tensor | float] | None = None,
        **settings: Any,
    ) -> None:
        require_count("num_replicas", num_replicas)
        require_choice("gradients", gradients, ("shared", "local"))
        require_flag("vectorize", vectorize)
        require_flag("join_equal", join_equal)
        self._rule = rule_for(optimizer)
        self._gradients = gradients
        self._moments: list[Moments] = [{} for _ in optimizer.param_groups]
        self._stack = Stack(model, optimizer, loss, num_replicas=num_replicas, vectorize=vectorize)
        self._num_replicas = num_replicas
        self.model = model
        self.engine = _Engine(
            optimizer,
            stack=self._stack,
            virtual_moments=self._moments,
            num_replicas=num_replicas,
            has_local_gradients=gradients == "local",
            joins_equal=join_equal,
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
        num_rows = self._num_rows
        if num_rows < self._num_replicas and not is_common:
            is_common, batch = True, join(batch)
        try:
            losses, gradients = self._stack.losses_and_gradients(
                batch, is_common=is_common, before=engine.put_static_values_of, num_rows=num_rows
            )
        finally:
            engine.put_static_bases()
        if self._gradients == "shared" and not engine.is_scouting and num_rows > 1:
            gradients = [gradient.mean(dim=0, keepdim=True) for gradient in gradients]
        engine.before_update(gradients)
        engine.num_updates += 1
        self._fit_moments(num_rows)
        with torch.no_grad():
            for i, group in enumerate(engine.optimizer.param_groups):
                flags = {
                    "has_momentum": bool(group.get("momentum", 0)),
                    "nesterov": group.get("nesterov", False),
                    "is_decoupled": group.get("decoupled_weight_decay", isinstance(engine.optimizer, AdamW)),
                }
                matrix = self._stack.matrices[i][:num_rows]
                hyper = engine.hyper_of_group(i, matrix)
                self._rule(matrix, gradients[i], self._moments[i], hyper, self.engine.num_updates, flags)
        losses = losses.expand(self._num_replicas)
        engine.take_losses(losses)
        # The template is never stepped; this is how torch's schedulers know that a step has been made.
        engine.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        engine.step()
        return losses

    @property
    def _num_rows(self) -> int:
        """How many replicas are computed: one that stands for all, while they are equal."""
        return self.engine.num_distinct

    def _fit_moments(self, num_rows: int) -> None:
        """One row of moments per row that is computed; the mean of another number of them."""
        for moments in self._moments:
            for name, value in moments.items():
                if len(value) != num_rows:
                    moments[name] = value.mean(dim=0, keepdim=True).expand(num_rows, -1).clone()

    def converge(self) -> None:
        """Average the replicas now: before a save or an evaluation of :attr:`model`."""
        self.engine.converge()

    def finish(self) -> None:
        """End the run before its last step; see :meth:`hdet.Ensemble.finish`."""
        self.engine.finish()

    def warm_start(self, noise_scale: float = 0.01, *, norm: Literal["tensor", "global"] = "tensor") -> None:
        """Add Gaussian noise to the model's parameters, a different draw for each replica (eq. 10)."""
        for replica in range(self._num_replicas):
            with torch.no_grad():
                saved = [p.clone() for p in self.model.parameters()]
            warm_start(self.model, noise_scale, norm=norm, seed=self.engine.seed, replica=replica)
            self._stack.read_template(replica)
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), saved, strict=True):
                    parameter.copy_(value)
        self.engine.replicas_have_parted()

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
            "num_updates": self.engine.num_updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint; with another number of replicas, each takes the mean of the moments."""
        self.model.load_state_dict(state_dict["model"])
        self._stack.read_template()
        self.engine.replicas_are_joined()
        for moments, saved in zip(self._moments, state_dict["moments"], strict=True):
            moments.clear()
            moments.update({name: value.clone() for name, value in saved.items()})
        self.engine.num_updates = state_dict["num_updates"]
        optimizer_state = self.engine.optimizer.state_dict()
        for group, saved in zip(optimizer_state["param_groups"], state_dict["param_groups"], strict=True):
            group.update(saved)
        self.engine.optimizer.load_state_dict(optimizer_state)
        self.engine.load_state_dict(state_dict["engine"])
        self._fit_moments(self._num_rows)  # now that it is known whether replicas differ


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
        joins_equal: bool,
        score: Callable[[nn.Module], Tensor | float] | None,
        **settings: Any,
    ) -> None:
        self._stack, self._virtual_moments, self._score = stack, virtual_moments, score
        self._has_local_gradients, self._joins_equal = has_local_gradients, joins_equal
        device = stack.matrices[0].device
        self._loss_sums = torch.zeros(3, num_replicas, dtype=widest_float(device), device=device)
        self._losses: list[Tensor] = []
        self.rows_differ = True
        self.num_updates = 0
        """Optimizer steps, as Adam's bias correction counts them."""
        self._scores: list[float] = []
        probe = None if score is None else self._score_all
        super().__init__(optimizer, replicas=Replicas(0, num_replicas), probe=probe, **settings)
        self._has_rounds = True  # without a spread too: the user's model is written at syncs
        self.replicas_are_joined()

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
        """The hyperparameters of a group, each a number, or a column with one entry per replica."""
        group = self.optimizer.param_groups[index]
        shared = {
            key: group[key] for key in ("lr", "weight_decay", "momentum", "dampening", "eps") if key in group
        }
        if "betas" in group:
            shared["beta1"], shared["beta2"] = group["betas"]
        count = len(matrix)
        columns = {key: [float(value)] * count for key, value in shared.items()}
        for dial in self._dials:
            for i, field in enumerate(dial.fields):
                if not field.is_static and field.group_index == index:
                    columns[field.column] = [dial.value_with(rho, i) for rho in self._rows[dial.name][:count]]
        may_be_numbers = matrix.dtype in (torch.float32, torch.float64)
        return {
            key: values[0]
            if may_be_numbers and len(set(values)) == 1
            else torch.tensor(values, dtype=self._loss_sums.dtype, device=matrix.device).unsqueeze(1)
            for key, values in columns.items()
        }

    @property
    def num_distinct(self) -> int:
        """How many rows are kept up to date: the first one stands for all while they are equal."""
        return 1 if self._joins_equal and not self.rows_differ else self.replicas.count

    def replicas_have_parted(self) -> None:
        """They start from different points: average them at the next sync, whatever is explored."""
        self.rows_differ = self._has_moved = True

    def replicas_are_joined(self) -> None:
        """They have been given one state."""
        self.rows_differ = self.is_scouting or self._explores or self._has_local_gradients

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
        self._forget_losses()
        super().restart_at(num_steps, narrow=narrow)

    # --- the anchored controller: on the mean of the replicas ------------------------------------------

    def _weights_by_group(self) -> list[list[Tensor]]:
        return [[_mean(matrix[: self.num_distinct])] for matrix in self._stack.matrices]

    def before_update(self, gradients: Sequence[Tensor]) -> None:
        """Before the replicas' step: what the anchored controller reads of it."""
        if self._anchor is not None and self._anchor.is_measuring:
            self._anchor.add_signal([[_mean(gradient)] for gradient in gradients])

    def _decay_terms(self) -> list[list[Tensor | None]]:
        terms = []
        for group, weights, moments in zip(
            self.optimizer.param_groups, self._weights_by_group(), self._virtual_moments, strict=True
        ):
            second = moments.get("exp_avg_sq")
            second = None if second is None else second.mean(dim=0)
            terms.append(decay_terms(group, weights, [second], max(1, self.num_updates), self.optimizer))
        return terms

    def _own_multiplier(self, dial: Dial) -> float:
        return 1.0  # the optimizer holds the base

    # --- the scout: all replicas at once ---------------------------------------------------------------

    def _trial_factor(self, scouting: Scouting) -> float:
        self._rows |= {dial.name: scouting.factors for dial in scouting.dials}
        return 1.0  # the optimizer holds the shared part

    def _trial_scores(self) -> list[float | None]:
        if self._score is not None:
            self._score_all()
            scores = self._scores
        else:
            means = [losses.mean for losses in self._take_all_losses()]
            scores = [math.nan if mean is None else mean for mean in means]
        are_finite = self._are_healthy()
        return [s if ok and math.isfinite(s) else None for s, ok in zip(scores, are_finite, strict=True)]

    def _take_snapshot(self, scout: Scout, saved: dict[str, Any] | None) -> None:
        self._generator_state = torch.random.get_rng_state() if saved is None else saved["generator"]

    def _snapshot_state(self) -> dict[str, Any]:
        return {"generator": self._generator_state}

    def _keep_lead(self, leader: int) -> None:
        self._lead = [rows[leader].to("cpu", copy=True) for rows in self._stack.tensors()]

    def _put_lead(self) -> None:
        for rows, lead in zip(self._stack.tensors(), self._lead, strict=True):
            rows.copy_(lead.expand_as(rows))

    def _forget_losses(self) -> None:
        self._losses.clear()
        self._loss_sums.zero_()

    def _restore_snapshot(self) -> None:
        # The user's model is written at syncs only: it still holds the initial weights.
        self._stack.read_template()
        for moments in self._virtual_moments:
            moments.clear()
        self.num_updates = 0
        torch.random.set_rng_state(self._generator_state)

    def _set_local_gradients(self, is_local: bool) -> None:
        self.rows_differ = is_local or self._explores or self._has_local_gradients

    @property
    def _num_joined_batches(self) -> int:
        return 1 if self._has_local_gradients else self.replicas.count

    # --- a round -------------------------------------------------------------------------------------

    def take_losses(self, losses: Tensor) -> None:
        """Take one loss per replica, on the device."""
        self._losses.append(losses)
        if len(self._losses) == 64:  # many at once: each operation costs more than its arithmetic
            self._add_losses()

    def _add_losses(self) -> None:
        losses = torch.stack(self._losses).to(self._loss_sums)
        finite = torch.isfinite(losses)
        rows = torch.stack([torch.where(finite, losses, 0.0), finite.to(losses), (~finite).to(losses)])
        self._loss_sums += rows.sum(dim=1)
        self._losses.clear()

    @property
    def _has_others(self) -> bool:
        return self.replicas.count > 1

    def _score_all(self) -> float:
        """What the engine calls as its probe: it keeps every row's score, and the number is not used."""
        assert self._score is not None
        try:
            scores = self._stack.scores(self._score, self.put_static_values_of, self.num_distinct)
            self._scores = scores * (self.replicas.count // len(scores))
        finally:
            self.put_static_bases()
        return 0.0

    def _take_all_losses(self) -> list[LossSum]:
        if self._losses:
            self._add_losses()
        taken = [LossSum(*column) for column in self._loss_sums.t().tolist()]
        self._forget_losses()
        return taken

    def _exchange_signals(self, signals: list[float]) -> list[list[float]]:
        self._measure.put(self._take_all_losses())
        return [signals]

    @property
    def _uses_probe(self) -> bool:
        return self.rows_differ or super()._uses_probe

    def _exchange(self, probe_loss: float | None) -> dict[int, str]:
        return self._measure.take(
            self.num_steps,
            losses=self._take_all_losses(),
            are_healthy=self._are_healthy(),
            probes=None if probe_loss is None else self._scores,
        )

    def _tail_parameters(self) -> list[Tensor]:
        num_rows = self.num_distinct
        if self._tail is not None:
            self._tail.fit_rows(num_rows)
        return [matrix[:num_rows] for matrix in self._stack.matrices]

    def _put_tail(self) -> int:
        num_taken = super()._put_tail()
        if num_taken:
            self._stack.write_template(0)
        return num_taken

    def _are_healthy(self) -> list[bool]:
        healthy = self._stack.are_finite(self.num_distinct)
        return healthy * (self.replicas.count // len(healthy))

    def _converge(self, excluded: dict[int, str]) -> None:
        if self.rows_differ:
            included = [r for r in range(self.replicas.count) if r not in excluded]
            averages_moments = self._averages_moments or self._has_local_gradients
            kept = [m for moments in self._virtual_moments for m in moments.values() if averages_moments]
            if self._tail is not None and self._tail.num_taken:
                self._tail.fit_rows(self.num_distinct)
                kept += self._tail.mean
            self._stack.average_(included, kept)
        else:
            self._stack.write_template(0)
        self.rows_differ = self._explores or self._has_local_gradients
        self._converged_at, self._has_moved = self.num_steps, False


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(dim=0) if len(rows) > 1 else rows[0]
