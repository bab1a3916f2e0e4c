"""Which replicas are left out of a sync: not finite, not equal though they ought to be, or far behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hdet.ensemble.loss_table import LossTable
from hdet.errors import AllReplicasFailedError
from hdet.method.outliers import outliers
from hdet.replicas import Report

_LEAST_LOSSES = 20
"""A mean over fewer losses is too noisy to say that a replica has fallen behind."""


def excluded_replicas(
    table: LossTable, reports: Sequence[Report], num_steps: int, *, finds_outliers: bool = False
) -> dict[int, str]:
    """The replicas that are left out of weights and mean, with the reason; raises if none is healthy.

    Args:
        table: losses of the round.
        reports: what is known of each.
        num_steps: where the ensemble stands.
        finds_outliers: leave those out too whose loss is far above the others'.
    """
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
    if finds_outliers:
        healthy = [
            row.mean if r not in excluded and row.num_finite >= _LEAST_LOSSES else None
            for r, row in enumerate(table.rows)
        ]
        excluded |= dict.fromkeys(sorted(outliers(healthy)), "its loss is far above the others'")
    return excluded
