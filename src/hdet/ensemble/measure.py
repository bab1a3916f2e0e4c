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
        self.unwatched = LossSum()
        """Of all replicas together, since the anchored controller last looked."""
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

    def take_own(self) -> LossSum:
        """This replica's losses since the last time anybody looked; waits for the device."""
        return self._meter.take()

    def put(self, losses: Sequence[LossSum]) -> None:
        """Add these losses to the table: of all replicas, or, where this one is alone, its own."""
        if len(losses) < len(self.table):  # more replicas were asked for: they say nothing
            (own,) = losses
            losses = [own if r == self._replicas.index else LossSum() for r in range(len(self.table))]
        self.table = [row.plus(loss) for row, loss in zip(self.table, losses, strict=True)]
        for loss in losses:
            self.unwatched = self.unwatched.plus(loss)

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
        return self.take(
            num_steps,
            losses=[LossSum(*report[:3]) for report in reports],
            are_healthy=[bool(report[3]) for report in reports],
            probes=None if probe_loss is None else [report[6] for report in reports],
        )

    def take(
        self,
        num_steps: int,
        *,
        losses: Sequence[LossSum],
        are_healthy: Sequence[bool],
        probes: Sequence[float] | None,
    ) -> dict[int, str]:
        """Add these losses of all replicas to the table; return who is to be left out, and why."""
        self.put(losses)
        self.probes = [] if probes is None else [x if math.isfinite(x) else None for x in probes]
        excluded: dict[int, str] = {}
        for r, (row, is_healthy) in enumerate(zip(self.table, are_healthy, strict=True)):
            if not is_healthy:
                excluded[r] = "parameters are not finite"
            elif row.num_nonfinite and not row.num_finite:
                excluded[r] = "no finite loss in this round"
            elif self.probes and self.probes[r] is None:
                excluded[r] = "the loss on the probe is not finite"
        if len(excluded) == len(self.table):
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
