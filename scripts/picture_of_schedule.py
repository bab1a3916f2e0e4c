"""Draw the schedule of AutoLR from the code that trains: python scripts/picture_of_schedule.py."""

from __future__ import annotations

from pathlib import Path

from hdet.method.recipe import Recipe, tail_steps

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "schedule.png"
STEPS = 1000
LINE, TAIL, GREY = "#4c78a8", "#e45756", "#8a8a8a"


def main() -> None:
    """The learning rate over its peak, and what happens when."""
    from matplotlib.figure import Figure

    recipe = Recipe(total_steps=STEPS)
    first = tail_steps(STEPS, recipe.average_tail)[0]
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([recipe.shape(step) for step in range(STEPS)], color=LINE, linewidth=2)
    axes.axvspan(first, STEPS, color=TAIL, alpha=0.15, linewidth=0)
    axes.axvline(recipe.warmup * STEPS, color=GREY, linestyle=":", linewidth=1.2)
    for x, y, text, color in (
        (20, 0.75, "warm-up over 40 %\nof the steps", LINE),
        (415, 1.04, "the peak is what find_lr has found", "#222222"),
        (720, 0.75, f"linear anneal to\n{recipe.anneal_to:.0%} of the peak", LINE),
        (first - 8, 0.06, f"the tail: the mean of the weights\nof the last {recipe.average_tail:.1%}", TAIL),
    ):
        is_left = color == TAIL
        axes.text(x, y, text, color=color, fontsize=9.5, va="center", ha="right" if is_left else "left")
    axes.set(xlim=(0, STEPS), ylim=(-0.04, 1.12), xlabel="step", ylabel="learning rate / peak")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
