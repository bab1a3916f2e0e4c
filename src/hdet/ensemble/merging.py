"""LocalMerge: converge where each replica has its own gradients. A merge rule at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hdet.checks import check_keys
from hdet.ensemble.sync import Converge, Sync
from hdet.errors import HdetError
from hdet.method.merges import AtSync, Merge
from hdet.replicas.saved import check_weights
from hdet.replicas.tensors import fitting


@dataclass(eq=False)
class LocalMerge(Converge):
    """Lets replicas take from each other at syncs, and tells who shares gradients when."""

    rule: Merge
    keeps_moments: bool
    """Tells if each replica keeps its optimizer's moments at a sync."""
    total_steps: int | None
    """Length of the run, if it is known."""

    def __post_init__(self) -> None:
        self._local_from = self.rule.local_from(self.total_steps)
        self._copies: dict[str, list[Tensor]] = {}

    def begin(self, num_steps: int, *, begins_equal: bool) -> None:
        """Begin, or begin again, with the weights that replicas have now.

        Args:
            num_steps: optimizer steps so far.
            begins_equal: whether all hold the same weights. If not, this is collective.
        """
        self.step_made(num_steps, begins=True)
        self._copies = {}  # give their memory back first
        for name in self.rule.copies:
            self._copies[name] = copies = [
                p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                for p in self.replicas.weights()
            ]
            if name == "velocity":
                for velocity in copies:
                    velocity.zero_()
            elif not begins_equal:
                self.replicas.average_tensors(copies, ())

    def step_made(self, num_steps: int, *, begins: bool = False) -> None:
        """Keep gradients local from a certain step on. Called after every optimizer step."""
        if begins or num_steps == self._local_from:
            self.is_local = num_steps >= self._local_from
            self.replicas.share_gradients(not self.is_local)

    @torch.no_grad()
    def merge(self, sync: Sync, like_weights: Sequence[Tensor]) -> None:
        """Let replicas take from each other what the rule says. Collective."""
        if not self.is_local:
            super().merge(sync, like_weights)
            return
        record, replicas, rule = sync.record, self.replicas, self.rule
        shares, excluded = self._shares(sync), record.excluded
        is_apart = rule.stays_apart and not sync.joins
        sync.leaves_equal = not (rule.stays_apart or self.keeps_moments)
        sync.has_merged = rule.merges_at_syncs or not is_apart
        average = partial(replicas.average_tensors, excluded=excluded, weights=shares)
        at = AtSync(replicas.weights(), self._copies, average, replicas.count)
        rule.approach(at, joins=not is_apart)
        if is_apart:
            if excluded:
                donor = min({*range(replicas.count)} - set(excluded))
                replicas.copy(donor, excluded, like_weights=like_weights)
            replicas.weights_written()
            return
        replicas.average(excluded, like_weights=like_weights, weights=shares)
        if rule.put(at, ends_round=record.ends_round):
            replicas.weights_written()
        if self.keeps_moments and not record.ends_round:  # one replica's checkpoint shall be everybody's
            replicas.copy(0, range(1, replicas.count))

    def _shares(self, sync: Sync) -> list[float] | None:
        """Find the share of every replica; None for equal shares of those that are not left out."""
        rule, record = self.rule, sync.record
        included = [r for r in range(self.replicas.count) if r not in record.excluded]
        norms = [report.gradient_norm for report in sync.reports]
        known: list[list[float]] = []
        pass_it = "pass it, step(loss), or observe(loss) for each micro-batch"
        for is_used, numbers, what, remedy in (
            (rule.compares_losses, sync.scores, "a loss", pass_it),
            (rule.compares_gradients, norms, "a gradient", "train every replica"),
        ):
            found = [number for r in included if is_used and (number := numbers[r]) is not None]
            known.append(found)
            if is_used and len(found) < len(included):
                if not record.ends_round and not found:  # nothing was trained since the last sync
                    return None
                raise HdetError(
                    f"{type(rule).__name__} needs {what} of every replica, but at step {record.step} some "
                    f"had none: {remedy}"
                )
        shares = rule.weights(*known)
        if shares is not None:
            record.merge_weights = [0.0] * self.replicas.count
            for r, share in zip(included, shares, strict=True):
                record.merge_weights[r] = share
        return None if shares is None else record.merge_weights

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """Save what the rule remembers; None for a rule that remembers nothing."""
        if not self.rule.has_state:
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
