"""Draw what averaging gains by learning rate, and where it led runs: python scripts/picture_of_thermostat.py.

Everything comes from the runs that `python -m research thermostat --out research/thermostat/records` made.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PICTURE = ROOT / "research" / "thermostat" / "records" / "thermostat.png"
GREY, RED, BLUE = "#8a8a8a", "#e45756", "#4c78a8"
FACTORS = (0.2, 0.3, 0.45, 0.67, 1.0, 1.5, 2.2, 3.3, 5.0)


def law(axes: Any, cases: list[Any]) -> None:
    """Draw E / P by learning rate: a thin line for each problem of the zoo, and the medians."""
    from research.thermostat.law import TARGET, interpolated

    for is_random, color, label in ((True, GREY, "random problems"), (False, RED, "the zoo")):
        lines = []
        for case in cases:
            known = {x: r for x, r in case.ratios().items() if r is not None}
            if case.is_random == is_random and known:
                lines.append([interpolated(known, case.best + math.log(f)) for f in FACTORS])
                if not is_random:
                    axes.plot(
                        FACTORS, [math.exp(v) for v in lines[-1]], color=color, alpha=0.2, linewidth=0.8
                    )
        middle = [math.exp(statistics.median(column)) for column in zip(*lines, strict=True)]
        axes.plot(FACTORS, middle, color=color, linewidth=2.5, label=f"{label}, median of {len(lines)}")
    axes.axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", ylim=(0.008, 60), xlabel="learning rate / best")
    axes.set_xticks([0.2, 0.45, 1, 2.2, 5], ["0.2", "0.45", "1", "2.2", "5"])
    axes.minorticks_off()
    axes.set_title("What averaging a round gains,\nover what an e-fold of steps gains")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def errors(axes: Any, cases: list[Any]) -> None:
    """Draw how far the learning rate of E / P = .25 is from the best."""
    from research.thermostat.law import crossing

    edges = [-3.5 + 0.5 * k for k in range(14)]
    groups = []
    for is_random in (False, True):
        places = [(crossing(c.ratios()), c.best) for c in cases if c.is_random == is_random]
        groups.append([max(-3.4, min(2.9, p - best)) for p, best in places if p is not None])
    axes.hist(groups, edges, stacked=True, color=[RED, GREY], label=["the zoo", "random problems"])
    axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
    ticks = [1 / 16, 1 / 4, 1, 4, 16]
    axes.set_xticks([math.log(t) for t in ticks], ["1/16", "1/4", "1", "4", "16"])
    axes.set(xlabel="learning rate at which it is 0.25, / best", ylabel="problems")
    axes.set_title("Where the law points")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def loop(axes: Any, records: list[Any]) -> None:
    """Draw where plain and steered runs end, from starts that are five times off."""
    from research.thermostat.experiment import ZOO
    from research.thermostat.verdict import over_best

    shown = [name for name in ZOO if over_best(records, name, "thermostat", 5.0)]
    for row, name in enumerate(reversed(shown)):
        for start, shift in ((0.2, 0.15), (5.0, -0.15)):
            ends = [over_best(records, name, method, start) for method in ("plain", "thermostat")]
            plain, steered = (min(19.0, statistics.fmean(end.values())) for end in ends)
            y = row + shift
            axes.plot([plain, steered], [y, y], color=GREY, linewidth=0.7)
            axes.plot(plain, y, "o", color=GREY, markersize=4)
            axes.plot(steered, y, "<" if start < 1 else ">", color=BLUE if start < 1 else RED, markersize=4)
    axes.set_yticks(range(len(shown)), [name.replace("_", " ") for name in reversed(shown)], fontsize=7)
    axes.set(xscale="log", xlim=(0.9, 20), xlabel="held-out loss / best")
    axes.set_xticks([1, 1.5, 2, 5, 10], ["1", "1.5", "2", "5", "10"])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.plot([], [], "o", color=GREY, label="plain")
    axes.plot([], [], "<", color=BLUE, label="steered, from x0.2")
    axes.plot([], [], ">", color=RED, label="steered, from x5")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title("Runs from a learning rate\nthat is five times off")


def main() -> None:
    """Draw all panels from the records."""
    from matplotlib.figure import Figure

    from research.thermostat.experiment import open_ledger
    from research.thermostat.summary import cases

    records = open_ledger(ROOT / "research" / "thermostat" / "records").records
    found = cases(records)
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    law(left, found)
    errors(middle, found)
    loop(right, records)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
