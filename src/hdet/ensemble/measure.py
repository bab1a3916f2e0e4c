"""Measure: the one small exchange of a sync, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hdet.ensemble.losses import LossMeter, LossSum
from hdet.errors import AllReplicasFailedError, ConfigurationMismatchError
from hdet.replicas import Replicas, exchange, require_same_settings
from hdet.replicas.exchange import digest

__all__ = ["Measure"]


class Measure:
    """This replica's losses, and the table of everybody's that the replicas share.

    Building one is collective and raises on every replica if their settings differ.
    """

    def __init__(self, replicas: Replicas, settings: Mapping[str, object]) -> None:
        require_same_settings(replicas, settings)
        self._replicas = replicas
        self._meter = LossMeter()
        self.add = self._meter.add
        self.clear()

    def clear(self, table: Sequence[Sequence[float]] = ()) -> None:
        """Begin a round, or continue one from a saved table.

        The table belongs to the replicas that filled it: for another number of them it is dropped.
        """
        num_replicas = self._replicas.count
        self._meter.take()
        self.probes: list[float | None] = []
        self.table = [LossSum()] * num_replicas
        if len(table) == num_replicas:
            self.table = [LossSum(*row) for row in table]

    @property
    def scores(self) -> list[float | None]:
        """What replicas are compared by: the loss on the probe, or the mean training loss."""
        return self.probes or self.losses

    @property
    def losses(self) -> list[float | None]:
        """Mean loss of every replica; None where it saw no finite one."""
        return [row.mean for row in self.table]

    def exchange(
        self, num_steps: int, base: Mapping[str, float], *, is_healthy: bool, probe_loss: float | None = None
    ) -> dict[int, str]:
        """Add everybody's losses to the table; return who is to be left out, and why. Collective."""
        replicas = self._replicas
        mine = [
            *self._meter.take(),
            float(is_healthy),
            float(num_steps),
            digest(repr(dict(base))),
            math.nan if probe_loss is None else probe_loss,
        ]
        reports = exchange(replicas, mine)
        if len(reports) < replicas.count:  # alone, though more replicas were asked for: they say nothing
            silent = [0.0, 0.0, 0.0, *mine[3:-1], math.nan]
            reports = [mine if r == replicas.index else silent for r in range(replicas.count)]
        _require_in_step([report[4] for report in reports], [report[5] for report in reports])
        self.table = [row.plus(LossSum(*report[:3])) for row, report in zip(self.table, reports, strict=True)]
        self.probes = [] if probe_loss is None else [x if math.isfinite(x) else None for *_, x in reports]
        excluded: dict[int, str] = {}
        for r, (row, report) in enumerate(zip(self.table, reports, strict=True)):
            if not report[3]:
                excluded[r] = "parameters are not finite"
            elif row.num_nonfinite and not row.num_finite:
                excluded[r] = "no finite loss in this round"
            elif probe_loss is not None and self.probes[r] is None and replicas.communicates:
                excluded[r] = "the loss on the probe is not finite"
        if len(excluded) == replicas.count:
            reasons = "; ".join(f"replica {r}: {why}" for r, why in excluded.items())
            raise AllReplicasFailedError(
                f"at step {num_steps} no replica is healthy ({reasons}). Nothing was averaged or saved: "
                "resume from the last checkpoint with a lower learning rate"
            )
        return excluded


def _require_in_step(steps: Sequence[float], bases: Sequence[float]) -> None:
    remedy = "call step() on every replica for the same optimizer steps, load the same checkpoint everywhere"
    if len(set(steps)) > 1:
        shown = [int(step) for step in steps]
        raise ConfigurationMismatchError(f"replicas must sync at the same step, got steps {shown}: {remedy}")
    if len(set(bases)) > 1:
        shown = [f"{int(base):012x}" for base in bases]
        raise ConfigurationMismatchError(
            f"replicas must share the same base values, got fingerprints {shown}: {remedy}"
        )
