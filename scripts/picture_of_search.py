"""Draw a real search beside whole runs at every learning rate: python scripts/picture_of_search.py [--again].

The task is `charlm`, from a guess that is 100 times too low. What the search saw is kept in
scripts/records/search.json, and --again makes it anew. The whole runs are those of the comparison,
research/compare/records/charlm/compare.jsonl, of the same seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdet import FoundLR

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "scripts" / "records" / "search.json"
RUNS = ROOT / "research" / "compare" / "records" / "charlm" / "compare.jsonl"
PICTURE = ROOT / "docs" / "figures" / "search.png"
GUESS, SEED, STEPS, NUM_REPLICAS = 0.0005623, 0, 1000, 8
BAND, DOT, INK, GREY = "#4c78a8", "#e45756", "#222222", "#8a8a8a"


def search_and_train() -> tuple[FoundLR, float]:
    """What method hdet_find of the comparison does. The search is part of its steps."""
    import sys

    sys.path.insert(0, str(ROOT))
    from hdet import AutoLR, find_lr
    from hdet.lab.tasks.charlm import CharLM
    from hdet.lab.train.runner import evaluate
    from research.peers.base import Job, descend

    task, counts = CharLM(), {"steps": STEPS, "num_replicas": NUM_REPLICAS}
    job = Job(task=task, start_lr=GUESS, seed=SEED, optimizer_kind="adamw", **counts)
    model = job.build_model()
    optimizer = job.optimizer(model, GUESS)
    found = find_lr(model, optimizer, job.batches(), task.loss, total_steps=STEPS)
    rest = STEPS - found.num_steps
    auto = AutoLR(optimizer, total_steps=rest, model=model, found=found)
    descend(job, model, optimizer, job.batches(), rest, on_loss=auto.observe, after_step=auto.step)
    return found, evaluate(task, model)["loss"]


def draw(found: FoundLR, final_loss: float) -> None:
    """Left the search, right what whole runs say."""
    from matplotlib.figure import Figure

    runs = [json.loads(line) for line in RUNS.read_text().splitlines()]
    runs = [run for run in runs if run["seed"] == SEED and math.isfinite(run["final_loss"] or math.inf)]
    sweep = sorted((run["lr"], run["final_loss"]) for run in runs if run["method"] == "sweep")
    figure = Figure(figsize=(10, 4.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.axvspan(found.low[0], found.high[0], color=BAND, alpha=0.13, linewidth=0)
        axes.axvline(found.lr[0], color=INK, linewidth=1.6)
        axes.axvline(found.asked[0], color=GREY, linewidth=1.4, linestyle=":")
        axes.set(xscale="log", xlim=(4e-6, 3), xlabel="learning rate")
        axes.spines[["top", "right"]].set_visible(False)
    first = found.ramp[0][1]
    ramp = [(lr, loss) for lr, loss in found.ramp if loss < 1.3 * first]
    trials = [(lr, loss) for lr, loss in found.trials if loss is not None]
    left.plot(*zip(*ramp, strict=True), color=GREY, linewidth=1.4)
    left.plot(*zip(*trials, strict=True), "o-", color=DOT, linewidth=1.4, markersize=5)
    left.set(ylabel="loss", ylim=(1.9, 5.3), title=f"The search: {found.num_steps} steps before the run")
    label(left, 6e-6, 4.4, "the ramp:\nthe learning rate\ngrows until the\nloss turns", GREY)
    label(left, found.lr[0] * 1.2, 2.75, "eight short trials", DOT)
    label(left, found.asked[0] * 1.2, 2.1, f"your guess\n{found.asked[0]:.2g}", GREY)
    label(left, found.lr[0] * 1.2, 5.05, f"found {found.lr[0]:.2g}", INK)
    label(left, found.lr[0] * 1.2, 4.75, "likely in the band", BAND)
    shown = [point for point in sweep if point[1] < 5.3]
    right.plot(*zip(*shown, strict=True), "s-", color=GREY, linewidth=1.2, markersize=4)
    right.plot(found.lr[0], final_loss, "*", color=DOT, markersize=15)
    right.set(
        ylabel="held-out loss after the run", ylim=(1.6, 4.5), title=f"Was it right? {len(sweep)} whole runs"
    )
    label(right, 7e-6, 2.5, f"a sweep:\n{len(sweep)} runs of\n{STEPS} steps", GREY)
    ratio = final_loss / min(loss for _, loss in sweep)
    label(right, found.lr[0] * 1.2, 4.25, "one run with hdet:", DOT)
    label(right, found.lr[0] * 1.2, 4.0, f"{100 * (ratio - 1):.0f} % above the best", DOT)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def label(axes: Axes, x: float, y: float, text: str, color: str, align: str = "left") -> None:
    """A word beside what it names, instead of a legend."""
    axes.text(x, y, text, color=color, ha=align, va="center", fontsize=9.5)


def main() -> None:
    """Search if need be, then draw."""
    parser = argparse.ArgumentParser(description="Draw a real search beside whole runs.")
    parser.add_argument("--again", action="store_true", help="make the search anew")
    if parser.parse_args().again or not RECORD.exists():
        found, final_loss = search_and_train()
        what = {
            "command": "python scripts/picture_of_search.py --again",
            "task": "charlm",
            "replicas": NUM_REPLICAS,
            "seed": SEED,
            "final_loss": final_loss,
        }
        RECORD.write_text(json.dumps(what | dataclasses.asdict(found)) + "\n")
    from hdet import FoundLR

    saved = json.loads(RECORD.read_text())
    names = {field.name for field in dataclasses.fields(FoundLR)}
    draw(FoundLR(**{name: value for name, value in saved.items() if name in names}), saved["final_loss"])
    print(PICTURE)


if __name__ == "__main__":
    main()
