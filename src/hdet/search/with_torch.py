"""find_lr: the learning rate for a whole run, found by short trials before it. Nothing is left changed."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from hdet.checks import require_count, require_number
from hdet.errors import NotFiniteError
from hdet.replicas.average import Averager
from hdet.replicas.copies import ALONE, WeightsCopy
from hdet.replicas.exchange import exchange, exchange_within, raising_together, require_same_settings
from hdet.replicas.gradients import mesh_of_replicas
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.losses import scalar_of
from hdet.replicas.optimizers import optimizer_layers, peak_rate, remember_search, require_free, without_ddp
from hdet.replicas.refusals import OPTIMIZERS, refuse, require_supported
from hdet.replicas.rows import size_of, split
from hdet.replicas.tensors import clip_gradients, local_part, parameters_of, reshard
from hdet.search.batch_norm import own_statistics
from hdet.search.batches import endless
from hdet.search.borrowed import Borrowed
from hdet.search.decisions import (
    LEAST_STEPS,
    Ramp,
    Trial,
    lengths,
    next_ramp,
    num_parts,
    ramp_factor,
    trial_factors,
    trial_shape,
    try_out,
)
from hdet.search.found import FoundLR, set_rate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_log = logging.getLogger(__name__)

_CALLED = "hdet.find_lr called loss(model, batch), with the model first and the batch as your loader gives it"
_CUT = (
    "hdet.find_lr called loss(model, batch) with a part of a batch. It cuts the tensors of a batch along "
    "their first dimension. If yours cannot be cut like that, put each batch into an object of a class of "
    "your own: it is left whole"
)
_PROBE_STEPS = 4
"""Without a probe, the batches of so many steps serve as one. Trials do not train on them."""
_LEAST_FOR_BATCH_NORM = 4
"""Examples in a part of a batch, for a model whose statistics are of the batch."""


def find_lr(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    total_steps: int,
    probe: Any = None,
    clip_norm: float | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
) -> FoundLR:
    """Find the learning rate for a run of ``total_steps``, before it begins.

    First the learning rate grows until the loss turns. Then a few short trials find the best learning rate
    in the range that this has shown. The answer weighs the trials against the learning rate that the
    optimizer has, and it is meant for the whole run. Model, optimizer and torch's random numbers are put back
    as they were. On several ranks, call it on every one. The search takes 8 to 10 % of the steps of a run of
    1000, and 4 to 5 % of one of 5000.

    Args:
        model: the model that is trained, bare or in DistributedDataParallel, compiled or not.
        optimizer: its learning rates are your guess. All groups are scaled together.
        batches: training batches of this rank, such as a DataLoader. Their first dimension holds examples.
        loss: ``loss(model, batch)``, which returns a scalar tensor.
        total_steps: length of the run in optimizer steps, without those of the search.
        probe: one held-out batch that trials are scored on, the same on every rank. Without it, the first few
            training batches are set aside for that.
        clip_norm: give it if your loop clips gradients to this norm.
        replicas: the process group of the ranks that train together; None for all of them. For a sharded
            model see :class:`hdet.Ensemble`.

    >>> model = nn.Linear(8, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    >>> data = [torch.randn(16, 8) for _ in range(20)]
    >>> found = find_lr(model, optimizer, data, lambda model, x: (model(x) - x.sum(1, True)).square().mean(),
    ...                 total_steps=500)
    >>> found.lr[0] > 1e-3, optimizer.param_groups[0]["lr"]
    (True, 0.0001)
    """
    everyone = ReplicaGroup.of_parameters(replicas, parameters_of(optimizer_layers(optimizer)[-1]))
    with raising_together(everyone):
        require_count(
            "total_steps",
            total_steps,
            at_least=LEAST_STEPS,
            remedy="a shorter run cannot afford a search. Count optimizer steps, which are epochs times "
            "len(loader)",
        )
        if clip_norm is not None:
            require_number("clip_norm", clip_norm, above=0)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {model!r} of type {type(model).__name__}")
        if not callable(loss):
            raise TypeError(
                f"loss must be a function loss(model, batch), got {loss!r} of type {type(loss).__name__}"
            )
        layers = optimizer_layers(optimizer)
        optimizer = layers[-1]
        require_free(optimizer)
        require_supported(layers, model)
        refuse("optimizer", layers, OPTIMIZERS, "search")
        module = without_ddp(model)
        asked = [peak_rate(group) for group in optimizer.param_groups]
        for value in asked:
            require_number("optimizer's lr", value, at_least=0)
        if not any(asked):
            raise ValueError(
                "optimizer's lr must be above 0 in one group at least, got 0 in all: give any guess"
            )
    require_same_settings(everyone, {"total_steps": total_steps, "clip_norm": clip_norm, "lr": asked})
    search = _Search(module, optimizer, batches, loss, probe, clip_norm, everyone, asked, total_steps)
    try:
        # A sharded model makes every step on all ranks together. Otherwise a trial belongs to one rank.
        with nullcontext() if everyone.within else own_statistics(module):
            found = search.run()
    except BaseException:
        search.borrowed.put_back(after_error=True)
        raise
    search.borrowed.put_back()
    remember_search(optimizer, found.asked, found.lr)
    if everyone.is_writer:
        _log.log(logging.WARNING if found.is_guess else logging.INFO, "%s", found)
    return found


class _Search:
    """One search on borrowed weights."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Iterable[Any],
        loss: Callable[[nn.Module, Any], Tensor],
        probe: Any,
        clip_norm: float | None,
        everyone: ReplicaGroup,
        asked: Sequence[float],
        total_steps: int,
    ) -> None:
        # The ranks of a sharded model make every trial together.
        self._is_shared = bool(everyone.within)
        self._everyone = everyone
        group = ALONE if self._is_shared else everyone
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._clip_norm, self._group, self._asked = clip_norm, group, asked
        self._total_steps = total_steps
        self._has_loss = False
        self.borrowed = Borrowed(model, optimizer, everyone)
        """What is put back after the search."""
        self._batches = endless(batches)
        self._ahead = [next(self._batches)]  # its size tells how many trials there can be
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        self._least_size = _LEAST_FOR_BATCH_NORM if has_batch_norm else 1
        smallest = int(min(self._of_all(float(size_of(self._ahead[0])))))
        self._num_parts = num_parts(group.count, smallest // self._least_size)
        self._sizes = lengths(total_steps, group.count * self._num_parts)
        taken = [probe] if probe is not None else [self._next() for _ in range(_PROBE_STEPS)]
        self._probe, self._num_bad = taken, 0

    def run(self) -> FoundLR:
        """The ramp, then trials."""
        self.borrowed.train()
        if len(self._probe) > 1:  # training batches, of which one may be bad
            finite = [b for b in self._probe if not self._is_bad(b)]
            self.borrowed.begin_buffers()
            self._num_bad += len(self._probe) - len(finite)
            self._probe = finite or self._probe
        first_score = self._score()
        if first_score is None:
            raise NotFiniteError(
                "loss must be finite at the weights that the search starts from, but it is not: check the "
                "data and the model"
            )
        seen, lead, weights = self._ramp()
        found, trials, num_steps = try_out(
            lambda lead, trial_steps: self._trials(lead, weights, trial_steps),
            lead,
            first_score=first_score,
            sizes=self._sizes,
            ramp_steps=len(seen),
            total_steps=self._total_steps,
        )
        num_bad = int(sum(self._of_all(float(self._num_bad))))
        return FoundLR.of(
            found,
            self._asked,
            seen=seen,
            trials=trials,
            num_steps=num_steps,
            num_bad=num_bad,
            total_steps=self._total_steps,
        )

    # --- the two stages ------------------------------------------------------------------------------

    def _ramp(self) -> tuple[list[tuple[float, float]], float, WeightsCopy]:
        """Factors and losses; the factor of the lowest loss, and the weights there."""
        self.borrowed.begin_at(None)
        ramp, seen = Ramp(), list[tuple[float, float]]()
        # Replicas must stay equal in the ramp: each may keep a part of the copy only.
        is_shared_by_model = mesh_of_replicas(self._everyone, self.borrowed.parameters) is not None
        averager, weights = Averager(ALONE if is_shared_by_model else self._everyone), self.borrowed.copy()
        while not ramp.is_over:
            step = ramp.num_steps
            self._set_rates(ramp_factor(step, self._sizes.ramp))
            score = self._score(num_batches=1)
            value = math.inf if score is None else score
            ramp = next_ramp(ramp, value, self._sizes)
            seen.append((ramp_factor(step, self._sizes.ramp), value))
            if ramp.low_step == step:
                weights.take()
            if not ramp.is_over:
                if math.isfinite(self._backward(self._next(), averager)):
                    self._optimizer.step()
                else:  # the probe was finite with these weights
                    self._num_bad += 1
        return seen, ramp_factor(ramp.low_step, self._sizes.ramp), weights

    def _trials(self, lead: float, weights: WeightsCopy, num_steps: int) -> list[Trial]:
        """From these weights, one trial for each factor, each on its own part of the batches."""
        num_here = self._num_parts
        num_places = self._group.count * num_here
        factors = trial_factors(lead, num_places * self._sizes.num_turns)
        self.borrowed.begin_at(weights)
        before = self._score(is_joint=False)
        gains = []
        for turn in range(self._sizes.num_turns):
            steps = [self._next_parts() for _ in range(num_steps)]
            for place in range(num_here):
                index = turn * num_places + self._group.index * num_here + place
                score = self._good_trial(factors[index], weights, [step[place] for step in steps])
                gains.append(math.nan if score is None or before is None else score - before)
        # Each rank may have scored on data of its own: what its trials gained on it can be compared.
        rows = exchange(self._group, [math.nan if before is None else before, *gains])
        level = _mean([row[0] for row in rows])
        trials = []
        for index, factor in enumerate(factors):
            turn, place = divmod(index, num_places)
            rank, own = divmod(place, num_here)
            score = level + rows[rank][1 + turn * num_here + own]
            trials.append(Trial(factor, score if math.isfinite(score) else None))
        return trials

    def _next_parts(self) -> list[Any]:
        """One batch for each trial that is made here at the same time."""
        batch = self._next()
        if self._num_parts > 1:
            while size_of(batch) < self._num_parts * self._least_size:  # the last one of an epoch
                batch = self._next()
        return split(batch, self._num_parts)

    def _good_trial(self, factor: float, weights: WeightsCopy, batches: Sequence[Any]) -> float | None:
        """The score after a miniature of the schedule, without batches that are bad with any weights.

        Where a loss is not finite, the batch is tried with the weights that the trial began with. If it is
        bad there too, the trial is made again without it. All ranks take part: the weights lie in parts.
        """
        left_out: set[int] = set()
        score: float | None = None
        doubtful: int | None = None
        is_settled = False
        while True:
            self.borrowed.begin_at(weights)
            if doubtful is not None:
                if self._is_bad(batches[doubtful]):
                    self._num_bad += 1
                    left_out.add(doubtful)
                    weights.put_buffers()
                    self.borrowed.begin_generators()
                else:  # the learning rate is at fault
                    is_settled = True
            if not is_settled:
                score, doubtful = self._trial(factor, batches, left_out)
                is_settled = doubtful is None
            if all(row[0] for row in exchange(self._group, [float(is_settled)])):
                return score

    def _trial(
        self, factor: float, batches: Sequence[Any], left_out: Collection[int]
    ) -> tuple[float | None, int | None]:
        """The score, or the number of the batch whose loss was not finite."""
        for step, batch in enumerate(batches):
            if step in left_out:
                continue
            self._set_rates(factor * trial_shape(step, len(batches)))
            if not math.isfinite(self._backward(batch)):
                return None, step
            self._optimizer.step()
        return self._score(is_joint=False), None

    @torch.no_grad()
    def _is_bad(self, batch: Any) -> bool:
        """Whether the loss of the batch is not finite with the weights that the model has."""
        is_bad = not math.isfinite(self._mean(self._loss_of(batch).item(), is_joint=False))
        reshard(self._model)
        return is_bad

    # --- one step ------------------------------------------------------------------------------------

    def _set_rates(self, factor: float) -> None:
        for group, asked in zip(self._optimizer.param_groups, self._asked, strict=True):
            set_rate(group, factor * asked)

    def _backward(self, batch: Any, averager: Averager | None = None) -> float:
        """Gradients of a step, over all ranks if there is an averager; the loss."""
        # What is averaged stays where it is: the averager knows its place, and would keep the old ones alive.
        is_joint = averager is not None and averager.communicates
        self._optimizer.zero_grad(set_to_none=not is_joint)
        with torch.enable_grad():
            loss = self._loss_of(batch)
            if not loss.requires_grad:
                is_frozen = not any(p.requires_grad for p in self.borrowed.parameters)
                raise ValueError(
                    "loss must return a tensor that gradients flow through, got one without: "
                    + (
                        "no parameter of the optimizer has requires_grad=True"
                        if is_frozen
                        else "return it before backward(), and do not use no_grad() or detach()"
                    )
                )
            loss.backward()
        value = loss.item()
        if averager is not None and is_joint:
            trained = [p for p in self.borrowed.parameters if p.requires_grad]
            for p in trained:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            averager.average_([local_part(p.grad) for p in trained if p.grad is not None])
        value = self._mean(value, is_joint=averager is not None)
        if self._clip_norm is not None:
            clip_gradients(self.borrowed.parameters, self._clip_norm)
        return value

    def _loss_of(self, batch: Any) -> Tensor:
        try:
            loss = self._loss(self._model, batch)
        except Exception as error:
            if sys.version_info >= (3, 11):
                error.add_note(_CUT if self._num_parts > 1 and self._has_loss else _CALLED)
            raise
        self._has_loss = True
        return scalar_of("loss must return", loss)

    @torch.no_grad()
    def _score(self, *, is_joint: bool = True, num_batches: int | None = None) -> float | None:
        """Loss on the probe, or on some of its batches; None if it is not finite."""
        norms = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        self._model.eval()
        for norm in norms:  # their running statistics need more steps than a trial has
            norm.train()
        value = _mean([self._loss_of(batch).item() for batch in self._probe[:num_batches]])
        self.borrowed.train()
        reshard(self._model)
        value = self._mean(value, is_joint=is_joint)
        return value if math.isfinite(value) else None

    def _mean(self, value: float, *, is_joint: bool) -> float:
        """Over all ranks that have made it together."""
        return _mean(self._of_all(value)) if is_joint or self._is_shared else value

    def _of_all(self, value: float) -> list[float]:
        """The number of every rank."""
        rows = exchange_within(self._everyone, [value])
        return [x for row in exchange(self._everyone, [row[0] for row in rows]) for x in row]

    def _next(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._batches)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
