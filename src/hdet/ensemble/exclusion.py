"""Which replicas are left out of a sync: those that are not finite, or not equal though they ought to be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.ensemble.loss_table import LossTable
from hdet.errors import AllReplicasFailedError
from hdet.replicas import Report

__all__ = ["excluded_replicas"]


def excluded_replicas(table: LossTable, reports: Sequence[Report], num_steps: int) -> dict[int, str]:
    """The replicas that are left out of weights and mean, with the reason; raises if none is healthy."""
    excluded: dict[int, str] = {}
    for r, (row, report) in enumerate(zip(table.rows, reports, strict=True)):
        if not report.is_finite:
            excluded[r] = "parameters are not finite"
        elif not report.is_equal:
            excluded[r] = "parameters differ from the other replicas'"
        elif row.num_nonfinite and not row.num_finite:
            excluded[r] = "no finite loss in this round"
        elif report.score is not None and not math.isfinite(report.score):
            excluded[r] = "the loss on the probe is not finite"
    if len(excluded) == len(reports):
        reasons = "; ".join(f"replica {r}: {why}" for r, why in excluded.items())
        raise AllReplicasFailedError(
            f"at step {num_steps} no replica is healthy ({reasons}). Nothing was averaged or saved: "
            "resume from the last checkpoint with a lower learning rate"
        )
    return excluded
