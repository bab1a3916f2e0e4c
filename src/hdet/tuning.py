"""tune: the whole recipe in one call. It searches, then trains, and says what it left out and why."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import SGD, Adagrad, Optimizer, RMSprop

from hdet.auto import AutoLR
from hdet.checkpoints import load_checkpoint
from hdet.checks import require_choice, require_kind, require_path
from hdet.errors import bad_argument
from hdet.explore import Hyperparameter, LearningRate, WeightDecay
from hdet.explore.values import hyperparameters_of
from hdet.method.recipe import Recipe
from hdet.method.thermostat import LEAST_STEPS, NUM_ROUNDS, Thermostat
from hdet.method.weight_decay import HeldOutWeightDecay
from hdet.records import RecordSink
from hdet.replicas import ReplicaGroup
from hdet.replicas.copies import same_draws
from hdet.replicas.exchange import exchange_with_all, raising_together
from hdet.replicas.optimizers import decay_per_step, plain_optimizer, unchanged_on_error, without_ddp
from hdet.replicas.probe import Probe, ProbeOrBatches, probe_of
from hdet.replicas.rows import Loss
from hdet.replicas.tensors import parameters_of
from hdet.search.found import FoundLR
from hdet.search.loaders import twin
from hdet.search.saved_training import own_statistics
from hdet.search.with_torch import find_lr
from hdet.steering.needs import AnyController, Facts, controllers_of, require_needs, unmet

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)

_NUM_KEPT = 4
"""Training batches that a thermostat scores on where there is no held-out data."""
_SOME_DECAY = 5e-4
"""The weight decay of SGD that held-out data moves, where it has none: zero is its default, and no choice."""
_FEWEST = 100
"""Held-out examples that may move the weight decay. With 150 of a small table it still pays by 15 %."""
_OFTEN = 0.9
"""Share of steps whose gradient is clipped, from which on a thermostat lowers a good learning rate of SGD."""
_MOST_STATISTICS = 100
"""Batches that BatchNorm takes its last statistics from, at most."""


class Tuned(AutoLR):
    """The :class:`hdet.AutoLR` that :func:`hdet.tune` returns."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        found: FoundLR | None,
        notes: Sequence[str],
        batches: Iterable[Any],
        loss: Loss,
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, found=found, **settings)
        self.found = found
        """What the search has found; None where there was none."""
        self.notes = list(notes)
        """What was left out, and why."""
        self._batches, self._loss, self._has_ended = batches, loss, False

    def step(self, loss: Tensor | float | None = None, *, skipped: bool = False) -> None:
        """See :meth:`hdet.Ensemble.step`. After the last step BatchNorm's statistics are taken anew."""
        super().step(loss, skipped=skipped)
        if self.num_steps == self.total_steps:
            self._end()

    def finish(self) -> None:
        """See :meth:`hdet.Ensemble.finish`."""
        super().finish()
        self._end()

    def _end(self) -> None:
        model = self.replicas.model
        if self._has_ended or self.replicas.is_sharded or model is None:
            return
        self._has_ended = True
        if take_statistics(bare := without_ddp(model), self._batches, self._loss):
            statistics = [buffer for buffer in bare.buffers() if buffer.is_floating_point()]
            self.replicas.average_tensors(statistics, ())

    def summary(self) -> str:
        """Tell in a few plain lines what was found, where the run stands, and what was left out."""
        return "\n".join([super().summary(), *self.notes])

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`hdet.AutoLR.state_dict`; also all that was found."""
        state = super().state_dict()
        if self.replicas.is_sharded:
            return state
        return state | {"search": None if self.found is None else asdict(self.found)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`hdet.Ensemble.load_state_dict`."""
        super().load_state_dict(state_dict)
        if (search := state_dict.get("search")) is not None:
            self.found = FoundLR(**search)


def tune(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    total_steps: int,
    held_out: ProbeOrBatches | None = None,
    learning_rate: Literal["search", "keep"] = "search",
    resume: str | Path | None = None,
    clip_norm: float | None = None,
    spread: float = 0.0,
    explore: Sequence[Hyperparameter] = (),
    controllers: Sequence[AnyController] | None = None,
    sync_every: int | None = None,
    records: RecordSink | None = None,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Tuned:
    """Find the learning rate, and train with it: the whole recipe in one call.

    It takes the place of a scheduler. It searches for the learning rate (:func:`hdet.find_lr`), once more
    where the first search went to its limits. Then it trains with a schedule that a thermostat corrects in
    the first third of the run (:class:`hdet.AutoLR`, :class:`hdet.Thermostat`). Where the data repeats,
    held-out data moves the weight decay (:class:`hdet.HeldOutWeightDecay`). Call ``step(loss)`` after every
    optimizer step. After the last step the model holds the mean of its last weights, and BatchNorm has
    statistics of them. What cannot work here is left out: ``summary()`` and the log say what, and why. On
    several ranks, call it on every one.

    Args:
        model: the model that is trained, bare or in DistributedDataParallel, or sharded.
        optimizer: its learning rates are your guess.
        batches: training batches of this rank, such as a DataLoader.
        loss: ``loss(model, batch)``, which returns a scalar tensor.
        total_steps: length of the run in optimizer steps, without those of the search.
        held_out: a few hundred held-out examples or more, as batches or as an :class:`hdet.Probe`. They score
            the search and steer the run, so keep other data for the final test. None to keep a few training
            batches for the thermostat; the weight decay then stays as it is.
        learning_rate: ``"keep"`` trains with the learning rate that the optimizer has, without a search.
        resume: a folder. If it has a checkpoint, the run goes on from there without a search. Save with
            ``hdet.save_checkpoint(folder, step=..., model=model, optimizer=optimizer, auto=auto)``.
        clip_norm: give it if your loop clips gradients to this norm.
        spread: half-width of the replicas' learning rates around the schedule. The paper has 1/9.
        explore: further hyperparameters in which replicas differ.
        controllers: what steers beside the guard; None for what is sound here.
        sync_every: steps per round, and between two looks of the guard; None for a good number.
        records: takes a record of every round, such as ``hdet.Records("records.jsonl")``.
        replicas: the process group that joins the replicas. For a sharded model see :class:`hdet.Ensemble`.
        seed: the same on every replica.
        progress: show on a terminal how far the search is, once it takes more than five seconds.

    >>> _ = torch.manual_seed(0)
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    >>> loss_of = lambda model, x: (model(x) - 1).square().mean()
    >>> batches = [torch.randn(8, 2) for _ in range(100)]
    >>> auto = tune(model, optimizer, batches, loss_of, total_steps=100)
    >>> for x in batches:
    ...     loss = loss_of(model, x)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     auto.step(loss)
    >>> auto.found.lr[0] > 1e-3, loss.item() < 0.2
    (True, True)
    >>> auto.notes[0]
    'No thermostat: it needs a run of 200 steps, and this one has 100.'
    """
    plain = plain_optimizer(optimizer)
    group = ReplicaGroup.of_parameters(replicas, parameters_of(plain))
    with raising_together(group):
        require_choice("learning_rate", learning_rate, ("search", "keep"))
        require_kind("model must be a torch.nn.Module", model, isinstance(model, nn.Module))
        require_kind("loss must be a function loss(model, batch)", loss, callable(loss))
        held = probe_of(held_out, loss, "held_out")
        LearningRate(spread)
        explored = hyperparameters_of(explore, may_be_empty=True)
        facts = Facts(
            total_steps=total_steps,
            sync_every=Recipe(total_steps=total_steps, sync_every=sync_every).steps_per_round,
            gradients="shared",
            has_probe=True,
            explores=bool(spread or explored),
            differs_in_decay=any(isinstance(one, WeightDecay) for one in explored),
        )
        given = None if controllers is None else controllers_of(controllers)
        require_needs(given or (), facts)
        if held is None and any(isinstance(one, HeldOutWeightDecay) for one in given or ()):
            remedy = "training data cannot tell if a model overfits. Pass held_out=batches"
            raise bad_argument("held_out", "must be given for a HeldOutWeightDecay", "None", remedy)
        if resume is not None:
            require_path("resume", resume)
        if resume is not None and group.within:
            remedy = "pass learning_rate='keep', and load with torch.distributed.checkpoint"
            raise bad_argument("resume", "must be None for a sharded model", str(resume), remedy)
        num_batches = _length_of(batches)
    # Ranks may have a batch or an example more than others, and must decide alike.
    least = exchange_with_all(group, [num_batches, held.num_examples if held else 0])
    num_batches, num_examples = (min(column) for column in zip(*least, strict=True))
    checkpoint = None if resume is None else load_checkpoint(resume)
    before = None if checkpoint is None else checkpoint.states.get("auto", {}).get("search")
    found = None if before is None else FoundLR(**before)
    with unchanged_on_error(plain):
        if learning_rate == "search" and checkpoint is None:
            found = searched(
                model,
                optimizer,
                batches,
                loss,
                total_steps=total_steps,
                probe=held,
                clip_norm=clip_norm,
                replicas=replicas,
                progress=progress,
            )
        notes, chosen = list[str](), list[AnyController](given or ())
        if given is None:
            if why := _no_thermostat(plain, facts, clip_norm, found):
                notes.append(f"No thermostat: {why}.")
            else:
                chosen.append(Thermostat())
            if why := _no_weight_decay(plain, facts, num_batches, num_examples):
                notes.append(f"The weight decay stays as it is: {why}.")
            else:
                chosen.append(HeldOutWeightDecay())
        if any(isinstance(one, HeldOutWeightDecay) for one in chosen) and not _decays(plain):
            for parameters in plain.param_groups:
                parameters["weight_decay"] = _SOME_DECAY
            notes.append(f"The weight decay begins at {_SOME_DECAY:g}, because the optimizer had none.")
        if group.within and any(isinstance(module, _BatchNorm) for module in model.modules()):
            notes.append("BatchNorm keeps the statistics of the last step, because the model is sharded.")
        is_steered = bool({Thermostat, HeldOutWeightDecay} & set(map(type, chosen)))
        auto = Tuned(
            optimizer,
            found=found if checkpoint is None else None,
            notes=notes,
            batches=batches,
            loss=loss,
            total_steps=total_steps,
            model=model,
            spread=spread,
            explore=explored,
            controllers=chosen,
            probe=held or _kept(batches, loss) if is_steered else held if facts.explores else None,
            sync_every=sync_every,
            records=records,
            replicas=group if replicas is None else replicas,
            seed=seed,
        )
    if checkpoint is not None:
        checkpoint.load_into(model=model, optimizer=optimizer, auto=auto)
    if group.is_writer:
        for note in notes:
            _log.info("%s", note)
    return auto


# --- what is sound here ----------------------------------------------------------------------------------


def _no_thermostat(optimizer: Optimizer, facts: Facts, clip_norm: float | None, found: FoundLR | None) -> str:
    """Say why a thermostat is left out; nothing where it is sound."""
    least = LEAST_STEPS * NUM_ROUNDS
    if facts.total_steps is not None and facts.total_steps < least:
        return f"it needs a run of {least} steps, and this one has {facts.total_steps}"
    if isinstance(optimizer, (RMSprop, Adagrad)):
        return f"what averaging gains does not tell the learning rate of {type(optimizer).__name__}"
    share = 1.0 if found is None or found.clipped is None else found.clipped
    if clip_norm is not None and isinstance(optimizer, SGD) and share > _OFTEN:
        seen = "may be" if found is None else "are"
        return f"gradients {seen} clipped in nearly every step of SGD, so averaging tells little"
    return next((str(need.error(facts)) for need in unmet(Thermostat(), facts)), "")


def _no_weight_decay(optimizer: Optimizer, facts: Facts, num_batches: float, num_examples: float) -> str:
    """Say why held-out data does not move the weight decay; nothing where it does."""
    total_steps = facts.total_steps or 0
    if not num_examples:
        return "there is no held-out data"
    if num_examples < _FEWEST:
        return f"{num_examples:.0f} held-out examples are too few, it needs {_FEWEST}"
    if num_batches == math.inf:
        return "batches has no len(), so nobody knows if the data repeats"
    if num_batches >= total_steps:
        return f"the data does not repeat, {num_batches:.0f} batches are enough for {total_steps} steps"
    if HeldOutWeightDecay().num_looks(total_steps / facts.sync_every) < 2:
        return f"{total_steps} steps with sync_every={facts.sync_every} leave too few looks at held-out data"
    if not (_decays(optimizer) or isinstance(optimizer, SGD)):
        return "the optimizer has none, set weight_decay=0.01 in it if you want some"
    try:
        for group in optimizer.param_groups:
            decay_per_step(optimizer, group)
    except ValueError as error:
        return str(error)
    return next((str(need.error(facts)) for need in unmet(HeldOutWeightDecay(), facts)), "")


def _length_of(batches: Any) -> float:
    try:
        return len(batches)
    except TypeError:  # also of a DataLoader whose data has no length
        return math.inf


def _decays(optimizer: Optimizer) -> bool:
    return any(group.get("weight_decay") for group in optimizer.param_groups)


# --- the search ------------------------------------------------------------------------------------------


def searched(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    **settings: Any,
) -> FoundLR:
    """Search by :func:`hdet.find_lr`, and once more from where the first search says."""
    found = find_lr(model, optimizer, batches, loss, **settings)
    if (guess := found.next_guess) is None:
        return found
    replace(found, lr=guess).write(optimizer)
    again = find_lr(model, optimizer, batches, loss, **settings)
    return found.then(again)


def _kept(batches: Iterable[Any], loss: Loss) -> Probe:
    """Keep a few training batches, the same ones where a run is resumed."""
    with same_draws():
        return Probe(list(itertools.islice(twin(batches), _NUM_KEPT)), loss)


# --- the end ---------------------------------------------------------------------------------------------


def take_statistics(model: nn.Module, batches: Iterable[Any], loss: Loss) -> bool:
    """Take the statistics of BatchNorm anew, of the weights that the model has. Returns if there are any.

    Like ``torch.optim.swa_utils.update_bn``, for batches of any form. Layers in evaluation mode keep theirs.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    if not norms:
        return False
    kept = [(norm, norm.momentum) for norm in norms]
    try:
        with torch.no_grad(), same_draws(), own_statistics(model):
            for number, batch in enumerate(itertools.islice(twin(batches), _MOST_STATISTICS)):
                for norm in norms if number == 0 else ():  # an iterator may have nothing left
                    norm.reset_running_stats()
                    norm.momentum = None
                loss(model, batch)
    finally:
        for norm, momentum in kept:
            norm.momentum = momentum
    return True
