"""The law: what averaging a round's weights gains, over what an e-fold of steps gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from hdet.method.thermostat import Round, round_ends, slope
from research.compare.ledger import Record

__all__ = [
    "TARGET",
    "WINDOW",
    "best_lr",
    "crossing",
    "gain_and_progress",
    "interpolated",
    "log_ratio",
    "rounds_of",
]

WINDOW = (9, 16)
"""First and last round that are looked at, of 40."""
TARGET = 0.25
"""What averaging gains over what time gains, at the best learning rate."""
_CLIP = 6.0
"""Of a log ratio, where one of the two is not above zero."""


def rounds_of(record: Record, end: str = "end", mean: str = "mean") -> list[Round]:
    """The rounds of a saved run, as far as their losses are finite.

    Args:
        record: a line of the ledger.
        end: the column that is taken for the loss of the last weights.
        mean: the column that is taken for the loss of the mean.
    """
    columns, ends = record["rounds"], round_ends(record["steps"])
    rounds = []
    for k, (last, averaged) in enumerate(zip(columns[end], columns[mean], strict=True)):
        if last is None or averaged is None:
            break
        begin, step = ends[k], ends[k + 1]
        middle = step - (step - begin - 1) / 2
        rounds.append(Round(step, middle, columns["lr"][k], last, averaged, columns["train"][k]))
    return rounds


def gain_and_progress(
    rounds: Sequence[Round], window: tuple[int, int] = WINDOW
) -> tuple[float, float] | None:
    r"""E and P over some rounds; None if the run did not get there.

    .. math:: P = -\mathrm{slope}(\bar L_k \text{ on } \ln m_k), \qquad
        E = \mathrm{mean}_k \frac{L_k - \bar L_k + P \ln(t_k / m_k)}{\eta_k / \eta}

    :math:`L_k` and :math:`\bar L_k` are the losses of the last weights of a round and of their mean,
    :math:`t_k` and :math:`m_k` the steps at its end and in its middle, and
    :math:`\eta_k / \eta` its learning rate over the peak.

    >>> rounds = [Round(s, s / 2, 0.5, 3 - math.log(s), 3 - math.log(s) - 0.1, 0.0) for s in (2, 4, 8)]
    >>> [round(value, 3) for value in gain_and_progress(rounds, (1, 3))]
    [1.586, 1.0]
    """
    first, last = window
    if len(rounds) < last:
        return None
    seen = rounds[first - 1 : last]
    progress = -slope([math.log(r.middle) for r in seen], [r.mean for r in seen])
    gain = fmean((r.end - r.mean + progress * math.log(r.step / r.middle)) / r.lr for r in seen)
    return gain, progress


def log_ratio(found: tuple[float, float] | None) -> float | None:
    """ln(E / P); at its bounds where one of the two is not above zero, None where both are not.

    >>> log_ratio((1.0, 1.0)), log_ratio((1.0, -1.0)), log_ratio((-1.0, 1.0)), log_ratio((-1.0, -1.0))
    (0.0, 6.0, -6.0, None)
    """
    if found is None:  # the run died
        return _CLIP
    gain, progress = found
    if gain <= 0 and progress <= 0:
        return None
    if min(gain, progress) <= 0:
        return _CLIP if progress <= 0 else -_CLIP
    return max(-_CLIP, min(_CLIP, math.log(gain / progress)))


def interpolated(points: Mapping[float, float], at: float) -> float:
    """Linear between points; beyond the ends as at the end.

    >>> interpolated({0.0: 1.0, 1.0: 3.0}, 0.25), interpolated({0.0: 1.0, 1.0: 3.0}, 7.0)
    (1.5, 3.0)
    """
    xs = sorted(points)
    if at <= xs[0] or at >= xs[-1]:
        return points[xs[0] if at <= xs[0] else xs[-1]]
    high = next(i for i, x in enumerate(xs) if x >= at)
    low, share = high - 1, (at - xs[high - 1]) / (xs[high] - xs[high - 1])
    if math.inf in (points[xs[low]], points[xs[high]]):
        return math.inf
    return (1 - share) * points[xs[low]] + share * points[xs[high]]


def crossing(ratios: Mapping[float, float | None], target: float = TARGET) -> float | None:
    """Where ln(E / P) over ln LR passes the target upwards: the middle of all such places, None without any.

    >>> crossing({0.0: -1.0, 1.0: 3.0}, target=1.0), crossing({0.0: 1.0, 1.0: 2.0})
    (0.25, None)
    """
    known = {x: r - math.log(target) for x, r in ratios.items() if r is not None}
    xs = sorted(known)
    places = [
        a + (b - a) * -known[a] / (known[b] - known[a])
        for a, b in itertools.pairwise(xs)
        if known[a] < 0 <= known[b]
    ]
    if places:
        return fmean(places)
    return None


def best_lr(losses: Mapping[float, float]) -> float:
    """The ln LR of the lowest loss, by a parabola of ln loss through the lowest point and its neighbours.

    >>> best_lr({0.0: 2.0, 1.0: 1.0, 2.0: 2.0}), best_lr({0.0: 1.0, 1.0: 2.0})
    (1.0, 0.0)
    """
    xs = sorted(losses)
    i = min(range(len(xs)), key=lambda k: losses[xs[k]])
    if i in (0, len(xs) - 1) or not math.isfinite(losses[xs[i - 1]] + losses[xs[i + 1]]):
        return xs[i]
    low, middle, high = (math.log(losses[xs[k]]) for k in (i - 1, i, i + 1))
    bend = low - 2 * middle + high
    if bend <= 0:
        return xs[i]
    gap = (xs[i + 1] - xs[i - 1]) / 2
    return xs[i] + max(-gap / 2, min(gap / 2, gap * (low - high) / 2 / bend))
