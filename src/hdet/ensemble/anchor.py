"""Anchor: where the run began and where it has been on average, for the anchored controller."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from hdet.core.anchored import (
    AnchoredController,
    AnchoredState,
    LossWatch,
    anchored_update,
    averaging_weight,
    measuring_interval,
    next_control,
    slowed,
    watch_loss,
)
from hdet.replicas import widest_float

__all__ = ["Anchor", "decay_terms"]

_T = TypeVar("_T")


class Anchor:
    """The two copies of the weights, the signal that adds up between control times, and the controllers.

    Args:
        settings: of the controller.
        groups: the parameters, by group of the optimizer.
        total_steps: length of the run.
        dial_of_group: which dial of the learning rate each group belongs to.
        ceiling: upper limit of the factors, beside those of the settings.
    """

    def __init__(
        self,
        settings: AnchoredController,
        groups: Sequence[Sequence[Tensor]],
        *,
        total_steps: int,
        dial_of_group: Sequence[int],
        ceiling: float = math.inf,
    ) -> None:
        self.settings, self._total_steps, self._ceiling = settings, total_steps, ceiling
        self._num_dials = max(dial_of_group) + 1
        num_own = self._num_dials if settings.per_group and self._num_dials > 1 else 0
        self._states = [AnchoredState()] * (1 + num_own)  # of all groups together, then by dial
        self._signals = [0.0] * len(self._states)
        self.gate = ""
        """Why the corrections no longer move."""
        self.num_brakes = 0
        """How often all corrections were cut, because the training loss jumped up."""
        self._watch = LossWatch()
        self._lowest_probe, self._num_risen = math.inf, 0
        device = torch.device("cpu") if settings.copy_on_cpu else None
        dtype = torch.bfloat16 if settings.copy_in_bfloat16 else None
        self._start = [
            [p.detach().to(device or p.device, dtype or p.dtype, copy=True) for p in group]
            for group in groups
        ]
        self.average = [[x.clone() for x in group] for group in self._start]
        """E."""
        self._dial_of_tensor = [d for d, group in zip(dial_of_group, groups, strict=True) for _ in group]
        where = self._start[0][0].device
        self.sums = torch.zeros(len(self._dial_of_tensor), dtype=widest_float(where), device=where)
        """Of the signal, by tensor; replicas that differ average them too, so that one's checkpoint is
        everybody's."""
        self._rounding = None
        if settings.copy_in_bfloat16:
            self._rounding = torch.Generator(where).manual_seed(0)
        self._num_summed = 0
        self._num_steps = self._last_control = 0
        self._next_control = next_control(0, total_steps)

    @property
    def log_factors(self) -> list[float]:
        """Of each dial: the common one, or its own where that is higher."""
        common, *own = (state.log_factor for state in self._states)
        return [max(common, log_factor) for log_factor in own] or [common] * self._num_dials

    @property
    def signals(self) -> list[float]:
        """Of each dial, normalised, at the last control time."""
        common, *own = self._signals
        return own or [common] * self._num_dials

    @property
    def is_measuring(self) -> bool:
        """Whether the coming step, or the one just made and not yet counted, is one that is looked at."""
        return not self.gate and (self._num_steps - self._last_control) % self._interval == 0

    @property
    def watches_probe(self) -> bool:
        """Whether the gate looks at the probe: nobody said when data repeats, and it is still open."""
        return not self.gate and self.settings.repeats_after is None

    @property
    def _interval(self) -> int:
        return measuring_interval(self._next_control - self._last_control)

    @torch.no_grad()
    def add_signal(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Before a step: add <g, E - x0>, on the device, with the gradients the optimizer is about to use."""
        ahead, behind, seen = [], [], []
        tensors = zip(_flat(gradients), _flat(self.average), _flat(self._start), strict=True)
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
        self._num_summed += 1

    @torch.no_grad()
    def add_weights(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """After a step: move E towards the weights."""
        weight = averaging_weight(self.settings, self._num_steps + 1, self._interval)
        average = list(_flat(self.average))
        here = [p.detach().to(e.device) for p, e in zip(_flat(groups), average, strict=True)]
        if self._rounding is None:
            torch._foreach_lerp_(average, here, weight)  # pyright: ignore[reportPrivateImportUsage]
        else:
            for x, e in zip(here, average, strict=True):
                e.copy_(_rounded_at_random(e.float().lerp_(x.float(), weight), self._rounding))

    def count_step(self) -> bool:
        """Last after a step; whether a control time has come. There is none once the gate is closed."""
        self._num_steps += 1
        return not self.gate and self._num_steps >= self._next_control

    @torch.no_grad()
    def add_decay(self, terms: Sequence[Sequence[Tensor | None]]) -> None:
        """At a control time: add what weight decay adds to the gradients, <d, E - x0>.

        It changes slowly, so that once stands for all steps since the last control time.

        Args:
            terms: see :func:`decay_terms`.
        """
        tensors = zip(_flat(terms), _flat(self.average), _flat(self._start), strict=True)
        for place, (term, e, x0) in enumerate(tensors):
            if term is not None:
                inner = torch.sum(term.to(e.device) * (e - x0))
                self.sums[place] += self._num_summed * inner.to(self.sums)

    def own_signals(self) -> list[float]:
        """The mean signal since the last control time, as :meth:`control` takes it; waits for the device."""
        by_dial = [0.0] * self._num_dials
        for dial, total in zip(self._dial_of_tensor, self.sums.tolist(), strict=True):
            by_dial[dial] += total / max(1, self._num_summed)
        return [sum(by_dial), *by_dial][: len(self._states)]

    def control(self, signals: Sequence[float], loss: float | None) -> None:
        """At a control time: move the corrections.

        Args:
            signals: of all groups together, then by dial if those are followed; the same on all replicas.
            loss: mean training loss of all replicas since the last control time, if it is known.
        """
        log_time = math.log(self._num_steps / max(1, self._last_control))
        acts = self._num_steps >= self.settings.start * self._total_steps and not self.gate
        is_spoilt = False
        if loss is not None:
            self._watch, is_spoilt = watch_loss(self._watch, loss)
        if acts and is_spoilt:
            acts = False
            self.num_brakes += 1
            highest = max(state.log_factor for state in self._states)
            self._ceiling = min(self._ceiling, math.exp(max(0.0, highest / 2)))
            self._states = [slowed(state, self.settings) for state in self._states]
        for i, signal in enumerate(signals):
            if math.isfinite(signal):
                highest = min(self.settings.group_limit if i else self.settings.limit, self._ceiling)
                self._states[i], self._signals[i] = anchored_update(
                    self._states[i], signal, log_time, self.settings, acts=acts, highest=highest
                )
        self.sums.zero_()
        self._num_summed = 0
        self._last_control = self._num_steps
        self._next_control = next_control(self._num_steps, self._total_steps)

    def watch(self, num_steps: int, probe: float | None) -> None:
        """At a sync: close the gate where the training loss is no longer what should be lowered."""
        limit = self.settings.repeats_after
        if not self.gate and limit is not None and num_steps >= limit:
            self.gate = "training data repeats"
        if self.watches_probe and probe is not None and math.isfinite(probe):
            self._lowest_probe = min(self._lowest_probe, probe)
            has_risen = probe > self._lowest_probe + self.settings.max_rise * abs(self._lowest_probe)
            self._num_risen = self._num_risen + 1 if has_risen else 0
            if self._num_risen == 3:  # a single one may be chance
                self.gate = "the loss on the probe keeps above its lowest"

    def state_dict(self) -> dict[str, Any]:
        """Everything, tensors on the CPU; the same on every replica after converging."""
        return {
            "states": [list(state) for state in self._states],
            "signals": list(self._signals),
            "gate": self.gate,
            "ceiling": self._ceiling,
            "num_brakes": self.num_brakes,
            "watch": list(self._watch),
            "lowest_probe": self._lowest_probe,
            "num_risen": self._num_risen,
            "start": [[x.cpu().clone() for x in group] for group in self._start],
            "average": [[x.cpu().clone() for x in group] for group in self.average],
            "sums": self.sums.tolist(),
            "rounding": None if self._rounding is None else self._rounding.get_state(),
            "counters": [self._num_summed, self._num_steps, self._last_control, self._next_control],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint."""
        count, saved = len(self._states), [AnchoredState(*each) for each in state["states"]]
        if len(saved) == self._num_dials > 1:  # by a version that kept no common factor
            saved = [AnchoredState(min(each.log_factor for each in saved)), *saved]
        # Made without per_group: groups start from the common factor.
        self._states = (saved + [AnchoredState(saved[0].log_factor)] * count)[:count]
        self._signals = (list(state["signals"]) + [0.0] * count)[:count]
        self.gate, self._ceiling = state["gate"], state.get("ceiling", math.inf)
        self.num_brakes, self._watch = state.get("num_brakes", 0), LossWatch(*state.get("watch", ()))
        self._lowest_probe, self._num_risen = state["lowest_probe"], state["num_risen"]
        for mine, saved in ((self._start, state["start"]), (self.average, state["average"])):
            for group, saved_group in zip(mine, saved, strict=True):
                for i, value in enumerate(saved_group):
                    group[i] = value.to(group[i].device, group[i].dtype, copy=True)
        self.sums.zero_()
        if len(state["sums"]) == len(self.sums):
            self.sums.copy_(torch.tensor(state["sums"], dtype=self.sums.dtype))
        self._num_summed, self._num_steps, self._last_control, self._next_control = state["counters"]
        if self._rounding is not None and state.get("rounding") is not None:
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
