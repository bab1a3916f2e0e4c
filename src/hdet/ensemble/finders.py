"""Finders: the part of the engine that runs the scout and the anchored controller."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from hdet.core.anchored import AnchoredController
from hdet.core.controller import Controller, ControllerState
from hdet.core.scout import Scout
from hdet.ensemble.anchor import Anchor, decay_terms
from hdet.ensemble.clock import Clock
from hdet.ensemble.losses import LossSum
from hdet.ensemble.measure import Measure
from hdet.ensemble.probe import run_probe
from hdet.ensemble.scouting import Scouting, is_adaptive, set_local_gradients
from hdet.ensemble.snapshot import Snapshot
from hdet.ensemble.tensors import Buffers, averaged_tensors
from hdet.explore import Dial, Panel
from hdet.replicas import Averager, Replicas, exchange
from hdet.telemetry import RoundRecord

__all__ = ["Finders"]


class Finders:
    """What :class:`hdet.Ensemble` inherits; it owns everything that is declared here."""

    optimizer: Optimizer
    model: nn.Module | None
    replicas: Replicas
    controller: Controller | AnchoredController | None
    total_steps: int | None
    num_steps: int
    _averager: Averager
    _buffers: Buffers
    _dials: list[Dial]
    _lr_dials: list[Dial]
    _measure: Measure
    _panel: Panel
    _probe: Callable[[], Tensor | float] | None
    _scout: Scout | None = None
    _scouting: Scouting | None = None
    _snapshot: Snapshot | None = None
    _lead: Sequence[Tensor] = ()
    """Weights of the best trial of the scout's first stage, in host memory."""
    _num_scout_steps = 0
    _anchor: Anchor | None = None

    if TYPE_CHECKING:

        def restart_at(self, num_steps: int, *, narrow: bool = True) -> None: ...  # noqa: D102
        def _tensors(self) -> list[Tensor]: ...
        def _write(self, record: RoundRecord) -> None: ...

    # --- the scout -----------------------------------------------------------------------------------

    @property
    def is_scouting(self) -> bool:
        """Whether the scout is still at work: everything is put back when it ends."""
        return self._scouting is not None

    def _begin_scout(
        self, scout: Scout, saved: dict[str, Any] | None = None, snapshot: dict[str, Any] | None = None
    ) -> None:
        groups = self.optimizer.param_groups
        peaks = []
        for dial in self._lr_dials:
            held = [groups[getattr(field, "group_index", 0)] for field in dial.fields]
            peaks.append([float(g.get("max_lr", g.get("initial_lr", g["lr"]))) for g in held])
        self._scouting = Scouting(
            scout,
            self._lr_dials,
            num_replicas=self.replicas.count,
            total_steps=self.total_steps,
            peaks=peaks,
        )
        self._take_snapshot(scout, snapshot)
        if saved is not None:
            self._scouting.load_state_dict(saved)
            self._go_back(self._scouting)
        self._set_local_gradients(True)
        self._put_trial_values(self._scouting)

    def _go_back(self, scouting: Scouting) -> None:
        """Put everything back; in the second stage, with the weights of the best trial of the first."""
        self._restore_snapshot()
        if scouting.state.stage == "narrow":
            self._put_lead()

    def _put_trial_values(self, scouting: Scouting) -> None:
        self._panel.put_plans()
        for dial in self._dials:
            dial.set_fields(multiplier=1.0)
        scouting.put([self._trial_factor(scouting)] * len(scouting.dials))
        self._panel.put_values()

    def _trial_factor(self, scouting: Scouting) -> float:
        return scouting.factors[self.replicas.index]

    def _step_scout(self, scouting: Scouting) -> None:
        scouting.step += 1
        if scouting.step < scouting.num_steps:
            if scouting.step == scouting.tail_begins:
                self._forget_losses()
            self._put_trial_values(scouting)
            return
        clock = Clock()
        record = RoundRecord(round=0, step=self.num_steps, num_replicas=self.replicas.count, ends_round=False)
        with record_function("hdet::scout"):
            record.scout, leader = scouting.take(self._trial_scores(), self.num_steps)
            self._forget_losses()
            if leader is not None:
                self._keep_lead(leader)
            self._go_back(scouting)
            if scouting.state.stage != "done":
                self._put_trial_values(scouting)
            else:
                record.scout |= scouting.decide(
                    self.num_steps,
                    self._num_joined_batches,
                    is_adaptive=is_adaptive(self.optimizer),
                    is_corrected=isinstance(self.controller, AnchoredController),
                )
                self._end_scout()
                for dial in self._lr_dials:
                    dial.start_from(record.scout["factor"])
                self._num_scout_steps = self.num_steps
                self.restart_at(self.num_steps)
                self._begin_anchor(scouting.room_above(record.scout["factor"]))
        clock.lap("scout", record)
        self._write(record)

    def _trial_scores(self) -> list[float | None]:
        """How every replica has done: on the probe, or on its last training losses."""
        if self._probe is not None:
            score = run_probe(self._probe, self.model)
        else:
            mean = self._measure.take_own().mean
            score = math.nan if mean is None else mean
        if not self._averager.all_finite(self._tensors()):
            score = math.nan
        return [row if math.isfinite(row) else None for (row,) in exchange(self.replicas, [score])]

    def _end_scout(self) -> None:
        if self._scouting is not None:
            self._set_local_gradients(False)
            for dial in self._lr_dials:
                dial.held = None
        self._scouting = self._snapshot = None
        self._lead = ()

    def _take_snapshot(self, scout: Scout, saved: dict[str, Any] | None) -> None:
        self._snapshot = Snapshot(self.optimizer, self.model, on_cpu=scout.copy_on_cpu)
        if saved is not None:
            self._snapshot.load_state_dict(saved)

    def _snapshot_state(self) -> dict[str, Any]:
        assert self._snapshot is not None
        return self._snapshot.state_dict()

    def _keep_lead(self, leader: int) -> None:
        tensors = averaged_tensors(self.optimizer, self.model) + self._buffers.tensors
        self._averager.average_(tensors, contribute=self.replicas.index == leader, num_contributors=1)
        self._lead = [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    @torch.no_grad()
    def _put_lead(self) -> None:
        tensors = averaged_tensors(self.optimizer, self.model) + self._buffers.tensors
        for tensor, lead in zip(tensors, self._lead, strict=True):
            tensor.copy_(lead)

    def _forget_losses(self) -> None:
        self._measure.clear()

    def _restore_snapshot(self) -> None:
        assert self._snapshot is not None
        self._snapshot.restore()

    def _set_local_gradients(self, is_local: bool) -> None:
        set_local_gradients(self.model, is_local)

    @property
    def _num_joined_batches(self) -> int:
        """How many replicas' batches one gradient sees after the scout."""
        return self.replicas.count

    # --- the anchored controller -----------------------------------------------------------------------

    def _begin_anchor(self, ceiling: float = math.inf) -> None:
        """From here on the anchored controller counts: these weights are x0."""
        settings = self.controller
        if not isinstance(settings, AnchoredController):
            return
        assert self.total_steps is not None
        self._measure.unwatched = LossSum()
        dial_of_group = [0] * len(self.optimizer.param_groups)
        for i, dial in enumerate(self._lr_dials):
            for field in dial.fields:
                dial_of_group[getattr(field, "group_index", 0)] = i
        self._anchor = Anchor(
            settings,
            self._weights_by_group(),
            total_steps=max(1, self.total_steps - self._num_scout_steps),
            dial_of_group=dial_of_group,
            ceiling=ceiling,
        )

    def _weights_by_group(self) -> list[list[Tensor]]:
        return [list(group["params"]) for group in self.optimizer.param_groups]

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._anchor is not None and self._anchor.is_measuring:
            self._anchor.add_signal(
                [[p.grad for p in group["params"]] for group in self.optimizer.param_groups]
            )

    def _decay_terms(self) -> list[list[Tensor | None]]:
        count = max(1, self.num_steps - self._num_scout_steps)
        terms = []
        for group in self.optimizer.param_groups:
            moments = [self.optimizer.state.get(p, {}).get("exp_avg_sq") for p in group["params"]]
            terms.append(decay_terms(group, group["params"], moments, count, self.optimizer))
        return terms

    def _step_anchor(self, anchor: Anchor) -> None:
        if anchor.is_measuring:
            anchor.add_weights(self._weights_by_group())
        if not anchor.count_step():
            return
        anchor.add_decay(self._decay_terms())
        rows = self._exchange_signals(anchor.own_signals())
        finite = [row for row in rows if all(map(math.isfinite, row))] or rows
        loss, self._measure.unwatched = self._measure.unwatched.mean, LossSum()
        anchor.control([sum(column) / len(finite) for column in zip(*finite, strict=True)], loss)
        for dial, log_factor in zip(self._lr_dials, anchor.log_factors, strict=True):
            dial.correct(ControllerState(log_factor))
            dial.set_fields(self._own_multiplier(dial))

    def _exchange_signals(self, signals: list[float]) -> list[list[float]]:
        """Everybody's; their losses so far go with them."""
        rows = exchange(self.replicas, [*signals, *self._measure.take_own()])
        self._measure.put([LossSum(*row[len(signals) :]) for row in rows])
        return [list(row[: len(signals)]) for row in rows]

    def _own_multiplier(self, dial: Dial) -> float:
        return dial.multiplier

    # --- checkpoints -----------------------------------------------------------------------------------

    def _finders_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_scout_steps": self._num_scout_steps}
        if self._scouting is not None:
            state["scouting"] = self._scouting.state_dict()
            state["snapshot"] = self._snapshot_state()
            state["lead"] = list(self._lead)
        if self._anchor is not None:
            state["anchor"] = self._anchor.state_dict()
            state["unwatched"] = list(self._measure.unwatched)
        return state

    def _load_finders(self, state: dict[str, Any]) -> None:
        """After everything else is loaded."""
        if "scouting" in state and self._scout is not None:
            self._lead = state.get("lead", ())
            self._begin_scout(self._scout, state["scouting"], state["snapshot"])
            return
        self._begin_anchor()
        if self._anchor is not None and "anchor" in state:
            self._anchor.load_state_dict(state["anchor"])
            self._measure.unwatched = LossSum(*state.get("unwatched", ()))

    def _anchored_signal(self, record: RoundRecord) -> dict[str, float]:
        """At a sync: what the anchored controller last saw; its gate looks at the probe."""
        assert self._anchor is not None
        scores = [score for score in record.probes if score is not None]
        self._anchor.watch(self.num_steps, math.fsum(scores) / len(scores) if scores else None)
        record.gate = self._anchor.gate
        record.num_brakes = self._anchor.num_brakes
        return {d.name: signal for d, signal in zip(self._lr_dials, self._anchor.signals, strict=True)}
