"""What held-out data said of the weight decay: whether smaller weights would score better, at each look."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hdet.records import RoundRecord

_LAST_LOOKS = 4
"""Looks that tell how it was at the end."""


class Slope(NamedTuple):
    """Tells by how much the held-out loss rises per e-fold by which weights shrink, with its error."""

    step: int
    slope: float
    error: float


@dataclass(frozen=True)
class Looks:
    """All looks at held-out data by which one weight decay was moved."""

    name: str
    slopes: list[Slope]
    first: float
    """The weight decay at first, ..."""
    last: float
    """... and at the end."""

    @property
    def side(self) -> str:
        """``smaller`` or ``larger`` weights, whichever score better at the end; empty within two errors."""
        ends = self.slopes[-_LAST_LOOKS:]
        slope = statistics.fmean(look.slope for look in ends)
        # All looks see the same examples, so that many are not surer than one.
        error = math.sqrt(statistics.fmean(look.error**2 for look in ends))
        if abs(slope) <= 2 * error:
            return ""
        return "smaller" if slope < 0 else "larger"

    @property
    def verdict(self) -> str:
        """Say what held-out data asks for at the end."""
        verdicts = {"smaller": "smaller weights would still help", "larger": "smaller weights would not help"}
        return f"At the end {verdicts.get(self.side, 'it is not clear whether smaller weights would help')}"


def what_held_out_data_said(records: Sequence[RoundRecord]) -> list[Looks]:
    """List the looks at held-out data of every weight decay that was moved by them.

    >>> told = {"round": 0, "num_replicas": 1, "slope_error": {"weight_decay": 0.1}}
    >>> records = [
    ...     RoundRecord(step=10, base={"weight_decay": 0.3}, slope={"weight_decay": -0.5}, **told),
    ...     RoundRecord(step=20, base={"weight_decay": 0.6}, slope={"weight_decay": -0.4}, **told),
    ... ]
    >>> [(one.last, one.verdict) for one in what_held_out_data_said(records)]
    [(0.6, 'At the end smaller weights would still help')]
    """
    found = []
    for name in dict.fromkeys(name for record in records for name in record.slope):
        slopes = [
            Slope(record.step, record.slope[name], record.slope_error.get(name, 0.0))
            for record in records
            if math.isfinite(record.slope.get(name, math.nan))
            and math.isfinite(record.slope_error.get(name, 0.0))
        ]
        began = (trace[0] for record in records if (trace := record.base_trace.get(name)))
        bases = [record.base[name] for record in records if name in record.base]
        if slopes and bases:
            found.append(Looks(name, slopes, next(began, bases[0]), bases[-1]))
    return found
