"""Draw fan-out and converge as a real run did them: python scripts/picture_of_method.py [--again].

The task is `charlm` with eight virtual replicas and the paper's spread of 1/9. What the run saw is kept in
scripts/records/method.json, and --again makes it anew.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "scripts" / "records" / "method.json"
PICTURE = ROOT / "docs" / "figures" / "method.png"
STEPS, STEPS_PER_ROUND, NUM_REPLICAS, PEAK, SEED = 1000, 50, 8, 0.03, 0
FIRST_SHOWN, NUM_SHOWN = 300, 200
"""Four rounds around the peak."""
GREY, RED = "#8a8a8a", "#e45756"
RED_REPLICA = 7


def train() -> dict[str, Any]:
    """Train once. Keep the replicas' learning rates and places at every step, and what they said."""
    import torch

    import hdet
    from hdet.lab.tasks.charlm import CharLM

    task = CharLM()
    model = task.build_model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=STEPS, cycle_momentum=False)
    records = hdet.Records()
    probe = task.probe_batch()
    ensemble = hdet.VirtualEnsemble(
        model,
        optimizer,
        task.loss,
        num_replicas=NUM_REPLICAS,
        probe=[probe],
        scheduler=scheduler,
        explore=[hdet.LearningRate(spread=1 / 9)],
        sync_every=STEPS_PER_ROUND,
        total_steps=STEPS,
        records=records,
        seed=SEED,
    )
    streams = [task.train_batches(seed=SEED, replica=replica) for replica in range(NUM_REPLICAS)]

    def places() -> torch.Tensor:
        return torch.cat(list(ensemble.replicas.rows.matrices), dim=1).detach().clone()

    base, shown = [], []
    start = places().mean(dim=0)
    for step in range(1, STEPS + 1):
        base.append(scheduler.get_last_lr()[0])
        losses = ensemble.replicas.train_step(None, [next(stream) for stream in streams])
        if FIRST_SHOWN < step <= FIRST_SHOWN + NUM_SHOWN:
            now = places()
            mean = now.mean(dim=0)
            # With one shared gradient replicas lie on a line through their mean, along the step of the round.
            along = (mean - start) / (mean - start).norm()
            shown.append([round(x, 6) for x in ((now - mean) @ along).tolist()])
        ensemble.engine.step(losses)
        if step % STEPS_PER_ROUND == 0:
            start = places().mean(dim=0)
    keys = ("step", "multipliers", "probes")
    return {
        "base": base,
        "places": shown,
        "rounds": [{key: vars(record)[key] for key in keys} for record in records],
    }


def draw(run: dict[str, Any]) -> None:
    """Draw four rounds: the learning rates, the places of the replicas; and what all rounds said."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    steps = range(FIRST_SHOWN + 1, FIRST_SHOWN + NUM_SHOWN + 1)
    syncs = range(FIRST_SHOWN, FIRST_SHOWN + NUM_SHOWN + 1, STEPS_PER_ROUND)
    by_step = {record["step"]: record["multipliers"]["lr"] for record in run["rounds"]}
    for replica in range(NUM_REPLICAS):
        style: dict[str, Any] = {"color": RED, "linewidth": 2, "zorder": 3} if replica == RED_REPLICA else {}
        style = style or {"color": GREY, "linewidth": 0.9}
        for end in syncs[1:]:
            # The last step of a round is drawn twice: before the replicas are averaged, and after.
            of_round = range(end - STEPS_PER_ROUND, end)
            factor = by_step[end][replica]
            xs = [step + 1 for step in of_round]
            left.plot(xs, [factor * run["base"][step] for step in of_round], **style)
            apart = [run["places"][step - FIRST_SHOWN][replica] for step in of_round]
            middle.plot([xs[0] - 1, *xs, xs[-1]], [0, *apart, 0], **style)
    for axes in (left, middle):
        for sync in syncs:
            axes.axvline(sync, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", xlim=(steps[0] - 1, steps[-1] + 1))
    told: dict[str, Any] = {"color": RED, "fontsize": 9}
    left.set(ylabel="learning rate", title="Fan-out: eight replicas,\neight learning rates")
    left.text(0.97, 0.97, "one replica in red", transform=left.transAxes, ha="right", va="top", **told)
    middle.set(
        ylabel="position along the round's step,\nfrom the mean",
        title=f"Converge: averaged\nevery {STEPS_PER_ROUND} steps",
    )
    points = [
        (factor, 100 * (loss / statistics.fmean(record["probes"]) - 1))
        for record in run["rounds"]
        for factor, loss in zip(record["multipliers"]["lr"], record["probes"], strict=True)
    ]
    slope, error = slope_over_rounds(run["rounds"])
    right.plot(*zip(*points, strict=True), "o", color=GREY, markersize=3, alpha=0.5)
    ends = [1 - 1 / 9, 1 + 1 / 9]
    right.plot(ends, [100 * slope * math.log(end) for end in ends], color=RED, linewidth=2)
    right.set(
        xlabel="learning rate of a replica over the base",
        ylabel="loss on the probe, % from the mean",
        title="Compare: what the replicas\nsaid in all rounds",
    )
    said = f"+10 % learning rate:\n{10 * slope:+.3f} ± {10 * error:.3f} % loss"
    right.text(0.03, 0.97, said, transform=right.transAxes, va="top", **told)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def slope_over_rounds(rounds: list[dict[str, Any]]) -> tuple[float, float]:
    """Slope of the relative loss on the log learning rate: mean over rounds, and its standard error."""
    slopes = []
    for record in rounds:
        xs = [math.log(factor) for factor in record["multipliers"]["lr"]]
        mean = statistics.fmean(record["probes"])
        slopes.append(statistics.linear_regression(xs, [loss / mean for loss in record["probes"]]).slope)
    return statistics.fmean(slopes), statistics.stdev(slopes) / math.sqrt(len(slopes))


def main() -> None:
    """Train if need be, then draw."""
    parser = argparse.ArgumentParser(description="Draw fan-out and converge of a real run.")
    parser.add_argument("--again", action="store_true", help="train anew")
    if parser.parse_args().again or not RECORD.exists():
        what = {
            "command": "python scripts/picture_of_method.py --again",
            "task": "charlm",
            "steps": STEPS,
            "replicas": NUM_REPLICAS,
            "seed": SEED,
        }
        RECORD.write_text(json.dumps(what | train()) + "\n")
    draw(json.loads(RECORD.read_text()))
    print(PICTURE)


if __name__ == "__main__":
    main()
