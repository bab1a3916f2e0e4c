"""How often one round finds the right direction of several planted effects: `python -m benchmarks.designs`.

Eight replicas explore four hyperparameters at once. The loss of a replica is the sum of four planted effects
of its positions, of equal size and random sign, plus Gaussian noise. Counted is how often the sign of each
hyperparameter's signal is right, by assignment and by estimate.
"""

from __future__ import annotations

import random

from hdet.method.controller import auto_temperature, joint_signals, softmax_weights, weighted_deviation
from hdet.method.fan_out import assign

__all__ = ["correct_signs"]

NAMES = ("lr", "weight_decay", "dropout", "label_smoothing")
NUM_REPLICAS = 8


def correct_signs(design: str, estimate: str, noise: float, *, rounds: int = 4000, seed: int = 0) -> float:
    """Share of signs that are right, over rounds and hyperparameters.

    Args:
        design: how replicas are assigned, see :func:`hdet.method.fan_out.assign`.
        estimate: ``"joint"`` least squares, or the ``"paper"``'s eqs. 4-6 for each on its own.
        noise: standard deviation of the loss, in units of an effect.
        rounds: how many rounds.
        seed: of effects, noise and assignments.
    """
    generator = random.Random(seed)
    right = 0
    for k in range(rounds):
        columns = list(assign(design, NUM_REPLICAS, seed, k, NAMES).values())
        effects = [generator.choice((-1.0, 1.0)) for _ in NAMES]
        losses = [
            sum(effect * column[r] for effect, column in zip(effects, columns, strict=True))
            + generator.gauss(0, noise)
            for r in range(NUM_REPLICAS)
        ]
        if estimate == "joint":
            signals = joint_signals(columns, losses)
        else:
            weights = softmax_weights(losses, auto_temperature(losses))
            signals = [weighted_deviation(weights, column) for column in columns]
        # A signal is downhill: its sign is against that of the effect.
        right += sum(signal * effect < 0 for signal, effect in zip(signals, effects, strict=True))
    return right / (rounds * len(NAMES))


def main() -> None:
    """Print the table of docs/hyperparameters.md."""
    noises = (0.0, 0.5, 1.0, 1.5)
    print("| assignment | estimate | " + " | ".join(f"noise {noise:g}" for noise in noises) + " |")
    print("| --- | --- |" + " --- |" * len(noises))
    for design in ("random", "latin", "factorial"):
        for estimate in ("paper", "joint"):
            rates = [correct_signs(design, estimate, noise) for noise in noises]
            label = "eqs. 4-6 each" if estimate == "paper" else "joint least squares"
            print(f"| {design} | {label} | " + " | ".join(f"{100 * rate:.1f} %" for rate in rates) + " |")


if __name__ == "__main__":
    main()
