"""Verdicts: which of the paper's claims the runs bear out, by a rule that is stated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hdet.lab.ablation import controller_start
from research.ablation.summary import Case, Result
from research.peers.base import load_package

__all__ = ["VERDICT_RULE", "Claim", "Verdict", "claims", "compare_losses", "sign_of"]

Verdict = Literal["holds", "does not hold", "cannot be told", "not run"]

VERDICT_RULE = (
    "Losses are compared by their differences seed by seed: a claim holds if the 95 % interval of the "
    "mean difference (Student's t) is on its side of zero, does not hold if it is on the other, and "
    "cannot be told if it has zero in it. A row with a crash is not lower than one without; a row "
    "without is lower than one that crashes on most seeds. Claims 1a and 1b hold if full HDET crashes on no "
    "seed at High, and does not hold if it crashes on most. Claims marked ' are those at the best "
    "plain LR, not at High as in the paper."
)


@dataclass(frozen=True)
class Claim:
    """A claim, the verdict, and the numbers behind it."""

    number: str
    text: str
    verdict: Verdict
    why: str


def sign_of(differences: Sequence[float]) -> tuple[int, float, float]:
    """The sign of the mean as far as it can be told, the mean, and the half-width of its 95 % interval.

    >>> sign_of([1.0, 2.0, 3.0])[0], sign_of([1.9, 2.0, 2.1])[0], sign_of([5.0])
    (0, 1, (0, 5.0, inf))
    """
    count, mean = len(differences), statistics.fmean(differences)
    if count < 2:
        return 0, mean, math.inf
    stats = load_package("scipy").stats
    half = float(stats.t.ppf(0.975, count - 1) * stats.sem(differences))
    return (0 if abs(mean) <= half else int(math.copysign(1, mean))), mean, half


def error_text(half: float, digits: int = 4) -> str:
    """The half-width of an interval behind a mean; one seed has none.

    >>> error_text(0.25), error_text(math.inf)
    (' ± 0.2500', ' (one seed)')
    """
    return f" ± {half:.{digits}f}" if math.isfinite(half) else " (one seed)"


def compare_losses(lower: Result, higher: Result) -> tuple[Verdict, str]:
    """Whether the first row ends lower than the second, and the numbers."""
    names = f"{lower.row.name} {lower.loss_text} against {higher.row.name} {higher.loss_text}"
    if not (lower.runs and higher.runs):
        return "not run", names
    seeds = sorted(lower.runs.keys() & higher.runs.keys())
    if len(seeds) < 2:
        return "cannot be told", f"{names}: {'one' if seeds else 'no'} seed has both"
    if lower.num_crashed and not higher.num_crashed:
        return "does not hold", names
    if higher.num_crashed and not lower.num_crashed:
        is_most = 2 * higher.num_crashed > len(higher.runs)
        return ("holds" if is_most else "cannot be told"), names
    if lower.num_crashed:
        return "cannot be told", f"{names}: both crash"
    pairs = [(lower.runs[s]["final_loss"], higher.runs[s]["final_loss"]) for s in seeds]
    sign, mean, half = sign_of([b - a for a, b in pairs])
    return _verdict(sign), f"{names}: lower by {mean:.4f}{error_text(half)}"


def _verdict(sign: int) -> Verdict:
    return "holds" if sign > 0 else "does not hold" if sign < 0 else "cannot be told"


_PARTS = (
    ("2b", "HDET ends lower than plain training", "hdet", "grid"),
    ("2c", "HDET with floor-matching ends lower than plain training", "hdet_floor", "grid"),
    ("3a", "the warm start's noise adds", "hdet", "hdet_no_warm_start"),
    ("3b", "the controller adds", "hdet", "hdet_no_controller"),
    ("3c", "the spread adds to equal replicas with the same decay", "hdet", "equal"),
    ("3d", "HDET adds to a plain run with the same decay", "hdet", "plain_decay"),
    ("3e", "spread, noise and averaging add without a controller", "hdet_no_controller", "grid"),
    ("3f", "HDET adds to a plain run from the same checkpoint", "hdet_checkpoint", "plain_checkpoint"),
    ("3g", "the spread adds to equal replicas from it, same decay", "hdet_checkpoint", "equal_checkpoint"),
    ("3h", "noise on the checkpoint adds", "hdet_checkpoint", "hdet_checkpoint_only"),
)
"""Number, claim, the row that is to end lower, and the row that it is compared with, at one learning rate."""
_AT_BEST_ONLY = ("2b", "2c", "3e", "3g", "3h")


def claims(case: Case) -> list[Claim]:
    """The paper's four claims, in parts where they have some; none while there is no best learning rate."""
    if case.chosen is None:
        return []
    found = [_stability(case, "1a", "hdet"), _stability(case, "1b", "hdet_local")]
    low, best = case.result("plain", "low"), case.result("grid", "best")
    if case.chosen.breaks:
        full = case.result("hdet", "high")
        found += [
            Claim("2a", "HDET ends lower than the conservative baseline", *compare_losses(full, low)),
            Claim("2b", "HDET ends lower than the best plain LR", *compare_losses(full, best)),
            *(_part(case, "high", "", *part) for part in _PARTS if part[0] not in _AT_BEST_ONLY),
            _decay_order(case, full, "4"),
        ]
    full = case.result("hdet", "best")
    return [
        *found,
        Claim("2a'", "HDET ends lower than the conservative baseline", *compare_losses(full, low)),
        *(_part(case, "best", "'", *part) for part in _PARTS),
        _decay_order(case, full, "4'"),
    ]


def _part(case: Case, at: str, mark: str, number: str, text: str, lower: str, higher: str) -> Claim:
    return Claim(number + mark, text, *compare_losses(case.result(lower, at), case.result(higher, at)))


def _stability(case: Case, number: str, key: str) -> Claim:
    assert case.chosen is not None
    full = case.result(key, "high")
    gradients = "local" if key == "hdet_local" else "shared"
    text = f"HDET with {gradients} gradients trains stably where plain training diverges"
    keys = ("grid", key, "plain_decay", "local_sgd", "warm_init", "hdet_checkpoint", "plain_checkpoint")
    rows = [case.result(key, "high") for key in keys]
    why = f"at {case.chosen.high:g} crashed: " + ", ".join(
        f"{'plain' if r.row.key == 'grid' else r.row.name} {r.num_crashed}/{len(r.runs)}" for r in rows
    )
    if not case.chosen.breaks:
        return Claim(number, text, "cannot be told", f"no LR up to {case.chosen.high:g} breaks a plain run")
    if not full.runs:
        return Claim(number, text, "not run", why)
    if len(full.runs) < 2 or 0 < 2 * full.num_crashed <= len(full.runs):
        return Claim(number, text, "cannot be told", why)
    return Claim(number, text, "does not hold" if full.num_crashed else "holds", why)


def _decay_order(case: Case, full: Result, number: str) -> Claim:
    """All groups start from one rate and share the fixed decay, so that only the signal can part them."""
    text = "by its signal the controller decays the transformer's LR faster than that of biases and norms"
    start = controller_start(case.facts["steps"])
    by_seed = [
        {
            name.partition(".")[2]: statistics.fmean(math.log(lr) for step, lr in curve if step > start)
            for name, curve in record["lrs"].items()
        }
        for record in full.runs.values()
        if not record["crashed"]
    ]
    if not full.runs:
        return Claim(number, text, "not run", "-")
    groups = sorted({name for means in by_seed for name in means})
    if not {"transformer", "no_decay"} <= set(groups):
        why = "the task must have groups 'transformer' and 'no_decay'" if groups else "every run crashed"
        return Claim(number, text, "cannot be told", why)
    gaps = [means["no_decay"] - means["transformer"] for means in by_seed]
    sign, mean, half = sign_of(gaps)
    orders = "; ".join(" < ".join(sorted(means, key=lambda name: means[name])) for means in by_seed)
    why = f"log LR apart by {mean:.3f}{error_text(half, 3)}; lowest to highest, by seed: {orders}"
    return Claim(number, text, _verdict(sign), why)
