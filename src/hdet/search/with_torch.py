"""find_lr: the learning rate for a whole run, found by short trials before it. Nothing is left changed."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Adagrad, Optimizer

from hdet.checks import require_flag, require_kind, require_number
from hdet.errors import bad_argument
from hdet.replicas.average import Averager
from hdet.replicas.copies import ALONE, keeping_generators, same_draws
from hdet.replicas.exchange import (
    exchange,
    exchange_with_all,
    raising_together,
    require_same_training,
    telling_failures,
    telling_others,
)
from hdet.replicas.gradients import mesh_of_replicas
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.losses import first_loss, scalar_of
from hdet.replicas.optimizers import optimizer_layers, peak_rate, remember_search, require_free, without_ddp
from hdet.replicas.probe import ProbeOrBatches, probe_of
from hdet.replicas.refusals import OPTIMIZERS, refuse, require_supported
from hdet.replicas.rows import digest_of, size_of, split
from hdet.replicas.tensors import averaged_tensors, clip_gradients, local_part, parameters_of, reshard
from hdet.search.decisions import least_examples, num_parts, trial_shape
from hdet.search.driver import Search, endless, require_guess, require_length
from hdet.search.found import FoundLR, set_rate
from hdet.search.progress import ProgressLine
from hdet.search.saved_training import SavedTraining, no_copies_of_weights, own_statistics
from hdet.search.trial_rows import train_rows

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)

_CUT = (
    "hdet.find_lr called loss(model, batch) with a part of a batch. It cuts the tensors of a batch along "
    "their first dimension. If yours cannot be cut like that, put each batch into an object of a class of "
    "your own: it is left whole"
)
_LEAST_FOR_BATCH_NORM = 16
"""Examples of a trial in a step, for a model whose statistics are of the batch."""


def find_lr(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    total_steps: int,
    probe: ProbeOrBatches | None = None,
    clip_norm: float | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    progress: bool = True,
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
        probe: held-out data that trials are scored on by ``loss``: an :class:`hdet.Probe`, which the run can
            be steered by afterwards, or batches. Without it, the first few training batches are set aside.
        clip_norm: give it if your loop clips gradients to this norm.
        replicas: the process group of the ranks that train together; None for all of them. For a sharded
            model see :class:`hdet.Ensemble`.
        progress: show on a terminal how far the search is, once it takes more than five seconds.

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
        require_length(total_steps)
        require_flag("progress", progress)
        if clip_norm is not None:
            require_number("clip_norm", clip_norm, above=0)
        require_kind("model must be a torch.nn.Module", model, isinstance(model, nn.Module))
        require_kind("loss must be a function loss(model, batch)", loss, callable(loss))
        held_out = probe_of(probe, loss)
        layers = optimizer_layers(optimizer)
        optimizer = layers[-1]
        require_free(optimizer)
        require_supported(layers, model)
        refuse("optimizer", layers, OPTIMIZERS, "search")
        module = without_ddp(model)
        asked = [peak_rate(group) for group in optimizer.param_groups]
        require_guess("optimizer's lr", asked)
    told, trained = {"total_steps": total_steps, "clip_norm": clip_norm}, averaged_tensors(optimizer, module)
    require_same_training(everyone, told, optimizer, module, trained)
    everyone = telling_failures(everyone)
    trainee = _TorchTrainee(module, optimizer, loss, clip_norm, everyone, asked)
    try:
        # A sharded model makes every step on all ranks together. Otherwise a trial belongs to one rank.
        with (
            nullcontext() if everyone.within else own_statistics(module),
            keeping_generators(batches),
            telling_others(everyone),
            no_copies_of_weights(),
            ProgressLine(progress and everyone.is_writer) as line,
        ):
            found = Search(
                trainee,
                endless(batches),
                probe=None if held_out is None else held_out.batches,
                total_steps=total_steps,
                progress=line,
            ).run()
    except BaseException:
        trainee.saved.put_back(after_error=True)
        raise
    trainee.saved.put_back()
    if clipped := trainee.are_clipped:
        found = replace(found, clipped=sum(clipped) / len(clipped))
    remember_search(optimizer, found.asked, found.lr)
    if everyone.is_writer:
        _log.log(logging.WARNING if found.is_guess else logging.INFO, "%s", found)
    return found


@dataclass(eq=False)
class _TorchTrainee:
    """Trains a torch model for a search. See :class:`hdet.search.driver.Trainee`."""

    _model: nn.Module
    """The bare one."""
    _optimizer: Optimizer
    """The bare one."""
    _loss: Callable[[nn.Module, Any], Tensor]
    _clip_norm: float | None
    _everyone: ReplicaGroup
    asked: Sequence[float]
    _has_loss: bool = False
    _num_bad: int = 0
    _num_parts: int = 1
    _least_size: int = 1
    _has_rows: bool = True
    """Trials can be made in one pass, as far as is known."""
    _averager: Averager | None = None
    are_clipped: list[bool] = field(default_factory=list)
    """Of every step of the ramp whose gradient may be clipped: it was."""

    def __post_init__(self) -> None:
        # The ranks of a sharded model make every trial together.
        self._is_shared = bool(self._everyone.within)
        self._group = ALONE if self._is_shared else self._everyone
        self._has_batch_norm = any(isinstance(module, _BatchNorm) for module in self._model.modules())
        self.steps_shrink = isinstance(self._optimizer, Adagrad)
        self.saved = SavedTraining(self._model, self._optimizer, self._everyone)
        """It is put back after the search."""
        self.saved.train()

    def num_trials_at_once(self, batch: Any) -> int:
        smallest = int(min(self._of_all(float(size_of(batch)))))
        self._num_parts = num_parts(self._group.count, smallest)
        # The ranks of a sharded model that see other data make a trial together.
        num_together = len(set(self._of_all(digest_of(batch)))) if self._is_shared else 1
        joint = self._group.count * num_together * smallest
        # BatchNorm has the statistics of what a rank sees by itself.
        least = _LEAST_FOR_BATCH_NORM if self._has_batch_norm else -(-least_examples(joint) // num_together)
        self._least_size = min(least, smallest)
        return self._group.count * self._num_parts

    def has_enough(self, batch: Any) -> bool:
        return self._num_parts == 1 or size_of(batch) >= max(self._num_parts, self._least_size)

    def without_bad(self, batches: list[Any]) -> list[Any]:
        good = [batch for batch in batches if not self._is_bad(batch)]
        self.saved.begin_buffers()
        return good

    def score(self, batches: Sequence[Any]) -> float:
        return self._score(batches, is_joint=True)

    def num_bad(self) -> int:
        return int(sum(self._of_all(float(self._num_bad))))

    # --- the ramp ------------------------------------------------------------------------------------

    def begin_ramp(self) -> None:
        self.saved.begin_at(None)
        # Replicas must stay equal in the ramp: each may keep a part of the copy only.
        is_shared_by_model = mesh_of_replicas(self._everyone, self.saved.parameters) is not None
        self._averager = Averager(ALONE if is_shared_by_model else self._everyone)
        self._weights = self.saved.copy()

    def ramp_step(self, factor: float, batch: Any) -> None:
        if not self._step(factor, batch, self._averager):  # the probe was finite with these weights
            self._num_bad += 1

    def keep_weights(self) -> None:
        self._weights.take()

    # --- trials --------------------------------------------------------------------------------------

    def try_out(
        self,
        factors: Sequence[float],
        turns: Iterable[list[Any]],
        probe: list[Any],
        steps_made: Callable[[int], None],
    ) -> Sequence[float]:
        self._steps_made = steps_made
        num_here, gains = self._num_parts, list[float]()
        self._averager = None  # the ramp is over: give its bucket back
        self.saved.begin_at(self._weights)
        before = self._score(probe) if self._group.communicates else 0.0
        for turn, batches in enumerate(turns):
            parts = [split(batch, num_here, least=self._least_size) for batch in batches]
            first = (turn * self._group.count + self._group.index) * num_here
            here = factors[first : first + num_here]
            self.saved.begin_at(self._weights)
            scores = self._trials_at_once(here, parts, probe)
            for place, (factor, score) in enumerate(zip(here, scores, strict=True)):
                score = self._good_trial(factor, [step[place] for step in parts], probe, score)
                gains.append(score - before)
        # Each rank may have scored on data of its own: what its trials gained on it can be compared.
        rows = exchange(self._group, [before, *gains])
        level = fmean([row[0] for row in rows])
        scores = list[float]()
        for start in range(1, len(rows[0]), num_here):
            for row in rows:
                scores += [level + gain for gain in row[start : start + num_here]]
        return scores

    def _trials_at_once(
        self, factors: Sequence[float], parts: Sequence[Sequence[Any]], probe: Sequence[Any]
    ) -> list[float | None]:
        """Score trials that are made in one pass. None for one that has to be made by itself."""
        scores: list[float | None] = [None] * len(factors)
        if self._is_shared or len(factors) == 1 or not self._has_rows:
            return scores
        try:
            rows, are_finite = train_rows(
                self._model,
                self._optimizer,
                self._loss,
                parts,
                factors,
                self.asked,
                self._clip_norm,
                partial(self._steps_made, self._group.count * len(factors)),
            )
        except Exception as error:
            _log.debug("trials are made one after the other: %s", error)
            self._has_rows = False
            return scores
        for place in (place for place, is_finite in enumerate(are_finite) if is_finite):
            rows.write_template(place)
            scores[place] = self._score(probe)
        return scores

    def _good_trial(
        self, factor: float, batches: Sequence[Any], probe: Sequence[Any], known: float | None
    ) -> float:
        """Score a miniature of the schedule, without batches that are bad with any weights.

        Where a loss is not finite, the batch is tried with the weights that the trial began with. If it is
        bad there too, the trial is made again without it. All ranks take part: the weights lie in parts. One
        whose score is known only waits for the others.
        """
        left_out, doubtful, score = set[int](), None, math.nan if known is None else known
        is_settled = known is not None
        while not all(row[0] for row in exchange(self._group, [float(is_settled)])):
            self.saved.begin_at(self._weights)
            if doubtful is not None:
                if self._is_bad(batches[doubtful]):
                    left_out.add(doubtful)
                    self._weights.put_buffers()
                    self.saved.begin_generators()
                else:  # the learning rate is at fault
                    is_settled = True
            if not is_settled:
                doubtful = self._trial(factor, batches, left_out)
                is_settled = doubtful is None
                score = self._score(probe) if is_settled else math.nan
        return score

    def _trial(self, factor: float, batches: Sequence[Any], left_out: Collection[int]) -> int | None:
        """Train a miniature of the schedule. Returns the number of the batch whose loss was not finite."""
        for step, batch in enumerate(batches):
            if step not in left_out and not self._step(factor * trial_shape(step, len(batches)), batch):
                return step
            self._steps_made(self._group.count)
        return None

    @torch.no_grad()
    def _is_bad(self, batch: Any) -> bool:
        """Tell if the loss of the batch is not finite with the weights that the model has, and count it."""
        is_bad = not math.isfinite(self._mean(self._loss_of(batch).item()))
        reshard(self._model)
        self._num_bad += is_bad
        return is_bad

    # --- one step ------------------------------------------------------------------------------------

    def _step(self, factor: float, batch: Any, averager: Averager | None = None) -> bool:
        """Make a step, with all ranks if there is an averager. Returns False where the loss is not finite."""
        for group, asked in zip(self._optimizer.param_groups, self.asked, strict=True):
            set_rate(group, factor * asked)
        # What is averaged stays where it is: the averager knows its place, and would keep the old ones alive.
        is_joint = averager is not None and averager.communicates
        self._optimizer.zero_grad(set_to_none=not is_joint)
        with torch.enable_grad():
            loss = self._loss_of(batch)
            if not loss.requires_grad:
                remedy = "return it before backward(), and do not use no_grad() or detach()"
                if not any(p.requires_grad for p in self.saved.parameters):
                    remedy = "no parameter of the optimizer has requires_grad=True"
                raise bad_argument(
                    "loss", "must return a tensor that gradients flow through", "one without", remedy
                )
            loss.backward()
        value = self._mean(loss.item(), is_joint=averager is not None)
        if averager is not None and is_joint:
            trained = [p for p in self.saved.parameters if p.requires_grad]
            for p in trained:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                elif p.grad.is_sparse:
                    must = "must have dense gradients on several ranks"
                    raise bad_argument("model", must, "sparse ones", "set sparse=False")
            averager.average_([local_part(p.grad) for p in trained if p.grad is not None])
        if self._clip_norm is not None:
            norm = clip_gradients(self.saved.parameters, self._clip_norm)
            if averager is not None:
                self.are_clipped.append(norm.item() > self._clip_norm)
        if math.isfinite(value):
            self._optimizer.step()
        return math.isfinite(value)

    def _loss_of(self, batch: Any) -> Tensor:
        if not self._has_loss:
            loss = first_loss(self._loss, self._model, batch)
            self._has_loss = True
            return scalar_of("loss must return", loss)
        try:
            loss = self._loss(self._model, batch)
        except Exception as error:
            if sys.version_info >= (3, 11) and self._num_parts > 1:
                error.add_note(_CUT)
            raise
        return scalar_of("loss must return", loss)

    @torch.no_grad()
    @same_draws()
    def _score(self, batches: Sequence[Any], *, is_joint: bool = False) -> float:
        """Take the mean loss of these batches; NaN if it is not finite."""
        norms = [m for m in self._model.modules() if isinstance(m, _BatchNorm) and m.training]
        self._model.eval()
        for norm in norms:  # their running statistics need more steps than a trial has
            norm.train()
        value = fmean([self._loss_of(batch).item() for batch in batches])
        self.saved.train()
        reshard(self._model)
        value = self._mean(value, is_joint=is_joint)
        return value if math.isfinite(value) else math.nan

    def _mean(self, value: float, *, is_joint: bool = False) -> float:
        """Average over all ranks that have made it together."""
        return fmean(self._of_all(value)) if is_joint or self._is_shared else value

    def _of_all(self, value: float) -> list[float]:
        """Gather the number of every rank."""
        return [x for (x,) in exchange_with_all(self._everyone, [value])]
