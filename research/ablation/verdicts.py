"""Verdicts: which of the paper's claims the runs bear out, by a rule that is stated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hdet.lab.ablation import controller_start
from hdet.lab.intervals import CHANCE, compare, fisher, mostly, sign_of
from research.ablation.summary import Case, Result

__all__ = ["VERDICT_RULE", "Claim", "Verdict", "claims", "compare_rows"]

Verdict = Literal["holds", "does not hold", "cannot be told", "not run"]

VERDICT_RULE = (
    "Two rows are compared by their crashes first: where Fisher's exact test tells the shares of seeds apart "
    "(two-sided p below .05), the row with fewer is better. Else their losses are compared, also those of "
    "crashed runs where they are finite: by the mean of the differences seed by seed. A claim holds if the "
    "95 % interval of that mean (Student's t) is on its side of zero, does not hold if it is on the other, "
    "and cannot be told if it has zero in it. Claims 1a and 1b compare the crashes of full HDET and of plain "
    "training at High. They do not hold, either, where more seeds crash than a fair coin would have it "
    "(binomial test, p below .05). Claims marked ' are those at the best plain LR, not at High as in the "
    "paper. One verdict in twenty sees a difference where there is only chance."
)


@dataclass(frozen=True)
class Claim:
    """A claim, the verdict, and the numbers behind it."""

    number: str
    text: str
    verdict: Verdict
    why: str


def error_text(half: float, digits: int = 4) -> str:
    """The half-width of an interval behind a mean; one seed has none.

    >>> error_text(0.25), error_text(math.inf)
    (' ± 0.2500', ' (one seed)')
    """
    return f" ± {half:.{digits}f}" if math.isfinite(half) else " (one seed)"


def compare_rows(better: Result, worse: Result) -> tuple[Verdict, str]:
    """Whether the first row does better than the second, and the numbers."""
    names = f"{better.row.name} {better.loss_text} against {worse.row.name} {worse.loss_text}"
    if not (better.runs and worse.runs):
        return "not run", names
    sign, why = compare(better.outcomes, worse.outcomes)
    return _verdict(sign), f"{names}: {why}"


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
            Claim("2a", "HDET ends lower than the conservative baseline", *compare_rows(full, low)),
            Claim("2b", "HDET ends lower than the best plain LR", *compare_rows(full, best)),
            *(_part(case, "high", "", *part) for part in _PARTS if part[0] not in _AT_BEST_ONLY),
            _decay_order(case, full, "4"),
        ]
    full = case.result("hdet", "best")
    return [
        *found,
        Claim("2a'", "HDET ends lower than the conservative baseline", *compare_rows(full, low)),
        *(_part(case, "best", "'", *part) for part in _PARTS),
        _decay_order(case, full, "4'"),
    ]


def _part(case: Case, at: str, mark: str, number: str, text: str, lower: str, higher: str) -> Claim:
    return Claim(number + mark, text, *compare_rows(case.result(lower, at), case.result(higher, at)))


def _stability(case: Case, number: str, key: str) -> Claim:
    assert case.chosen is not None
    full = case.result(key, "high")
    gradients = "local" if key == "hdet_local" else "shared"
    text = f"HDET with {gradients} gradients recovers, or does not break, where plain training does"
    plain = case.result("grid", "high")
    keys = ("equal", "plain_decay", "local_sgd", "warm_init", "hdet_checkpoint", "plain_checkpoint")
    rows = [full, plain, *(case.result(other, "high") for other in keys)]
    why = f"at {case.chosen.high:g} crashed: " + ", ".join(
        f"{'plain' if r is plain else r.row.name} {r.num_crashed}/{len(r.runs)}{_p_text(full, r)}"
        for r in rows
    )
    if not case.chosen.breaks:
        return Claim(number, text, "cannot be told", f"no LR up to {case.chosen.high:g} breaks a plain run")
    if not full.runs:
        return Claim(number, text, "not run", why)
    peaks = [max(loss or 0.0 for _, loss in run["train_losses"]) for run in full.runs.values()]
    untrained = statistics.fmean(run["untrained_loss"] for run in full.runs.values())
    why += (
        f"; on the way its training loss rises to {min(peaks):.3g} to {max(peaks):.3g}, untrained models "
        f"have {untrained:.3g}"
    )
    differs = fisher(full.num_crashed, len(full.runs), plain.num_crashed, len(plain.runs)) < CHANCE
    is_less = full.num_crashed * len(plain.runs) < plain.num_crashed * len(full.runs)
    if differs and is_less:
        return Claim(number, text, "holds", why)
    is_broken = differs or mostly(full.num_crashed, len(full.runs)) < CHANCE
    return Claim(number, text, "does not hold" if is_broken else "cannot be told", why)


def _p_text(full: Result, other: Result) -> str:
    """What Fisher's test says of the crashes of two rows."""
    if other is full or not (full.runs and other.runs):
        return ""
    return f" (p {fisher(full.num_crashed, len(full.runs), other.num_crashed, len(other.runs)):.2g})"


def together(cases: Sequence[Case]) -> list[str]:
    """The crashes at High of all cases that have one, added up: a line for each row beside full HDET."""
    broken = [case for case in cases if case.chosen is not None and case.chosen.breaks]
    said = []
    for key, others in (("hdet", ("grid", "equal", "plain_decay")), ("hdet_local", ("grid", "local_sgd"))):
        full = [case.result(key, "high") for case in broken]
        for other in others:
            counts = [
                sum(count)
                for rows in (full, [case.result(other, "high") for case in broken])
                for count in ([r.num_crashed for r in rows], [len(r.runs) for r in rows])
            ]
            if counts[1] and counts[3]:
                name = "plain training" if other == "grid" else broken[0].result(other, "high").row.name
                said.append(
                    f"{full[0].row.name} {counts[0]} of {counts[1]}, {name} {counts[2]} of {counts[3]} "
                    f"(p {fisher(*counts):.2g})"
                )
    return said


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
