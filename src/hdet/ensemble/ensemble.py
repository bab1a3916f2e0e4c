"""Ensemble: what users call. It counts steps and joins replicas, values, schedule and controllers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.ensemble import state
from hdet.ensemble.construction import group_of, replicas_of, require_may_differ, unwrapped
from hdet.ensemble.readings import Readings
from hdet.ensemble.rounds import Rounds
from hdet.ensemble.settings import Settings
from hdet.ensemble.steps import NOTICES, ParameterWatch, StepCounter
from hdet.errors import HdetError, WarnOnce
from hdet.explore import ExploredValues, Hyperparameter
from hdet.method.merges import Merge
from hdet.method.recipe import tail_steps
from hdet.records import RecordSink, RoundRecord
from hdet.replicas import ReplicaGroup, Replicas
from hdet.replicas.exchange import raising_together
from hdet.replicas.optimizers import claim, peak_rate, release, start_rates
from hdet.replicas.probe import Probe
from hdet.replicas.tail import Tail
from hdet.replicas.tensors import parameters_of
from hdet.steering import Surroundings, at_work, explored_by
from hdet.steering.needs import AnyController
from hdet.weak_hook import Closing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger(__name__)


class Ensemble(Readings, Closing):
    """Hyperparameter-divergent training over any optimizer and any schedule.

    Each replica trains with its own value of every explored hyperparameter. Every ``sync_every`` steps
    the replicas compare losses, average their parameters, let controllers move the shared base, and
    draw new multipliers. Construction and syncs are collective: every replica must take part.

    Args:
        optimizer: this replica's optimizer, also in a wrapper such as accelerate's. Values live in its
            parameter groups.
        scheduler: what schedules the base, any torch LRScheduler; None for constant values. The ensemble
            steps it, once for each step of the optimizer: do not call its ``step`` yourself.
        model: adds its floating-point buffers (and trainable parameters that the optimizer does not
            hold) to what is averaged.
        explore: what differs between replicas; the learning rate with spread 1/9 by default.
        sync_every: steps per round, T.
        controllers: what moves the base, a list of any of these. :class:`hdet.Controller` compares replicas,
            :class:`hdet.Guard` goes back where a run collapses, and :class:`hdet.Thermostat` and
            :class:`hdet.HeldOutWeightDecay` look at the probe. Each multiplies the base by a factor of its
            own. Without any the base follows the schedule.
        total_steps: length of training, S; taken from the scheduler if it has one. The last step is a
            sync, so that all replicas end with the same parameters.
        replicas: the process group that joins the replicas; None for the world, or for this process
            alone where torch.distributed is not running. For a sharded model (fully_shard, tensor
            parallelism) the axis of its mesh along which it is replicated, ``mesh["replicate"]``; None where
            all ranks together hold one replica. Or an object of the port ``hdet.replicas.Replicas``.
        seed: of the assignments, the same on every replica.
        records: takes a :class:`RoundRecord` per sync, on replica zero.
        bucket_mib: buffer size for averaging, in MiB.
        assignment: how replicas are placed in the spreads: ``"random"``, anew in each round, ``"paper"``, the
            same from where the controller starts, or of several hyperparameters uncorrelated, ``"latin"`` or
            ``"factorial"``; see :func:`hdet.method.fan_out.assign`.
        gradients: ``"shared"``, the mean over replicas at every step, as DistributedDataParallel makes it, or
            ``"local"``, each replica its own, so that nothing is sent between syncs. With
            DistributedDataParallel pass that module as ``model``. With fully_shard, shard over
            ``mesh["shard"]`` alone and pass ``replicas=mesh["replicate"]``.
        merge: what replicas take from each other at a sync where gradients are local; None for the mean
            (:class:`hdet.MeanMerge`). :mod:`hdet.presets` has published methods under their names, and
            :class:`hdet.Merge` is the base of a rule of your own.
        moments: what happens to the optimizer's moments where parameters are averaged. ``"average"`` them
            too, ``"keep"`` each replica's, or ``"reset"`` the optimizer. ``"auto"`` averages them where
            replicas end a round with different ones (gradients are local, a momentum is explored, or weight
            decay is added to the gradient as in SGD and Adam; not in AdamW), and keeps them elsewhere.
            Where a merge rule lets replicas stay apart they are always kept.
        probe: an :class:`hdet.Probe`, data that is the same for every replica. Where replicas differ it
            scores them at each sync before converging, instead of their training losses, with gradients off
            and ``model`` in evaluation mode. Some controllers look at it.
        patience: seconds that replicas wait for a missing one at a sync before they ask which it is. The log
            says it after about twice as long, and after ten times as long they raise.
        average_tail: share of the run, at its end, whose parameters are averaged over time, in one more copy
            of them. After the last step the mean takes their place. It does the last part of an anneal, and
            does it better: let the schedule end at about 0.15 of its peak with a tail of 0.075.

    >>> import torch
    >>> parameter = nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
    >>> ensemble = Ensemble(optimizer, sync_every=10)      # alone: one replica, its multiplier is one
    >>> optimizer.step()
    >>> ensemble.step(loss=0.5)
    >>> ensemble.num_steps, ensemble.base
    (1, {'lr': 0.1})
    """

    stepped_by = ""
    """Names the scheduler that steps it in the place of the user, if there is one."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scheduler: state.Schedule | None = None,
        model: nn.Module | None = None,
        explore: Sequence[Hyperparameter] | None = None,
        sync_every: int = 1000,
        controllers: Sequence[AnyController] = (),
        total_steps: int | None = None,
        replicas: dist.ProcessGroup | DeviceMesh | ReplicaGroup | Replicas | None = None,
        seed: int = 0,
        records: RecordSink | None = None,
        bucket_mib: float = 25.0,
        assignment: Literal["random", "paper", "latin", "factorial"] = "random",
        gradients: Literal["shared", "local"] = "shared",
        merge: Merge | None = None,
        moments: Literal["auto", "average", "keep", "reset"] = "auto",
        probe: Probe | None = None,
        average_tail: float = 0.0,
        patience: float = 60.0,
    ) -> None:
        given = locals()
        group = group_of(replicas, optimizer, patience)
        with raising_together(group):
            layers, schedule, model = unwrapped(optimizer, scheduler, model)
            self.optimizer, self.scheduler = layers[-1], schedule
            if total_steps is None:
                given["total_steps"] = getattr(schedule, "total_steps", None)
            settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
            self.replicas = replicas_of(replicas, settings, group, model, layers)
            explored = [*settings.explore, *explored_by(settings.controllers)]
            self.explored = ExploredValues(explored, self.optimizer)
            if (self.explored.explores or settings.is_local) and self.replicas.has_others:
                require_may_differ(layers)
            self.warn = WarnOnce(is_silent=not self.replicas.is_writer)
            self.controllers = at_work(
                settings.controllers,
                Surroundings(
                    values=self.explored,
                    replicas=self.replicas,
                    warn=self.warn,
                    sync_every=sync_every,
                    total_steps=settings.total_steps,
                ),
            )
            moments = settings.moments_for(self.optimizer, self.explored)
            self.settings = settings = replace(settings, moments=moments)
            self.tail = Tail(self.replicas, tail_steps(settings.total_steps or 1, settings.average_tail))
            self.rounds = Rounds(settings, self.replicas, self.explored, self.controllers, self.tail)
        self.replicas.require_same(settings.compared())
        with raising_together(group):
            for one in self.controllers:
                one.try_out()
        # Records may be given to replica zero alone: every replica then takes part in its rounds.
        is_recorded = self.replicas.any(records is not None)
        self.seed, self.sync_every, self.total_steps = seed, sync_every, settings.total_steps

        # From here on things change.
        self._counter = StepCounter(parameters_of(self.optimizer), self.warn)
        # What shards a model shows whole parameters in the place of its own while it computes.
        self.watch = ParameterWatch(layers, None if self.replicas.is_sharded else self.replicas.model)
        self.peaks = self.explored.rates_of([peak_rate(group) for group in self.optimizer.param_groups])
        """Of every slot of every learning rate, as asked for."""
        self.starts = self.explored.rates_of(start_rates(self.optimizer))
        """What the user gave for each of them, before any search."""
        stepped = self._counter.optimizer_stepped
        self._begins_equal = self.replicas.attach(self.explored, moments=moments, step_made=stepped)
        claim(self.optimizer, self)
        self._is_closed, self._is_local, self._is_ready_to_save = False, settings.is_local, False
        self._has_rounds = is_recorded or self.rounds.are_needed or self.replicas.differ
        self._take_loss = [self.replicas.add_loss, *(one.add_loss for one in self.controllers.watching)]
        self._hooks = self.explored.watch(self.optimizer)
        self._record: RoundRecord | None = None
        self._restart(max(0, getattr(self.scheduler, "last_epoch", 0)), begins_equal=self._begins_equal)
        self._counter.has_moved = True  # the user may still change them

    # --- what users call -----------------------------------------------------------------------------

    def observe(self, loss: Tensor | float) -> None:
        """Take the loss of one micro-batch, without a step."""
        self._require_open("observe()")
        if self._has_rounds:
            for take in self._take_loss:
                take(loss)

    def step(self, loss: Tensor | float | None = None, *, skipped: bool = False) -> None:
        """Count one optimizer step; call it right after ``optimizer.step()``.

        Only steps that the optimizer took are counted. A call with no optimizer step since the last
        one (a gradient scaler found an infinity, gradients are being accumulated, a framework calls
        once per process) takes the loss and changes nothing else. Until the first step of the optimizer
        is seen, calls without gradients count too, so that a schedule can be looked at without training. Pass
        ``skipped=True`` for a step that the optimizer was asked for and did not take (a fused optimizer
        under a gradient scaler).
        """
        if self.stepped_by:
            raise HdetError(
                f"step() must be called on the {self.stepped_by}, not on its ensemble: it has the schedule"
            )
        if self.count(loss, skipped=skipped):
            is_sync = self._record is not None
            slots = self.explored.every_slot if is_sync else self.explored.moving_slots
            if slots.put_scheduled(compare_tensors=is_sync):  # not at every step: it waits for the device
                self._notice("changed outside")
            # After the last step there is nothing to plan for, and a schedule would go beyond its curve.
            is_over = self.total_steps is not None and self.num_steps >= self.total_steps
            if self.scheduler is not None and not is_over:
                self.scheduler.step()
            self.put_values()

    def count(self, loss: Tensor | float | None = None, *, skipped: bool = False) -> bool:
        """Do the first half of :meth:`step`: take the loss, count, sync if it is time. Tell if it counts.

        The schedule then sets its next values, and :meth:`put_values` puts this replica's in their place.
        """
        if self._is_closed:
            self._require_open("step()")
        if loss is not None and self._has_rounds:
            for take in self._take_loss:
                take(loss)
        if not self._counter.takes_call() or skipped:
            return False
        if len(self.optimizer.param_groups) != self.watch.num_groups:
            self.watch.require_same_groups()
        if self._is_ready_to_save:
            self._is_ready_to_save = False
            self.controllers.after_save()
        if self._is_finished or (self.total_steps is not None and self.num_steps >= self.total_steps):
            self._notice_end()
        self.num_steps = num_steps = self.num_steps + 1
        is_end = num_steps == self.total_steps
        is_sync = self._has_rounds and (num_steps % self.sync_every == 0 or is_end)
        is_in_tail = num_steps in self.tail.steps
        if is_sync or is_in_tail:  # not at every step: it looks at each module
            self.watch.require_same()
        if is_in_tail:
            self.tail.step_made(num_steps)
        if is_sync:
            self._record = self.rounds.run(num_steps, ends_round=True, joins=is_end)
            self._counter.has_moved = False
        for one in self.controllers.watching:
            one.step_made(num_steps, self._record)
        if is_end:
            num_averaged_steps = self.tail.finish(num_steps)
            if self._record is not None:
                self._record.num_averaged_steps = num_averaged_steps
        return True

    def put_values(self) -> None:
        """Do the second half: put this replica's values in the place of those that the schedule has set."""
        record, self._record = self._record, None
        slots = self.explored.moving_slots if record is None else self.explored.every_slot
        slots.put_values(is_traced=self.rounds.is_traced)
        if record is not None:
            self.rounds.write(record)

    def _notice_end(self) -> None:
        is_past = self.total_steps is not None and self.num_steps >= self.total_steps
        self._notice("past the end" if is_past else "after finish")

    def _notice(self, key: str) -> None:
        self.warn(key, NOTICES[key].format(num_steps=self.num_steps, total_steps=self.total_steps))

    def converge(self) -> None:
        """Average the parameters now, within a round: before a save or an evaluation of your own. Collective.

        Multipliers and the controller stay. Copies that replicas hold in parts are gathered for a checkpoint,
        until the next step.
        """
        self._require_open("converge()")
        self._converge()
        self.controllers.before_save()
        self.tail.hold_whole()
        self._is_ready_to_save = True

    def _converge(self) -> None:
        if self._has_rounds and self._is_apart:
            self.watch.require_same()
            record = self.rounds.run(self.num_steps, ends_round=False, joins=True)
            self._counter.has_moved = False
            self.rounds.write(record)

    def finish(self) -> None:
        """End the run now, where fewer than ``total_steps`` steps were counted: skipped ones, an early stop.

        Converges, and puts the mean of the tail in place. Collective. Gradients are shared again afterwards.
        """
        self._require_open("finish()")
        self._converge()
        if self.tail.steps and self.num_steps < self.tail.steps[0] and self.replicas.is_writer:
            _log.warning(
                "step %d of %s: finish() ends the run before its tail, so there is no mean of the last "
                "weights. If this was the planned end, pass the true number of steps as total_steps",
                self.num_steps,
                self.total_steps,
            )
        self._is_finished |= self.tail.is_planned
        self.tail.finish(self.num_steps)
        self.replicas.share_gradients(True)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the model holds the mean of the tail so far: for an evaluation before the end.

        Converges first. Elsewhere the block changes nothing more. It needs one more copy of the parameters.
        Collective. Do not train or save within it.
        """
        self._require_open("averaged()")
        self._converge()
        with self.tail.in_place():
            yield

    def base_values(self) -> AbstractContextManager[None]:
        """Use the shared values on this replica, within the block."""
        return self.explored.at_base()

    def warm_start(self, noise_scale: float = 0.01, *, norm: Literal["tensor", "global"] = "tensor") -> None:
        """Perturb each replica's parameters; see :func:`hdet.warm_start`. The next sync averages them."""
        self._require_open("warm_start()")
        self.replicas.perturb(noise_scale, norm=norm, seed=self.seed)
        self._begins_equal = False
        self._counter.has_moved = self._has_rounds = True

    def close(self) -> None:
        """Put the scheduled values back in place and let go of the optimizer, for good."""
        if self._is_closed:
            return
        self._is_closed = True
        self.replicas.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.explored.every_slot.put_scheduled()
        release(self.optimizer)

    def _require_open(self, call: str) -> None:
        if self._is_closed:
            raise HdetError(f"{call} must not be called after close(), but it was: build a new ensemble")

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers and CPU tensors, the same on every replica; loads with ``weights_only=True``.

        Call :meth:`converge` on every replica first: then one replica's checkpoint is everybody's, and the
        run resumes bit for bit. Not collective. It raises where the parameters are not finite.
        """
        is_new = self._begins_equal and not self._counter.has_seen_steps and self.num_steps == 0
        is_apart = self._has_rounds and self._is_apart and not is_new
        state.require_fit_to_save(self, is_apart=is_apart, is_new=is_new)
        return {
            "num_steps": self.num_steps,
            "peaks": [list(peak) for peak in self.peaks],
            "starts": [list(start) for start in self.starts],
            "optimizer_steps_are_seen": self._counter.has_seen_steps,
            **state.save_parts(self),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, also of another number of replicas. One that does not fit changes nothing."""
        self.check_state_dict(state_dict)
        state.load_plan(state_dict, self)
        self.peaks = [list(peak) for peak in state_dict["peaks"]]
        self._restart(state_dict["num_steps"], narrows=False)
        state.load_progress(state_dict, self)
        self._counter.has_seen_steps |= state_dict["optimizer_steps_are_seen"]

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise if :meth:`load_state_dict` could not load this. Nothing is changed."""
        state.check_state(state_dict, self)

    def begin_at(self, num_steps: int) -> None:
        """Go on with a run that something else has trained for ``num_steps`` steps."""
        for tunable in self.explored.tunables:
            tunable.forget()
        self._restart(num_steps, begins_equal=self._begins_equal)

    # --- beginning -----------------------------------------------------------------------------------

    def _restart(self, num_steps: int, *, narrows: bool = True, begins_equal: bool = True) -> None:
        self.num_steps = num_steps
        self._is_finished = False
        self._counter.has_moved = False
        self.rounds.begin_at(num_steps, narrows=narrows, begins_equal=begins_equal)
        self.tail.begin(is_checked=self._has_rounds and not self._is_local)

    @property
    def _is_apart(self) -> bool:
        """Tell if anything has moved since replicas were averaged last."""
        return self._counter.has_moved or self.rounds.converged_at != self.num_steps
