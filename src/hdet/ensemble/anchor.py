"""Anchor: where the run began and where it has been on average, for the anchored controller."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from hdet.replicas import widest_float

__all__ = ["Anchor", "decay_terms"]

_T = TypeVar("_T")


class Anchor:
    """Two copies of the weights, the start x0 and the running average E, and the signal that adds up.

    Args:
        groups: the parameters, by group of the optimizer.
        on_cpu: keep the copies in host memory.
        in_bfloat16: keep the copies in bfloat16. E is rounded at random, so that small moves are not lost.
    """

    def __init__(
        self, groups: Sequence[Sequence[Tensor]], *, on_cpu: bool = False, in_bfloat16: bool = False
    ) -> None:
        device = torch.device("cpu") if on_cpu else None
        dtype = torch.bfloat16 if in_bfloat16 else None
        self.start = [
            [p.detach().to(device or p.device, dtype or p.dtype, copy=True) for p in group]
            for group in groups
        ]
        """x0."""
        self.average = [[x.clone() for x in group] for group in self.start]
        """E."""
        where = self.start[0][0].device
        num_tensors = sum(map(len, groups))
        self.sums = torch.zeros(num_tensors, dtype=widest_float(where), device=where)
        """Of the signal, by tensor."""
        self.num_summed = 0
        """Steps that the sums are of."""
        self._rounding = torch.Generator(where).manual_seed(0) if in_bfloat16 else None

    @torch.no_grad()
    def add_signal(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Before a step: add <g, E - x0>, on the device, with the gradients the optimizer is about to use."""
        ahead, behind, seen = [], [], []
        tensors = zip(_flat(gradients), _flat(self.average), _flat(self.start), strict=True)
        for place, (g, e, x0) in enumerate(tensors):
            if g is not None:
                if g.dtype != e.dtype or g.device != e.device:
                    g = g.to(e.device)
                    e, x0 = e.to(g.dtype), x0.to(g.dtype)
                if g.dim() != 1:
                    g, e, x0 = g.reshape(-1), e.reshape(-1), x0.reshape(-1)
                ahead.append(torch.dot(g, e))
                behind.append(torch.dot(g, x0))
                seen.append(place)
        if ahead:  # few operations for many tensors: a small one costs its call
            dots = ahead + behind
            if len({dot.dtype for dot in dots}) > 1 or len({dot.device for dot in dots}) > 1:
                dots = [dot.to(self.sums) for dot in dots]
            with_e, with_x0 = torch.stack(dots).to(self.sums).view(2, -1)
            added = with_e - with_x0
            if len(seen) == len(self.sums):
                self.sums += added
            else:
                self.sums[torch.tensor(seen, device=self.sums.device)] += added
        self.num_summed += 1

    @torch.no_grad()
    def add_weights(self, groups: Sequence[Sequence[Tensor]], weight: float) -> None:
        """After a step: move E towards the weights, by this share of the way."""
        average = list(_flat(self.average))
        here = [p.detach().to(e.device) for p, e in zip(_flat(groups), average, strict=True)]
        if self._rounding is None:
            torch._foreach_lerp_(average, here, weight)  # pyright: ignore[reportPrivateImportUsage]
        else:
            for x, e in zip(here, average, strict=True):
                e.copy_(_rounded_at_random(e.float().lerp_(x.float(), weight), self._rounding))

    @torch.no_grad()
    def add_decay(self, terms: Sequence[Sequence[Tensor | None]]) -> None:
        """At a control time: add what weight decay adds to the gradients, <d, E - x0>.

        It changes slowly, so that once stands for all steps since the last control time.

        Args:
            terms: see :func:`decay_terms`.
        """
        tensors = zip(_flat(terms), _flat(self.average), _flat(self.start), strict=True)
        for place, (term, e, x0) in enumerate(tensors):
            if term is not None:
                inner = torch.sum(term.to(e.device) * (e - x0))
                self.sums[place] += self.num_summed * inner.to(self.sums)

    @torch.no_grad()
    def heal(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """After a replica was left out: where E is not finite, it begins again with the weights."""
        for p, e in zip(_flat(groups), _flat(self.average), strict=True):
            if not torch.isfinite(e).all():
                e.copy_(p)
        self.sums.nan_to_num_(0.0, 0.0, 0.0)

    def means(self) -> list[float]:
        """The mean signal of each tensor since the sums were cleared; waits for the device."""
        return [total / max(1, self.num_summed) for total in self.sums.tolist()]

    def clear_sums(self) -> None:
        """Begin to add up anew."""
        self.sums.zero_()
        self.num_summed = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and numbers."""
        return {
            "start": [[x.cpu().clone() for x in group] for group in self.start],
            "average": [[x.cpu().clone() for x in group] for group in self.average],
            "sums": self.sums.tolist(),
            "num_summed": self.num_summed,
            "rounding": None if self._rounding is None else self._rounding.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint."""
        for mine, saved in ((self.start, state["start"]), (self.average, state["average"])):
            for group, saved_group in zip(mine, saved, strict=True):
                for i, value in enumerate(saved_group):
                    group[i] = value.to(group[i].device, group[i].dtype, copy=True)
        self.sums.zero_()
        if len(state["sums"]) == len(self.sums):
            self.sums.copy_(torch.tensor(state["sums"], dtype=self.sums.dtype))
        self.num_summed = state["num_summed"]
        if self._rounding is not None and state["rounding"] is not None:
            self._rounding.set_state(state["rounding"].cpu())


def _flat(groups: Sequence[Sequence[_T]]) -> Iterator[_T]:
    return itertools.chain.from_iterable(groups)


def _rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """In bfloat16, the upper half of a float32: up or down by chance, right on average."""
    noise = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.view(torch.int32) + noise).bitwise_and_(-(2**16))
    rounded = torch.where(values.isfinite(), bits.view(torch.float32), values)
    return rounded.to(torch.bfloat16)


def decay_terms(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    second_moments: Sequence[Tensor | None],
    num_steps: int,
    optimizer: Optimizer,
) -> list[Tensor | None]:
    """What weight decay adds to the gradients of what is really minimised, by parameter.

    Coupled decay adds ``decay * x``. Decoupled decay (AdamW) shrinks x beside a step that is divided by the
    root of the second moment, so it counts ``decay * sqrt(second moment) * x``.
    """
    decay = group.get("weight_decay", 0)
    if not decay:
        return [None] * len(parameters)
    if not group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)):
        return [decay * x.detach() for x in parameters]
    correction = 1 - group["betas"][1] ** num_steps
    return [
        None if moment is None else decay * (moment / correction).sqrt() * x.detach()
        for x, moment in zip(parameters, second_moments, strict=True)
    ]
