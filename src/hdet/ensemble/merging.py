"""Merging: a merge rule at work, and who shares gradients when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hdet.ensemble.state import check_keys, check_weights
from hdet.errors import HdetError
from hdet.method.merges import (
    ElasticMerge,
    GradientNormMerge,
    LateMerge,
    Merge,
    OuterMerge,
    elastic_step,
    outer_step,
)
from hdet.records import RoundRecord
from hdet.replicas import Replicas
from hdet.replicas.shards import local_part


class Merging:
    """What replicas take from each other at syncs.

    Args:
        rule: of the merge.
        replicas: who takes part.
        has_local_gradients: whether replicas train with their own gradients.
        keeps_moments: whether each replica keeps its optimizer's moments at a sync.
        total_steps: length of the run, if it is known.
    """

    def __init__(
        self,
        rule: Merge,
        replicas: Replicas,
        *,
        has_local_gradients: bool,
        keeps_moments: bool,
        total_steps: int | None,
    ) -> None:
        self._rule, self._replicas, self._keeps_moments = rule, replicas, keeps_moments
        self._local_from: int | None = 0 if has_local_gradients else None
        if isinstance(rule, LateMerge):
            assert total_steps is not None, "checked when the ensemble was built"
            self._local_from = max(1, round(rule.start * total_steps))
        self.is_local = False
        """Whether replicas train with their own gradients now."""
        self._copies: dict[str, list[Tensor]] = {}

    # --- beginning -----------------------------------------------------------------------------------

    def begin(self, num_steps: int, *, begins_equal: bool) -> None:
        """The run begins, or begins again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
            begins_equal: whether all hold the same weights. If not, this is collective.
        """
        self.step_made(num_steps, begins=True)
        names = {ElasticMerge: ["center"], OuterMerge: ["anchor", "velocity"], GradientNormMerge: ["center"]}
        self._copies = {}  # give their memory back first
        for name in names.get(type(self._rule), []):
            self._copies[name] = [
                p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                for p in self._replicas.weights()
            ]
            if name == "velocity":
                for velocity in self._copies[name]:
                    velocity.zero_()
            elif not begins_equal:
                self._replicas.average_tensors(self._copies[name], ())

    def step_made(self, num_steps: int, *, begins: bool = False) -> None:
        """After an optimizer step: keep gradients local from a certain step on."""
        if begins or num_steps == self._local_from:
            self.is_local = self._local_from is not None and num_steps >= self._local_from
            self._replicas.share_gradients(not self.is_local)

    # --- a sync --------------------------------------------------------------------------------------

    @property
    def leaves_equal(self) -> bool:
        """Whether a sync leaves nothing that differs between replicas, so that one speaks for all."""
        return not self.is_local or not (self._rule.stays_apart or self._keeps_moments)

    @property
    def parts_replicas(self) -> bool:
        """Whether replicas part in this run, now or later, because gradients are local."""
        return self._local_from is not None

    @property
    def measures_gradients(self) -> bool:
        """Whether the norm of the last gradient must be known at a sync."""
        return self._rule.compares_gradients

    @torch.no_grad()
    def merge(
        self,
        record: RoundRecord,
        scores: Sequence[float | None],
        norms: Sequence[float | None],
        *,
        joins: bool,
        like_weights: Sequence[Tensor],
    ) -> bool:
        """Let replicas take from each other what the rule says; whether they did. Collective.

        Args:
            record: of this sync; it names who is left out.
            scores: a loss of every replica.
            norms: of every replica's last gradient.
            joins: leave all replicas with the same weights: before a save, and at the end of the run.
            like_weights: tensors laid out as the weights that are averaged with them.
        """
        excluded = record.excluded
        if not self.is_local:
            differ = self._replicas.differ
            self._replicas.average(excluded, like_weights=like_weights)
            return differ
        weights = self._weights(record, scores, norms)
        apart = self._rule.stays_apart and not joins
        if isinstance(self._rule, ElasticMerge):
            self._pull_elastic(excluded)
        elif isinstance(self._rule, GradientNormMerge) and apart:
            self._pull(excluded, weights)
        if apart:
            if excluded:
                donor = min({*range(self._replicas.count)} - set(excluded))
                self._replicas.copy(donor, excluded, like_weights=like_weights)
            self._replicas.weights_written()
            return not isinstance(self._rule, LateMerge)
        self._replicas.average(excluded, like_weights=like_weights, weights=weights)
        if isinstance(self._rule, ElasticMerge):
            self._put(self._copies["center"])
        elif isinstance(self._rule, OuterMerge) and record.ends_round:
            self._step_outer(self._rule)
        if self._keeps_moments and not record.ends_round:  # one replica's checkpoint shall be everybody's
            self._replicas.copy(0, range(1, self._replicas.count))
        return True

    def _weights(
        self, record: RoundRecord, scores: Sequence[float | None], norms: Sequence[float | None]
    ) -> list[float] | None:
        """The share of every replica; None for equal shares of those that are not left out."""
        rule, included = self._rule, [r for r in range(self._replicas.count) if r not in record.excluded]
        known: list[list[float]] = []
        for is_used, numbers in ((rule.compares_losses, scores), (rule.compares_gradients, norms)):
            found = [number for r in included if is_used and (number := numbers[r]) is not None]
            known.append(found)
            if is_used and len(found) < len(included):
                if not record.ends_round and not found:  # nothing was trained since the last sync
                    return None
                what, remedy = "a gradient", "train every replica"
                if numbers is scores:
                    what, remedy = "a loss", "pass it, step(loss), or observe(loss) for each micro-batch"
                raise HdetError(
                    f"{type(rule).__name__} needs {what} of every replica, but at step {record.step} some "
                    f"had none: {remedy}"
                )
        shares = rule.weights(*known)
        if shares is None:
            return None
        weights = [0.0] * self._replicas.count
        for r, share in zip(included, shares, strict=True):
            weights[r] = share
        record.merge_weights = weights
        return weights

    def _pull_elastic(self, excluded: Mapping[int, str]) -> None:
        assert isinstance(self._rule, ElasticMerge)
        centers = self._copies["center"]
        for weight, center in zip(self._replicas.weights(), centers, strict=True):
            pulled, vote = elastic_step(
                weight.detach().to(center.dtype),
                center,
                strength=self._rule.strength,
                num_replicas=self._replicas.count,
            )
            weight.copy_(pulled)
            center.copy_(vote)
        self._replicas.average_tensors(centers, excluded)
        self._replicas.weights_written()

    def _pull(self, excluded: Mapping[int, str], weights: Sequence[float] | None) -> None:
        assert isinstance(self._rule, GradientNormMerge)
        here, centers = self._replicas.weights(), self._copies["center"]
        for center, weight in zip(centers, here, strict=True):
            center.copy_(weight)
        self._replicas.average_tensors(centers, excluded, weights=weights)
        for weight, center in zip(here, centers, strict=True):
            weight.lerp_(center.to(weight.dtype), self._rule.pull)
        self._replicas.weights_written()

    def _step_outer(self, rule: OuterMerge) -> None:
        anchors = self._copies["anchor"]
        for mean, anchor, velocity in zip(
            self._replicas.weights(), anchors, self._copies["velocity"], strict=True
        ):
            moved = outer_step(
                anchor, mean.detach().to(anchor.dtype), velocity, lr=rule.lr, momentum=rule.momentum
            )
            anchor.copy_(moved[0])
            velocity.copy_(moved[1])
        self._put(anchors)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for weight, tensor in zip(self._replicas.weights(), tensors, strict=True):
            weight.copy_(tensor)
        self._replicas.weights_written()

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None for a rule that remembers nothing."""
        if not self._rule.has_state:
            return None
        copies = {name: self._replicas.as_saved(tensors) for name, tensors in self._copies.items()}
        return {"rule": type(self._rule).__name__, **copies}

    def check_state(self, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this. Any rule goes on where there was none."""
        if state is None:
            return
        check_keys("state_dict merge", state, ("rule",))
        if state["rule"] != type(self._rule).__name__:
            raise ValueError(
                f"state_dict must be of a run with {type(self._rule).__name__}, got {state['rule']!r}: build "
                "the ensemble with the merge rule that it was saved with"
            )
        check_keys("state_dict merge", state, tuple(self._copies))
        for name in self._copies:
            check_weights(f"state_dict merge {name}", state[name], self._replicas)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a checkpoint, also one of another number of replicas. It is called after :meth:`begin`."""
        if state is None:
            return
        for name, tensors in self._copies.items():
            for tensor, whole in zip(tensors, state[name], strict=True):
                saved = local_part(whole)
                tensor.copy_(saved if saved.shape == tensor.shape else saved[:1].expand_as(tensor))
