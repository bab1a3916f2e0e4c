"""Merge rules: what replicas take from each other at a sync where each has its own gradients.

A rule is a class: its settings, what it keeps, and what it does to the tensors. ``docs/local-training.md``
shows how to write one. The pure functions run on anything that has arithmetic: floats in the examples,
tensors in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from hdet.checks import require_number

Array = Any  # a float, or anything with the arithmetic of one


def outer_step(
    anchor: Array, mean: Array, velocity: Array, *, lr: float, momentum: float
) -> tuple[Array, Array]:
    r"""One step of Nesterov's method on what a round has changed (DiLoCo). Returns anchor and velocity.

    .. math:: \Delta = a - \frac1N \sum_r x_r, \qquad v' = \mu v + \Delta, \qquad
              a' = a - \eta\,(\Delta + \mu v')

    ``anchor`` is :math:`a`, what the round began with, ``lr`` is :math:`\eta`, ``momentum`` is
    :math:`\mu`. It is ``torch.optim.SGD(nesterov=True)`` on the outer gradient :math:`\Delta`. Douillard et
    al. 2023 (arXiv:2311.08105), algorithm 1. With ``lr=1`` and ``momentum=0`` it is the mean.

    >>> outer_step(1.0, 0.5, 0.0, lr=0.5, momentum=0.5)
    (0.625, 0.5)
    """
    change = anchor - mean
    velocity = momentum * velocity + change
    return anchor - lr * (change + momentum * velocity), velocity


class AtSync(NamedTuple):
    """Holds what a rule works on at a sync. It changes the tensors in place."""

    weights: Sequence[Array]
    """Of the replicas in this process: a tensor for each parameter, or a matrix with a row per replica."""
    copies: Mapping[str, Sequence[Array]]
    """What the rule keeps, by the names in :attr:`Merge.copies`, each laid out as the weights."""
    num_replicas: int
    ends_round: bool
    """False where replicas become equal within a round, for a save."""
    joins: bool
    """Replicas must be equal afterwards."""
    join: Callable[[], None]
    """Gives every replica the mean of all: of weights, buffers and the optimizer's moments. Collective."""
    average: Callable[[Sequence[Array]], None]
    """Gives every replica the mean of such tensors, as the weights. Collective."""


class Merge:
    """Lets replicas take the mean at every sync. A rule of your own says what it does otherwise.

    Write it as a frozen dataclass, so that ranks can compare its settings. What it remembers from round to
    round are :attr:`copies`, which are saved with the ensemble.
    """

    compares_losses: ClassVar[bool] = False
    """A mean has the :meth:`shares` of the rule. It needs a loss of every replica."""
    stays_apart: ClassVar[bool] = False
    """Replicas need not be equal after a sync. They still are before a save, and at the end of the run."""
    copies: ClassVar[Mapping[str, float]] = {}
    """Names copies of the weights that it keeps, in float32 at least. Each begins as the weights times this
    number: 1 or 0."""

    def shares(self, losses: Sequence[float]) -> list[float]:
        """Return the share of each replica in a mean.

        Args:
            losses: of the replicas that are not left out: on the probe if there is one, else the mean
                training losses of the round.
        """
        return [1 / len(losses)] * len(losses)

    def merge(self, at: AtSync) -> None:
        """Change the weights and the copies.

        Where ``at.joins`` is true and the rule did not call ``at.join()``, it is called afterwards.
        """

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({told})"  # ranks compare it: no address of an object


@dataclass(frozen=True, kw_only=True)
class MeanMerge(Merge):
    """Every replica takes the mean of all (paper, eq. 3; local SGD, arXiv:1805.09767)."""


@dataclass(frozen=True, kw_only=True)
class OuterMerge(Merge):
    """An optimizer of its own takes the mean change of a round as its gradient (DiLoCo).

    See :func:`outer_step`. It keeps two more copies of the parameters.
    """

    copies: ClassVar = {"anchor": 1, "velocity": 0}
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    """Of the outer optimizer, in Nesterov's form."""

    def __post_init__(self) -> None:
        require_number("lr", self.lr, above=0)
        require_number("momentum", self.momentum, at_least=0, below=1)

    def merge(self, at: AtSync) -> None:
        """Take one outer step from the anchor, and let all hold where it leads."""
        at.join()
        if not at.ends_round:
            return
        for mean, anchor, velocity in zip(at.weights, *at.copies.values(), strict=True):
            wide = mean.to(anchor.dtype)
            moved = outer_step(anchor, wide, velocity, lr=self.lr, momentum=self.momentum)
            anchor.copy_(moved[0])
            velocity.copy_(moved[1])
            mean.copy_(anchor)
