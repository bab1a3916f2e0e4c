"""Intervals: whether two ways to train differ by more than chance, in crashes and in losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

CHANCE = 0.05
"""A difference is told where chance alone has one as large less often than this."""

Runs = Mapping[int, tuple[float, bool]]
"""By seed: the final loss, NaN where there is none, and whether the run crashed."""


def fisher(crashed: int, count: int, other_crashed: int, other_count: int) -> float:
    """Test two shares by Fisher's exact test: how often chance makes them differ as much (two-sided p).

    >>> round(fisher(1, 10, 8, 10), 4), round(fisher(0, 3, 3, 3), 4)
    (0.0055, 0.1)
    """
    total = crashed + other_crashed
    ways = [math.comb(count, k) * math.comb(other_count, total - k) for k in range(total + 1)]
    return sum(way for way in ways if way <= ways[crashed]) / sum(ways)


def mostly(crashed: int, count: int) -> float:
    """Test whether most seeds crash: how often a coin falls so (one-sided p of the binomial test).

    >>> round(mostly(9, 10), 4), round(mostly(8, 10), 4)
    (0.0107, 0.0547)
    """
    return sum(math.comb(count, k) for k in range(crashed, count + 1)) / 2**count


def student(degrees: int) -> float:
    """Give Student's t that leaves out 5 % on both sides together.

    >>> round(student(1), 3), round(student(9), 4), round(student(30), 4)
    (12.706, 2.2622, 2.0423)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # bisection on the angle, whose tangent is t over the root of the degrees
        angle = (low + high) / 2
        term = math.sin(angle) * (math.cos(angle) if degrees % 2 else 1.0)
        inside = 0.0
        for k in range(2 + degrees % 2, degrees + 1, 2):
            inside, term = inside + term, term * math.cos(angle) ** 2 * (k - 1) / k
        inside = 2 / math.pi * (angle + inside) if degrees % 2 else inside
        low, high = (angle, high) if inside < 1 - CHANCE else (low, angle)
    return math.tan(low) * math.sqrt(degrees)


def sign_of(values: Sequence[float]) -> tuple[int, float, float]:
    """Give the sign of the mean as far as it can be told, the mean, and the half-width of its 95 % interval.

    >>> sign_of([5.0]), sign_of([1.9, 2.0, 2.1])[0], sign_of([1.0, 2.0, 3.0])[:2]
    ((0, 5.0, inf), 1, (0, 2.0))
    """
    count, mean, half = len(values), statistics.fmean(values), math.inf
    if count > 1:
        half = student(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return (0 if abs(mean) <= half or not mean else int(math.copysign(1, mean))), mean, half


def compare(ours: Runs, theirs: Runs) -> tuple[int, str]:
    """Tell which of two ways to train is better: 1 for the first, -1 for the second, 0 if nobody can tell.

    Crashes come first: shares that Fisher's test tells apart decide. Else the losses do, by the mean of their
    differences over the seeds that both have. Text says the numbers and names the test.

    >>> steady, broken = {s: (3.0 + s, False) for s in range(5)}, {s: (9.0, True) for s in range(5)}
    >>> compare(steady, broken)
    (1, 'crashed 0/5 against 5/5 (Fisher p 0.0079)')
    >>> compare(steady, {s: (3.1 + s, False) for s in range(5)})
    (1, 'lower by 0.1000 ± 0.0000 (t, 5 seeds)')
    """
    crashes = [sum(crash for _, crash in runs.values()) for runs in (ours, theirs)]
    told = []
    if sum(crashes):
        p = fisher(crashes[0], len(ours), crashes[1], len(theirs))
        told.append(f"crashed {crashes[0]}/{len(ours)} against {crashes[1]}/{len(theirs)} (Fisher p {p:.2g})")
        if p < CHANCE:
            return (1 if crashes[0] * len(theirs) < crashes[1] * len(ours) else -1), told[0]
    differences = [theirs[seed][0] - ours[seed][0] for seed in ours.keys() & theirs.keys()]
    differences = [difference for difference in differences if math.isfinite(difference)]
    if not differences:
        return 0, "; ".join([*told, "no seed has both losses"])
    sign, mean, half = sign_of(differences)
    of = f"t, {len(differences)} seeds" if len(differences) > 1 else "one seed"
    told.append(f"lower by {mean:.4f}{f' ± {half:.4f}' if math.isfinite(half) else ''} ({of})")
    return sign, "; ".join(told)
