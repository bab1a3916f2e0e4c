"""Merging: a merge rule at work, where each replica has its own gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdet.checks import check_keys
from hdet.errors import HdetError
from hdet.method.merges import AtSync, Merge
from hdet.replicas import Replicas
from hdet.replicas.saved import check_weights
from hdet.replicas.tensors import fitting

if TYPE_CHECKING:
    from hdet.ensemble.sync import Sync


@dataclass(eq=False)
class Merging:
    """Lets replicas take from each other what a merge rule says, and saves what it remembers."""

    replicas: Replicas
    rule: Merge
    is_local: bool
    """Tells if replicas train with their own gradients. If not, the rule has nothing to do."""
    keeps_moments: bool
    """Tells if each replica keeps its optimizer's moments at a sync."""

    def begin(self, *, begins_equal: bool) -> None:
        """Begin, or begin again, with the weights that replicas have now. Collective if they differ."""
        if self.is_local:
            self.replicas.share_gradients(False)
        self._copies: dict[str, list[Tensor]] = {}  # give their memory back first
        for name, factor in self.rule.copies.items():
            self._copies[name] = copies = [
                p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).mul_(factor)
                for p in self.replicas.weights()
            ]
            if not begins_equal:
                self.replicas.average_tensors(copies, ())

    @torch.no_grad()
    def merge(self, sync: Sync, like_weights: Sequence[Tensor]) -> None:
        """Let the rule change the weights, and average tensors that are laid out like them. Collective."""
        record, replicas, rule = sync.record, self.replicas, self.rule
        shares, excluded, has_joined = self._shares(sync), record.excluded, False

        def join() -> None:
            nonlocal has_joined
            has_joined = sync.has_merged = True
            replicas.average(excluded, like_weights=like_weights, weights=shares)

        def average(tensors: Sequence[Tensor]) -> None:
            sync.has_merged = True
            replicas.average_tensors(tensors, excluded, weights=shares)

        joins = sync.joins or not rule.stays_apart
        weights = replicas.weights()
        rule.merge(AtSync(weights, self._copies, replicas.count, record.ends_round, joins, join, average))
        if joins and not has_joined:
            join()
        if excluded and not has_joined:
            donor = min({*range(replicas.count)} - set(excluded))
            replicas.copy(donor, excluded, like_weights=like_weights)
        replicas.weights_written()
        if has_joined and self.keeps_moments and not record.ends_round:
            replicas.copy(0, range(1, replicas.count))  # one replica's checkpoint shall be everybody's
        sync.leaves_equal = not (rule.stays_apart or self.keeps_moments)

    def _shares(self, sync: Sync) -> list[float] | None:
        """Find the share of every replica; None for equal shares of those that are not left out."""
        rule, record = self.rule, sync.record
        if not rule.compares_losses:
            return None
        included = [r for r in range(self.replicas.count) if r not in record.excluded]
        losses = [loss for r in included if (loss := sync.scores[r]) is not None]
        if not losses and not record.ends_round:  # nothing was trained since the last sync
            return None
        if len(losses) < len(included):
            raise HdetError(
                f"{type(rule).__name__} needs a loss of every replica, but at step {record.step} some had "
                "none: pass it, step(loss), or observe(loss) for each micro-batch"
            )
        record.merge_weights = [0.0] * self.replicas.count
        for r, share in zip(included, rule.shares(losses), strict=True):
            record.merge_weights[r] = share
        return record.merge_weights

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Save what the rule remembers; None for a rule that remembers nothing."""
        if not self._copies:
            return None
        copies = {name: self.replicas.as_saved(tensors) for name, tensors in self._copies.items()}
        return {"rule": type(self.rule).__name__, **copies}

    def check_state(self, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this. Any rule goes on where there was none."""
        if state is None:
            return
        check_keys("state_dict merge", state, ("rule",))
        if state["rule"] != type(self.rule).__name__:
            raise ValueError(
                f"state_dict must be of a run with {type(self.rule).__name__}, got {state['rule']!r}: build "
                "the ensemble with the merge rule that it was saved with"
            )
        check_keys("state_dict merge", state, tuple(self._copies))
        for name in self._copies:
            check_weights(f"state_dict merge {name}", state[name], self.replicas)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load a checkpoint, also one of another number of replicas. It is called after :meth:`begin`."""
        if state is None:
            return
        for name, tensors in self._copies.items():
            for tensor, saved in zip(tensors, fitting(state[name], [t.shape for t in tensors]), strict=True):
                tensor.copy_(saved)
