"""Tail: the mean over time of the parameters of a run's last steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hdet.checks import check_counts, check_keys
from hdet.replicas import ReplicaGroup, Replicas
from hdet.replicas.copies import ALONE, SlicedCopy
from hdet.replicas.saved import check_weights
from hdet.replicas.tensors import fitting

_log = logging.getLogger(__name__)


class TailMean:
    """The mean so far, in float32 where the parameters have fewer bits.

    Its memory is there from the start: a run shall not fail for want of it near its end.

    Args:
        parameters: what is averaged; nothing is taken yet.
        group: replicas that hold the same parameters, and a part of the mean each.
    """

    def __init__(self, parameters: Sequence[Tensor], group: ReplicaGroup = ALONE) -> None:
        self._copy = SlicedCopy(parameters, group, is_zero=True, widens=True)
        self.is_whole = self._copy.is_whole
        """Tells if all of it is in this process."""
        self._shapes = [p.shape for p in parameters]
        self.num_taken = 0
        self.first_step = 0
        """The step that was taken first."""

    @property
    def mean(self) -> list[Tensor]:
        """Give the mean itself, laid out as the parameters; flat parts where it is split over replicas."""
        return self._copy.shaped() if self.is_whole else self._copy.parts

    def take(self, parameters: Sequence[Tensor], step: int) -> None:
        """Move the mean towards the parameters, after a step of the tail."""
        self.fit(parameters)
        self.num_taken += 1
        if self.num_taken == 1:
            self.first_step = step
            self._copy.take(parameters)  # whatever was there: it may not be finite
        else:
            self._copy.lerp(parameters, 1 / self.num_taken)

    def put(self, parameters: Sequence[Tensor]) -> None:
        """Give the parameters the mean, after the last step. Collective where it is split."""
        self.fit(parameters)
        self._copy.put(parameters, "the end of the tail")

    def begin_again(self, parameters: Sequence[Tensor]) -> None:
        """Take the parameters for all that was taken, in this replica's part."""
        self._copy.take(parameters)

    def fit(self, parameters: Sequence[Tensor]) -> None:
        """Keep, or repeat, the first row, where replicas that share this process have joined or parted."""
        if parameters and parameters[0].shape != self._shapes[0]:  # they all have as many rows
            rows = [mean[:1].expand_as(p) for mean, p in zip(self.mean, parameters, strict=True)]
            self._copy = SlicedCopy(rows)
            self._shapes = [p.shape for p in parameters]

    def has_room_for(self, parameters: Sequence[Tensor]) -> bool:
        """Tell if the parameters can lie in its place: all of it is here, in their precision."""
        return self.is_whole and all(m.dtype == p.dtype for m, p in zip(self.mean, parameters, strict=True))

    def whole(self) -> list[Tensor]:
        """Gather the mean, laid out as the parameters, in host memory. Collective where it is split."""
        return self._copy.whole("a save within the tail")

    def state_dict(self) -> dict[str, Any]:
        """Save what is the same on every replica after converging; the mean itself is saved by others."""
        return {"num_taken": self.num_taken, "first_step": self.first_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint, also one of another number of virtual replicas: all have one mean."""
        self._copy.take(fitting(state["mean"], self._shapes))
        self.num_taken = state["num_taken"]
        self.first_step = state["first_step"]


class Tail:
    """The tail of a run: takes the weights of its last steps, and puts their mean in place at the end.

    While replicas are equal and syncs see to it, each keeps a part of the mean. A replica that a sync finds
    spoilt may have taken bad weights since the sync before: its part then begins again with the weights that
    it was given.

    Args:
        replicas: whose weights they are.
        steps: after which the weights are taken; empty for no tail.
    """

    def __init__(self, replicas: Replicas, steps: range) -> None:
        self._replicas = replicas
        self.steps = steps
        self._mean: TailMean | None = None
        self._whole: list[Tensor] | None = None  # for a checkpoint, until the next step

    def begin(self, *, is_checked: bool) -> None:
        """Begin the run, or begin it again.

        Args:
            is_checked: whether syncs see to it that equal replicas stay equal.
        """
        self._mean = None  # give its memory back first
        self._whole = None
        if self.steps:
            group = self._replicas.equal_group() if is_checked else ALONE
            self._mean = TailMean(self._replicas.weights(), group)

    def step_made(self, num_steps: int) -> None:
        """Take the weights, after an optimizer step of the tail."""
        self._whole = None
        if self._mean is None:
            return
        # Parts of replicas that differ, after a warm start, do not fit together. A sync makes them equal.
        if self._mean.is_whole or not self._replicas.differ:
            self._mean.take(self._replicas.weights(), num_steps)

    def replicas_healed(self, healed: Collection[int], num_steps: int) -> None:
        """Begin again the parts of replicas that were spoilt, and now hold what the others do."""
        mean = self._mean
        if not healed or mean is None or mean.is_whole or not mean.num_taken:
            return
        self._whole = None
        if self._replicas.index in healed:
            mean.begin_again(self._replicas.weights())
        if self._replicas.is_writer:
            _log.warning(
                "step %d: of the mean of the tail, the part of replica %s begins again",
                num_steps,
                ", ".join(map(str, sorted(healed))),
            )

    def forget(self) -> None:
        """Drop what was taken: the run has gone back."""
        self._whole = None
        if self._mean is not None:
            self._mean.num_taken = 0

    def hold_whole(self) -> None:
        """Gather the mean for a checkpoint, until the next step. Collective where it is split."""
        mean = self._mean
        if mean is not None and not mean.is_whole and mean.num_taken and self._whole is None:
            self._whole = mean.whole()

    @property
    def is_planned(self) -> bool:
        """Tell if there is a mean, or is to be one."""
        return self._mean is not None

    @property
    def is_in_parts(self) -> bool:
        """Tell if a checkpoint now could not hold the mean, because :meth:`hold_whole` was not called."""
        mean = self._mean
        return mean is not None and not mean.is_whole and mean.num_taken > 0 and self._whole is None

    @property
    def num_taken(self) -> int:
        """Count the steps that the mean is of."""
        return 0 if self._mean is None else self._mean.num_taken

    def averaged(self) -> list[Tensor]:
        """Give the tensors that replicas average along with their parameters."""
        if self._mean is None or not self._mean.is_whole or not self._mean.num_taken:
            return []
        self._mean.fit(self._replicas.weights())
        return self._mean.mean

    @contextmanager
    def in_place(self, *, is_only_scored: bool = False) -> Iterator[None]:
        """Put the mean so far, if there is one, in place of the weights. Collective where it is split.

        Args:
            is_only_scored: by the probe. An optimizer then need not refresh its own copies of the weights,
                and where all of the mean is here, both change places, so that nothing is copied.
        """
        mean = self._mean
        is_silent = is_only_scored and not self._replicas.has_rows  # rows are scored in the user's model
        written = (lambda: None) if is_silent else self._replicas.weights_written
        if mean is None or not mean.num_taken:
            yield
            return
        weights = self._replicas.weights()
        mean.fit(weights)
        swaps = is_only_scored and mean.has_room_for(weights)
        last = mean.mean if swaps else [w.detach().clone() for w in weights]
        try:
            if swaps:
                _swap(weights, last)
            else:
                mean.put(weights)
            written()
            yield
        finally:
            if swaps:
                _swap(weights, last)
            else:
                with torch.no_grad():
                    for w, kept in zip(weights, last, strict=True):
                        w.copy_(kept)
            written()

    def finish(self, num_steps: int) -> int:
        """Put the mean in place, and return the number of steps that it is of."""
        mean = self._mean
        self._mean = None
        self._whole = None
        if mean is None or not mean.num_taken:
            return 0
        is_finite = self._replicas.all_finite(mean.mean)
        if not mean.is_whole:  # else it is so on every replica alike: they have converged
            is_finite = not self._replicas.any(not is_finite)
        if not is_finite:
            _log.warning("step %d: the mean of the tail is not finite, the last weights stay", num_steps)
            return 0
        mean.put(self._replicas.weights())
        self._replicas.weights_written()
        return mean.num_taken

    def state_dict(self) -> dict[str, Any] | None:
        """Save the mean; None before the first step of the tail."""
        mean = self._mean
        is_there = mean is not None and mean.num_taken > 0 and not self.is_in_parts
        if not is_there and not (self._replicas.is_sharded and self.steps):
            return None
        if mean is None or not is_there:  # so that a distributed checkpoint has entries to load into
            weights = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in self._replicas.weights()]
            return {"mean": self._replicas.as_saved(weights), **TailMean([]).state_dict()}
        if self._whole is not None:  # nothing will change it: it need not be copied again
            return {"mean": self._replicas.as_saved(self._whole, copies=False), **mean.state_dict()}
        return {"mean": self._replicas.as_saved(mean.mean), **mean.state_dict()}

    def check_state(self, name: str, state: Any) -> None:
        """Raise if :meth:`load_state_dict` could not load this; ``name`` begins the error."""
        if state is not None:
            check_keys(name, state, ("mean", "num_taken", "first_step"))
            check_counts(name, state, ("num_taken", "first_step"))
            if self.steps:
                check_weights(f"{name} mean", state["mean"], self._replicas)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Load a checkpoint, unless it is of a run that would have ended sooner."""
        if self._mean is not None and state is not None and state["first_step"] >= self.steps[0]:
            self._mean.load_state_dict(state)


@torch.no_grad()
def _swap(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Let tensors change their contents, one pair after the other."""
    for one, other in zip(some, others, strict=True):
        kept = one.detach().clone()
        one.copy_(other)
        other.copy_(kept)
