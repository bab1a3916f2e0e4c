"""Draw the records of a run: the replicas' losses, their learning rates, and the learned correction.

python examples/plot_records.py runs/charlm/records.jsonl picture.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import hdet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path, help="a file of round records (JSON lines)")
    parser.add_argument("picture", type=Path, help="where to write the picture (png, svg or pdf)")
    parser.add_argument("--name", default="lr", help="which hyperparameter to draw (default lr)")
    args = parser.parse_args()
    records = [record for record in hdet.read_records(args.records) if record.ends_round]
    if not records:
        raise SystemExit(f"{args.records} holds no finished round")
    draw(records, args.name, args.picture)
    print(f"wrote {args.picture}")


def draw(records: list[hdet.RoundRecord], name: str, path: Path) -> None:
    steps = [record.step for record in records]
    figure, (loss_axis, value_axis, factor_axis) = plt.subplots(
        1, 3, figsize=(12, 3.4), constrained_layout=True
    )
    colors = plt.get_cmap("viridis")

    for record in records:
        for loss, multiplier in zip(record.losses, record.multipliers[name], strict=True):
            if loss is not None:
                rank = sorted(record.multipliers[name]).index(multiplier)
                color = colors(rank / max(1, record.num_replicas - 1))
                loss_axis.plot(record.step, loss, "o", color=color, markersize=3.5)
    loss_axis.set(title="loss of each replica, per round", xlabel="step", ylabel="training loss")

    start = 0
    for record in records:
        trace = record.base_trace.get(name, [])
        trace = trace * record.num_steps if len(trace) == 1 else trace
        span = range(start, start + len(trace))
        for rank, multiplier in enumerate(sorted(record.multipliers[name])):
            color = colors(rank / max(1, record.num_replicas - 1))
            value_axis.plot(span, [base * multiplier for base in trace], color=color, linewidth=0.8)
        value_axis.plot(span, trace, color="black", linewidth=1.2)
        start = record.step
    value_axis.set(title="learning rate: base and replicas", xlabel="step")

    factor_axis.step(steps, [record.correction[name] for record in records], where="post", color="black")
    factor_axis.axhline(1, color="gray", linewidth=0.6)
    factor_axis.set(title="correction learned by the controller", xlabel="step")
    for axis in (loss_axis, value_axis, factor_axis):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
