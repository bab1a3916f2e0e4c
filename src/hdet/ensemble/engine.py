"""The engine of the method for one process: its optimizer, its schedule, its place among replicas."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from hdet.core.anchored import AnchoredController
from hdet.core.assign import assign
from hdet.core.controller import Controller
from hdet.core.scout import Scout
from hdet.core.tail import tail_steps
from hdet.ensemble.arguments import check_anchored, check_arguments, check_controller
from hdet.ensemble.clock import Clock
from hdet.ensemble.finders import Finders
from hdet.ensemble.measure import Measure
from hdet.ensemble.probe import run_probe
from hdet.ensemble.scouting import check_scout
from hdet.ensemble.steering import Steering, steer
from hdet.ensemble.tail import Tail
from hdet.ensemble.tensors import Buffers, averaged_tensors, layout_text, moments_differ, moments_of
from hdet.errors import HdetWarning, IdenticalLossWarning, NotConvergedWarning
from hdet.explore import Dial, Hyperparameter, LearningRate, Panel
from hdet.replicas import Averager, Replicas, exchange
from hdet.telemetry import RecordSink, RoundRecord

__all__ = ["Ensemble", "Schedule"]

_log = logging.getLogger(__name__)


class Schedule(Protocol):
    """What the ensemble asks of a schedule; every torch LRScheduler has it."""

    def step(self) -> Any:
        """Write the plan for the next step into the optimizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a checkpoint."""
        ...


class Ensemble(Finders):
    """Hyperparameter-divergent training over any optimizer and any schedule.

    Each replica trains with its own value of every explored hyperparameter. Every ``sync_every`` steps
    the replicas compare losses, average their parameters, let the controller move the shared base, and
    draw new multipliers. Construction and syncs are collective: every replica must take part.

    Args:
        optimizer: this replica's optimizer. Values live in its parameter groups.
        scheduler: what plans the base, any torch LRScheduler; None for a constant plan. The ensemble
            steps it: do not call its ``step`` yourself.
        model: adds its floating-point buffers (and trainable parameters that the optimizer does not
            hold) to what is averaged.
        explore: what differs between replicas; the learning rate with spread 1/9 by default.
        sync_every: steps per round, T.
        controller: moves the base: at syncs, by comparing replicas (:class:`hdet.Controller`), or by the
            gradients' own signal (:class:`hdet.AnchoredController`); None leaves it to the plan.
        total_steps: length of training, S; taken from the scheduler if it has one. The last step is a
            sync, so that all replicas end with the same parameters.
        replicas: the process group that joins the replicas; None for the world, or for this process
            alone where torch.distributed is not running.
        seed: of the assignments, the same on every replica.
        records: takes a :class:`RoundRecord` per sync, on replica zero.
        bucket_mib: buffer size for averaging, in MiB.
        assignment: how replicas are placed in the spreads of several hyperparameters: ``"random"`` as in the
            paper, or uncorrelated, ``"latin"`` or ``"factorial"``; see :func:`hdet.core.assign.assign`.
        moments: whether the optimizer's moments are averaged with the parameters: ``"average"``, ``"keep"``,
            or ``"auto"``, where replicas end a round with different ones (a momentum is explored, or weight
            decay is added to the gradient as in SGD and Adam; not in AdamW).
        probe: returns the loss on one batch that is the same for every replica. It scores the replicas
            instead of their training losses: it is called at each sync before converging, with gradients off
            and ``model`` in evaluation mode. Where nothing is explored it is called for the scout and for
            the anchored controller only.
        scout: finds the learning rate in the first steps and then starts over; see :class:`hdet.Scout`. Give
            the wrapped model as ``model``: gradients stay local while it runs. The schedule is stepped a
            little faster afterwards, so that it ends with the last step all the same.
        average_tail: share of the run, at its end, whose parameters are averaged over time, in one more copy
            of them; after the last step the mean takes their place. It does the last part of an anneal, and
            does it better: let the plan end at about 0.15 of its peak with a tail of 0.075.

    >>> import torch
    >>> parameter = nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
    >>> ensemble = Ensemble(optimizer, sync_every=10)      # alone: one replica, its multiplier is one
    >>> optimizer.step()
    >>> ensemble.step(loss=0.5)
    >>> ensemble.num_steps, ensemble.base
    (1, {'lr': 0.1})
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scheduler: Schedule | None = None,
        model: nn.Module | None = None,
        explore: Sequence[Hyperparameter] | None = None,
        sync_every: int = 1000,
        controller: Controller | AnchoredController | None = None,
        total_steps: int | None = None,
        replicas: dist.ProcessGroup | Replicas | None = None,
        seed: int = 0,
        records: RecordSink | None = None,
        bucket_mib: float = 25.0,
        assignment: Literal["random", "latin", "factorial"] = "random",
        moments: Literal["auto", "average", "keep"] = "auto",
        probe: Callable[[], Tensor | float] | None = None,
        scout: Scout | None = None,
        average_tail: float = 0.0,
    ) -> None:
        if total_steps is None:
            total_steps = getattr(scheduler, "total_steps", None)
        explore = list(explore) if explore is not None else [LearningRate()]
        check_arguments(
            optimizer=optimizer,
            scheduler=scheduler,
            model=model,
            explore=explore,
            sync_every=sync_every,
            controller=controller,
            total_steps=total_steps,
            seed=seed,
            records=records,
            bucket_mib=bucket_mib,
            assignment=assignment,
            moments=moments,
            probe=probe,
            average_tail=average_tail,
        )
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.model = model
        self.sync_every = sync_every
        self.controller = controller
        self.total_steps = total_steps
        self.seed = seed
        self.replicas = replicas if isinstance(replicas, Replicas) else Replicas.of(replicas)
        self._records = records
        self._tail_steps = tail_steps(total_steps, average_tail) if total_steps is not None else range(0)
        self._averager = Averager(self.replicas, bucket_mib=bucket_mib)

        self._buffers = Buffers(model)
        self._assignment, self._probe = assignment, probe
        self._dials = _dials(explore, optimizer)
        self._positions(0)  # raises if the assignment does not fit
        self._lr_dials = [dial for dial in self._dials if dial.is_scheduled]
        if scout is not None:
            check_scout(
                scout, dials=self._lr_dials, model=model, replicas=self.replicas, total_steps=total_steps
            )
        differ = moments_differ(optimizer, self._dials)
        self._averages_moments = moments == "average" or (moments == "auto" and differ)
        fields = [field for dial in self._dials for field in dial.fields]
        self._panel = Panel(fields)
        self._panel_of_step = Panel([field for field in fields if not field.is_static])
        self._explores = any(dial.spread > 0 for dial in self._dials)
        self._num_controlled_rounds = 0
        if isinstance(controller, AnchoredController):
            check_anchored(controller, self._lr_dials, total_steps=total_steps, explores=self._explores)
        elif controller is not None:
            self._num_controlled_rounds = check_controller(
                controller,
                self._dials,
                sync_every=sync_every,
                total_steps=total_steps,
                explores=self._explores,
                has_probe=probe is not None,
            )
        self._measure = Measure(
            self.replicas,
            {
                "explore": explore,
                "sync_every": sync_every,
                "controller": controller,
                "total_steps": total_steps,
                "seed": seed,
                "bucket_mib": bucket_mib,
                "assignment": assignment,
                "moments": moments,
                "probe": probe is not None,
                "scout": scout,
                "average_tail": average_tail,
                "parameters": layout_text(averaged_tensors(optimizer, model) + self._buffers.tensors),
            },
        )
        # Records may be given to replica zero alone: every replica then takes part in its rounds.
        is_recorded = any(flag for (flag,) in exchange(self.replicas, [float(records is not None)]))
        self._has_rounds = self._explores or controller is not None or scout is not None or is_recorded

        # From here on things change.
        self._keeps_trace = records is not None and self.replicas.index == 0
        self._plan_is_closed_form = getattr(scheduler, "is_closed_form", False)
        self._num_open_blocks = 0
        self._warned: set[str] = set()
        self._optimizer_steps_are_seen = False
        self._optimizer_has_stepped = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_optimizer_step),
            optimizer.register_step_post_hook(self._after_optimizer_step),
            optimizer.register_state_dict_post_hook(self._after_optimizer_saved),
            optimizer.register_load_state_dict_post_hook(self._after_optimizer_loaded),
        ]
        self._scout = scout
        self.restart_at(max(0, getattr(scheduler, "last_epoch", 0)))
        self._has_moved = True  # nobody knows whether replicas start equal (warm_start)
        if scout is not None and self.num_steps == 0:
            self._begin_scout(scout)
        else:
            self._begin_anchor()

    # --- what users call ---------------------------------------------------------------------------

    @property
    def base(self) -> dict[str, float]:
        """The shared value of every explored hyperparameter."""
        return {dial.name: dial.base for dial in self._dials}

    @property
    def values(self) -> dict[str, float]:
        """What this replica uses."""
        return {dial.name: dial.value_with(dial.multiplier) for dial in self._dials}

    @property
    def multipliers(self) -> dict[str, float]:
        """This replica's factor on every base."""
        return {dial.name: dial.multiplier for dial in self._dials}

    @property
    def positions(self) -> dict[str, float]:
        """Where this replica stands in every spread, from -1 to 1."""
        return {dial.name: dial.position for dial in self._dials}

    def observe(self, loss: Tensor | float) -> None:
        """Take the loss of one micro-batch, without a step."""
        if self._has_rounds or self._anchor is not None:
            self._measure.add(loss)

    def step(self, loss: Tensor | float | None = None, *, skipped: bool = False) -> None:
        """Count one optimizer step; call it right after ``optimizer.step()``.

        Only steps that the optimizer took are counted: a call with no optimizer step since the last
        one (a gradient scaler found an infinity, gradients are being accumulated, a framework calls
        once per process) takes the loss and changes nothing else. Until the first step of the optimizer
        is seen, every call counts, so that a schedule can be looked at without training. Pass
        ``skipped=True`` for a step that the optimizer was asked for and did not take (a fused optimizer
        under a gradient scaler). While the scout runs, replicas skip at different times, each with its own
        gradients: such a step then counts, so that all end a trial together.
        """
        counts = skipped and self._scouting is not None
        if loss is not None and (self._has_rounds or self._anchor is not None):
            self._measure.add(loss)
        if self._optimizer_has_stepped:
            self._optimizer_has_stepped = False
        elif self._optimizer_steps_are_seen:
            skipped = True
        if skipped and not counts:
            return
        if self.total_steps is not None and self.num_steps >= self.total_steps:
            self._warn_once(
                "past the end",
                f"step() was called after total_steps={self.total_steps} steps: the schedule stays at its "
                "last value. Pass the true number of steps as total_steps",
                HdetWarning,
            )
        self.num_steps += 1
        if self._scouting is not None:
            self._step_scout(self._scouting)
            return
        if self._anchor is not None:
            self._step_anchor(self._anchor)
        if self._tail is not None and self.num_steps in self._tail_steps:
            self._tail.take(self._tail_parameters(), self.num_steps)
        is_end = self.num_steps == self.total_steps
        if self._has_rounds and (self.num_steps % self.sync_every == 0 or is_end):
            record = self._sync()
            if is_end:
                record.num_averaged_steps = self._put_tail()
            self._advance(self._panel)
            self._write(record)
        else:
            if is_end:
                self._put_tail()
            self._advance(self._panel_of_step)

    def converge(self) -> None:
        """Average the parameters now, within a round: before a save or an evaluation of your own.

        Collective. Multipliers and the controller are left as they are. While the scout runs there is nothing
        to average: its trials are thrown away.
        """
        if self._scouting is not None:
            return
        if self._has_rounds and (self._has_moved or self._converged_at != self.num_steps):
            self._write(self._measure_and_converge(ends_round=False))

    def finish(self) -> None:
        """End the run now, where fewer than ``total_steps`` steps were counted: skipped ones, an early stop.

        Converges, and puts the mean of the tail in place. Collective; after the last step it does nothing.
        """
        self.converge()
        self._put_tail()

    @contextmanager
    def base_values(self) -> Iterator[None]:
        """Within the block, this replica uses the shared values."""
        self._num_open_blocks += 1
        self._panel.put_plans()
        for dial in self._dials:
            dial.set_fields(multiplier=1.0)
        self._panel.put_values()
        try:
            yield
        finally:
            self._num_open_blocks -= 1
            if self._num_open_blocks == 0:
                self._panel.put_plans()
                for dial in self._dials:
                    dial.set_fields(dial.multiplier)
                self._panel.put_values()

    def state_dict(self) -> dict[str, Any]:
        """Numbers only, the same on every replica; loads with ``weights_only=True``.

        Call :meth:`converge` on every replica first (a sync has just done so): then one replica's
        checkpoint is everybody's, and training resumes to the bit. Not collective.
        """
        is_apart = self._explores and self._scouting is None and self._has_others
        if is_apart and (self._has_moved or self._converged_at != self.num_steps):
            warnings.warn(
                "the replicas' parameters differ, a checkpoint would keep one replica's only and drop "
                "this round's losses: call converge() on every replica before saving",
                NotConvergedWarning,
                stacklevel=2,
            )
        state: dict[str, Any] = {
            "version": 1,
            "num_steps": self.num_steps,
            "optimizer_steps_are_seen": self._optimizer_steps_are_seen,
            "losses": [list(row) for row in self._measure.table],
            "dials": {dial.name: dial.state() for dial in self._dials},
        }
        state["finders"] = self._finders_state()
        tail = self._tail
        state["tail"] = tail.state_dict() if tail is not None and tail.num_taken else None
        if hasattr(self.scheduler, "state_dict"):
            assert self.scheduler is not None
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint, also one of another number of replicas. Settings stay as built."""
        names, known = set(state_dict["dials"]), {dial.name for dial in self._dials}
        if names != known:
            raise ValueError(
                f"state_dict must hold the hyperparameters {sorted(known)}, got {sorted(names)}: "
                "build the ensemble with the parameter groups and explore= that it was saved with"
            )
        if self.scheduler is not None and "scheduler" in state_dict:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        for dial in self._dials:
            dial.load(state_dict["dials"][dial.name])
        finders = state_dict.get("finders", {})
        self._end_scout()
        self._num_scout_steps = finders.get("num_scout_steps", 0)
        self.restart_at(state_dict["num_steps"], narrow=False)
        self._load_finders(finders)
        tail = state_dict.get("tail")
        if self._tail is not None and tail is not None and tail["first_step"] >= self._tail_steps[0]:
            self._tail.load_state_dict(tail)  # else it belongs to a run that would have ended sooner
        self._optimizer_steps_are_seen |= state_dict["optimizer_steps_are_seen"]
        self._measure.clear(state_dict["losses"])

    def close(self) -> None:
        """Put the plan back in place and let go of the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._panel.put_plans()

    def begin_at(self, num_steps: int) -> None:
        """Take over a run that something else has trained for ``num_steps`` steps: too late for the scout."""
        self._end_scout()
        self.restart_at(num_steps)
        self._begin_anchor()

    def restart_at(self, num_steps: int, *, narrow: bool = True) -> None:
        """Begin, or begin again, after ``num_steps`` optimizer steps, with the bases as they are."""
        self._panel.put_plans()
        self.num_steps = num_steps
        self._converged_at = num_steps
        self._has_moved = False
        self._tail: Tail | None = None  # give its memory back first
        if self._tail_steps:
            self._tail = Tail(self._tail_parameters())
        self._recorded_at = num_steps
        self._measure.clear()
        for dial in self._dials:
            for field in dial.fields:
                field.trace.clear()
        self._assign_multipliers(narrow=narrow)
        self._panel.put_values(is_traced=self._keeps_trace)

    # --- a step ------------------------------------------------------------------------------------

    def _advance(self, panel: Panel) -> None:
        """Let the schedule write its next plan, then put this replica's values in its place."""
        if self._plan_is_closed_form:
            self._step_plan()
        else:
            # Comparing tensors waits for the device, so it is done at syncs only.
            if panel.put_plans(compare_tensors=panel is self._panel):
                self._warn_once(
                    "changed outside",
                    "a hyperparameter was changed by somebody else since the last step, so replicas did not "
                    "use their own values: give the schedule to the ensemble (scheduler=...) and do not step "
                    "it or write values yourself",
                    HdetWarning,
                )
            # After the last step there is nothing to plan for, and a OneCycleLR would go beyond its curve.
            is_over = self.total_steps is not None and self.num_steps >= self.total_steps
            if self.scheduler is not None and not is_over:
                self._step_plan()
        panel.put_values(is_traced=self._keeps_trace)

    def _step_plan(self) -> None:
        """Step the schedule, twice now and then after a scout: it has fewer steps left than were planned."""
        assert self.scheduler is not None
        if self._num_scout_steps == 0 or self.total_steps is None:
            self.scheduler.step()
            return
        num_steps = self.num_steps - self._num_scout_steps
        pace = self.total_steps / max(1, self.total_steps - self._num_scout_steps)
        for _ in range(round(num_steps * pace) - round((num_steps - 1) * pace)):
            self.scheduler.step()

    def _assign_multipliers(self, *, narrow: bool = True) -> None:
        """Draw this round's multipliers and tell the fields."""
        positions = self._positions(self._round)
        for dial in self._dials:
            if narrow:
                dial.narrow_spread()
            dial.position = positions[dial.name][self.replicas.index]
            (dial.multiplier,) = dial.multipliers([dial.position])
            dial.set_fields(dial.multiplier)

    def _positions(self, round_index: int) -> dict[str, list[float]]:
        names = [dial.name for dial in self._dials]
        return assign(self._assignment, self.replicas.count, self.seed, round_index, names)

    @property
    def _has_others(self) -> bool:
        """Whether there are other replicas to compare and to average with."""
        return self.replicas.communicates

    @property
    def _round(self) -> int:
        return self.num_steps // self.sync_every

    # --- a sync: measure, converge, steer, reassign --------------------------------------------------

    def _sync(self) -> RoundRecord:
        record, clock = self._measure_and_converge(), Clock()
        with record_function("hdet::steer"):
            steering = self._steer(record)
            self._measure.clear()
            self._assign_multipliers()
        record.weights, record.temperature = steering.weights, steering.temperature
        record.signal = steering.signal
        clock.lap("steer", record)
        return record

    def _measure_and_converge(self, *, ends_round: bool = True) -> RoundRecord:
        clock = Clock()
        round_index = max(0, self.num_steps - 1) // self.sync_every
        record = RoundRecord(round=round_index, step=self.num_steps, num_replicas=self.replicas.count)
        probe_loss = None
        if self._probe is not None and ends_round and self._uses_probe:
            with record_function("hdet::probe"):
                probe_loss = run_probe(self._probe, self.model)
            clock.lap("probe", record)
        with record_function("hdet::measure"):
            record.excluded = self._exchange(probe_loss)
        clock.lap("measure", record)
        with record_function("hdet::converge"):
            self._converge(record.excluded)
        clock.lap("converge", record)
        record.ends_round = ends_round
        record.converged = self._explores and self._has_others
        record.losses = self._measure.losses
        record.num_nonfinite_losses = [int(row.num_nonfinite) for row in self._measure.table]
        record.probes = self._measure.probes
        record.positions = self._positions(round_index)
        for dial in self._dials:
            multipliers = record.multipliers[dial.name] = dial.multipliers(record.positions[dial.name])
            record.values[dial.name] = [dial.value_with(multiplier) for multiplier in multipliers]
            if self._keeps_trace:
                # At a sync the plan has not moved on yet; within a round its newest value is not used yet.
                record.base_trace |= dial.take_trace(keep_newest=not ends_round)
        record.num_steps, self._recorded_at = self.num_steps - self._recorded_at, self.num_steps
        return record

    @property
    def _uses_probe(self) -> bool:
        """Whether a sync has a use for the probe: replicas that differ, or a gate that watches it."""
        return self._explores or (self._anchor is not None and self._anchor.watches_probe)

    def _exchange(self, probe_loss: float | None) -> dict[int, str]:
        is_healthy = not self._explores or self._averager.all_finite(self._tensors())
        return self._measure.exchange(self.num_steps, self.base, is_healthy=is_healthy, probe_loss=probe_loss)

    def _tensors(self) -> list[Tensor]:
        tensors = averaged_tensors(self.optimizer, self.model, with_moments=self._averages_moments)
        if self._anchor is not None:
            tensors += [average for group in self._anchor.average for average in group]
        if self._tail is not None and self._tail.num_taken:
            tensors += self._tail.mean
        return tensors

    def _converge(self, excluded: dict[int, str]) -> None:
        if self._explores:
            is_bad = self.replicas.index in excluded
            signals = [] if self._anchor is None else [self._anchor.sums]
            self._averager.average_(
                self._tensors() + self._buffers.tensors + signals,
                contribute=not is_bad,
                num_contributors=self.replicas.count - len(excluded),
            )
            self._buffers.heal()
            if is_bad and not self._averages_moments:
                for moment in moments_of(self.optimizer):  # they would spoil the parameters again
                    moment.nan_to_num_(0.0, 0.0, 0.0)
        self._converged_at, self._has_moved = self.num_steps, False

    def _steer(self, record: RoundRecord) -> Steering:
        controller = self.controller
        if self._anchor is not None:
            return Steering(signal=self._anchored_signal(record))
        assert not isinstance(controller, AnchoredController)
        if controller is None or self.num_steps < controller.start or self.num_steps % self.sync_every:
            return Steering()
        scores = {r: score for r, score in enumerate(self._measure.scores) if score is not None}
        compared = {r: score for r, score in scores.items() if r not in record.excluded}
        if self._has_others and self._explores:
            self._warn_if_silent(compared)
        return steer(
            self._dials,
            controller,
            losses=compared,
            num_replicas=self.replicas.count,
            positions=record.positions,
            num_rounds=self._num_controlled_rounds,
        )

    # --- the tail ------------------------------------------------------------------------------------

    def _tail_parameters(self) -> list[Tensor]:
        return averaged_tensors(self.optimizer, self.model)

    def _put_tail(self) -> int:
        """After the last step and its sync; the number of steps that the weights now are the mean of."""
        tail, parameters = self._tail, self._tail_parameters()
        self._tail = None
        if tail is None or not tail.num_taken:
            return 0
        if not tail.is_finite():  # on every replica alike, since they have converged
            _log.warning("step %d: the mean of the tail is not finite, the last weights stay", self.num_steps)
            return 0
        tail.put(parameters)
        return tail.num_taken

    def _write(self, record: RoundRecord) -> None:
        for dial in self._dials:
            record.base[dial.name] = dial.base
            planned = dial.fields[0].planned
            record.correction[dial.name] = dial.base / planned if planned else 1.0
            if dial.control is not None:
                record.velocity[dial.name] = dial.control.velocity
        if self.replicas.index == 0:
            if self._records is not None:
                self._records.write(record)
            for replica, why in record.excluded.items():
                _log.warning("step %d: replica %d left out: %s", record.step, replica, why)
            _log.info("step %d: losses %s, base %s", record.step, record.losses, record.base)

    # --- hooks on the optimizer ----------------------------------------------------------------------

    def _after_optimizer_step(self, *_: Any) -> None:
        self._optimizer_has_stepped = self._optimizer_steps_are_seen = self._has_moved = True

    def _after_optimizer_saved(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        # A saved optimizer holds the plan, not one replica's value: the same file from every replica.
        for dial in self._dials:
            for field in dial.fields:
                field.put_plan_into(state_dict)

    def _after_optimizer_loaded(self, _: Optimizer) -> None:
        # Loading replaces the parameter groups: find the fields again and put this replica's values.
        for dial in self._dials:
            for field in dial.fields:
                field.bind()
        self._panel.put_values()

    # --- checks and warnings ---------------------------------------------------------------------------

    def _warn_if_silent(self, compared: dict[int, float]) -> None:
        if not compared:
            self._warn_once(
                "no losses",
                "the controller saw no loss in this round: pass it, step(loss), or per micro-batch, "
                "observe(loss)",
                HdetWarning,
            )
        elif self._probe is None and len(compared) > 1 and len(set(compared.values())) == 1:
            # (Scores on one probe may well be equal, to the last bit, once training has settled.)
            self._warn_once(
                "identical losses",
                f"all replicas report the same loss ({next(iter(compared.values()))!r}), so the controller "
                "cannot compare them: pass each replica's own loss, not an all-reduced one",
                IdenticalLossWarning,
            )

    def _warn_once(self, key: str, text: str, category: type[Warning]) -> None:
        if key not in self._warned:
            self._warned.add(key)
            if self.replicas.index == 0:
                warnings.warn(text, category, stacklevel=4)


def _dials(explore: Sequence[Hyperparameter], optimizer: Optimizer) -> list[Dial]:
    dials = [dial for h in explore for dial in h.dials(optimizer)]
    names = [dial.name for dial in dials]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"explore must name each hyperparameter once, got {doubled} more than once")
    return dials
