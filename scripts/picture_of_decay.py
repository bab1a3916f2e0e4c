"""Draw how held-out data moves the weight decay: python scripts/picture_of_decay.py [--again].

The task is `charlm` on 20,000 characters, which repeat, once with a fixed weight decay of 0.03 and once with
one that is found in the run. What the runs saw is kept in scripts/records/decay.json, and --again makes it
anew, in about a minute.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "scripts" / "records" / "decay.json"
PICTURE = ROOT / "docs" / "figures" / "decay.png"
STEPS, PEAK, START, SEED, CHARACTERS = 1000, 0.02, 0.03, 0, 20_000
SCALES = [0.75, 0.8, 0.84, 0.88, 0.92, 0.96, 1.0, 1.04, 1.08, 1.12, 1.16, 1.2]
SHOWN = (300, 500, 700, 900)
"""Steps whose valleys are drawn."""
GREY, RED = "#8a8a8a", "#e45756"


def train(*, explores: bool) -> dict[str, Any]:
    """Train once. At every look keep the held-out loss at several scales of the decayed weights."""
    import torch

    import hdet
    from hdet.lab.tasks.charlm import CharLM
    from hdet.replicas.probe import scaled

    task = CharLM(characters=CHARACTERS)
    model = task.build_model(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=START)
    probe = hdet.Probe([task.probe_batch()], task.loss)
    explored = {"controllers": [hdet.HeldOutWeightDecay()], "probe": probe} if explores else {}
    auto = hdet.AutoLR(optimizer, total_steps=STEPS, model=model, **explored)
    looks = []
    for step, batch in zip(range(1, STEPS + 1), task.train_batches(seed=SEED), strict=False):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        auto.step(loss)
        if step % (STEPS // 20) == 0 and step < STEPS:
            valley = []
            with torch.no_grad(), scaled(list(model.parameters())) as put:
                for scale in SCALES:
                    put(scale)
                    valley.append(round(probe(model).mean().item(), 5))
            decay = optimizer.param_groups[0]["weight_decay"]
            looks.append({"step": step, "valley": valley, "weight_decay": decay})
    with torch.no_grad():
        final = probe(model).mean().item()
    return {"looks": looks, "final": final}


def draw(run: dict[str, Any]) -> None:
    """Draw the valleys of both runs, and where value and loss went."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, name, title in (
        (left, "fixed", f"Weight decay {START}, fixed:\nsmaller weights would do better"),
        (middle, "explored", "Weight decay found in the run:\nthe bottom comes closer"),
    ):
        looks = [look for look in run[name]["looks"] if look["step"] in SHOWN]
        for shade, look in zip((0.35, 0.55, 0.75, 1.0), looks, strict=True):
            axes.plot(SCALES, look["valley"], color=RED, alpha=shade, label=f"step {look['step']}")
            lowest = min(zip(look["valley"], SCALES, strict=True))
            axes.plot(lowest[1], lowest[0], "o", color=RED, alpha=shade, markersize=5)
        axes.axvline(1, color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xlabel="weights of the model, times", title=title)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    left.set_ylabel("loss on the probe")
    low = min(
        value for run_ in (run["fixed"], run["explored"]) for x in run_["looks"] for value in x["valley"]
    )
    high = (
        max(look["valley"][SCALES.index(1.0)] for look in run["fixed"]["looks"] if look["step"] in SHOWN)
        + 0.15
    )
    for axes in (left, middle):
        axes.set_ylim(low - 0.05, high)
    for name, color in (("fixed", GREY), ("explored", RED)):
        steps = [look["step"] for look in run[name]["looks"]]
        losses = [look["valley"][SCALES.index(1.0)] for look in run[name]["looks"]]
        right.plot([*steps, STEPS], [*losses, run[name]["final"]], color=color, label=f"loss, {name}")
    right.set(
        xlabel="step",
        ylabel="loss on the probe",
        title="Loss on the probe, and the\nweight decay that was found",
    )
    other = right.twinx()
    looks = run["explored"]["looks"]
    xs, ys = [look["step"] for look in looks], [look["weight_decay"] for look in looks]
    other.plot(xs, ys, color=RED, linestyle="--", drawstyle="steps-post", label="weight decay found")
    other.set_yscale("log")
    other.set_ylim(START / 3, 2 * max(ys))
    right.set_ylim(right.get_ylim()[0] - 0.25)
    other.set_ylabel("weight decay")
    lines = [*right.get_lines(), *other.get_lines()]
    right.legend(
        lines, [str(line.get_label()) for line in lines], frameon=False, fontsize=8, loc="lower left"
    )
    for axes in (left, middle, right):
        axes.spines[["top"]].set_visible(False)
    other.spines[["top"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


def main() -> None:
    """Train if need be, then draw."""
    parser = argparse.ArgumentParser(description="Draw how held-out data moves the weight decay.")
    parser.add_argument("--again", action="store_true", help="train anew")
    if parser.parse_args().again or not RECORD.exists():
        what = {
            "command": "python scripts/picture_of_decay.py --again",
            "task": f"charlm, characters={CHARACTERS}",
            "steps": STEPS,
            "seed": SEED,
        }
        runs = {"fixed": train(explores=False), "explored": train(explores=True)}
        RECORD.write_text(json.dumps(what | runs) + "\n")
    draw(json.loads(RECORD.read_text()))
    print(PICTURE)


if __name__ == "__main__":
    main()
