"""Merge rules: what replicas take from each other at a sync where each has its own gradients.

A new rule is a class here: its settings, the shares of its mean, and what it does to the tensors. The pure
functions run on anything that has arithmetic: floats in the examples, tensors in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from hdet.checks import require_number, require_number_or_choice
from hdet.method.controller import auto_temperature, softmax_weights

Array = Any  # a float, or anything with the arithmetic of one


# --- the rules ---------------------------------------------------------------------------------------


def best_weights(losses: Sequence[float]) -> list[float]:
    """All weight on the replica with the lowest loss; the first of equal ones.

    >>> best_weights([0.5, 0.2, 0.2])
    [0.0, 1.0, 0.0]
    """
    best = min(range(len(losses)), key=lambda r: losses[r])
    return [float(r == best) for r in range(len(losses))]


def inverse_norm_weights(norms: Sequence[float]) -> list[float]:
    r"""Weights that fall with the norm of the gradient, so that flat places count more.

    .. math:: w_r = \frac{1 / \lVert g_r \rVert}{\sum_s 1 / \lVert g_s \rVert}

    Replicas without any gradient share all of the weight. Dimlioglu and Choromanska 2024
    (arXiv:2403.04206), the form for whole models.

    >>> inverse_norm_weights([1.0, 3.0])
    [0.75, 0.25]
    >>> inverse_norm_weights([0.0, 3.0])
    [1.0, 0.0]
    >>> inverse_norm_weights([math.inf, math.inf])
    [0.5, 0.5]
    """
    if not all(norms) or all(math.isinf(norm) for norm in norms):
        flat = [float(norm == min(norms)) for norm in norms]
        return [one / math.fsum(flat) for one in flat]
    inverse = [1 / norm for norm in norms]
    return [one / math.fsum(inverse) for one in inverse]


def elastic_step(replica: Array, center: Array, *, strength: float, num_replicas: int) -> tuple[Array, Array]:
    r"""One pull between a replica and the center (EASGD). Returns the replica, and its vote on the center.

    .. math:: x_r' = x_r - \alpha (x_r - \tilde x), \qquad
              \tilde x' = \tilde x + \beta \Bigl(\frac1N \sum_r x_r - \tilde x\Bigr)
                        = \frac1N \sum_r \bigl(\tilde x + \beta (x_r - \tilde x)\bigr)

    ``strength`` is :math:`\beta`, and :math:`\alpha = \beta / N`. The new center is the mean of the votes.
    Zhang et al. 2015 (arXiv:1412.6651), eqs. 3 and 4 and their :math:`\beta = p \alpha`.

    >>> elastic_step(3.0, 1.0, strength=0.5, num_replicas=2)
    (2.5, 2.0)
    """
    apart = replica - center
    return replica - strength / num_replicas * apart, center + strength * apart


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


# --- their settings ----------------------------------------------------------------------------------


Copies = Mapping[str, Sequence[Array]]
"""Copies of the weights that a rule keeps, by name, each laid out as the weights."""


class AtSync(NamedTuple):
    """Holds what a rule works on at a sync."""

    here: Sequence[Array]
    """The weights of the replicas in this process."""
    copies: Copies
    """Kept by the rule."""
    average: Callable[[Sequence[Array]], None]
    """Gives every replica the mean of tensors, with the shares of :meth:`Merge.weights`."""
    num_replicas: int


class Merge:
    """Holds what all merge rules have in common."""

    compares_losses: ClassVar[bool] = False
    """Tells whether it needs a loss of every replica."""
    compares_gradients: ClassVar[bool] = False
    """Tells whether it needs the norm of every replica's last gradient."""
    stays_apart: ClassVar[bool] = False
    """Tells whether replicas still differ after a sync."""
    has_state: ClassVar[bool] = False
    """Tells whether it remembers something from round to round."""
    copies: ClassVar[tuple[str, ...]] = ()
    """Names of the copies of the weights that it keeps. ``velocity`` begins at zero."""
    merges_at_syncs: ClassVar[bool] = True
    """Tells whether replicas take anything from each other before the end of the run."""

    def local_from(self, total_steps: int | None) -> int:
        """The step from which on each replica has its own gradients."""
        return 0

    def weights(self, losses: Sequence[float], norms: Sequence[float]) -> list[float] | None:
        """The share of each replica in what they merge into; None for equal shares."""
        return None

    def approach(self, at: AtSync, *, joins: bool) -> None:
        """Change the weights that are here, and the copies, before replicas are averaged, if they are.

        Args:
            at: the weights and the copies, changed in place.
            joins: replicas are averaged next: before a save, and at the end of the run.
        """

    def put(self, at: AtSync, *, ends_round: bool) -> bool:
        """Change the weights after replicas were averaged; whether they were changed."""
        return False


@dataclass(frozen=True, kw_only=True)
class MeanMerge(Merge):
    """Every replica takes the mean of all (paper, eq. 3; local SGD, arXiv:1805.09767)."""


@dataclass(frozen=True, kw_only=True)
class LossWeightedMerge(Merge):
    """Every replica takes a mean in which a lower loss counts more, by the weights of the paper's eq. 4.

    >>> [round(w, 2) for w in LossWeightedMerge(temperature=1.0).weights([1.0, 2.0], [])]
    [0.73, 0.27]
    """

    compares_losses = True
    temperature: float | Literal["auto"] = "auto"
    """Softness of the weights; ``"auto"`` is the spread of the losses."""

    def __post_init__(self) -> None:
        require_number_or_choice("temperature", self.temperature, ("auto",), above=0)

    def weights(self, losses: Sequence[float], norms: Sequence[float]) -> list[float]:
        """See :func:`hdet.method.controller.softmax_weights`."""
        temperature = auto_temperature(losses) if self.temperature == "auto" else self.temperature
        return softmax_weights(losses, temperature)


@dataclass(frozen=True, kw_only=True)
class BestMerge(Merge):
    """Every replica takes what the one with the lowest loss holds, as in population-based training."""

    compares_losses = True

    def weights(self, losses: Sequence[float], norms: Sequence[float]) -> list[float]:
        """See :func:`best_weights`."""
        return best_weights(losses)


@dataclass(frozen=True, kw_only=True)
class ElasticMerge(Merge):
    """Replicas are pulled towards a center that follows them (EASGD); see :func:`elastic_step`.

    They stay apart. Before a save and at the end all take the center. It is one more copy of the parameters.
    """

    stays_apart = True
    has_state = True
    copies = ("center",)
    strength: float = 0.9
    """Moves the center so far towards the mean of the replicas at each sync. Each replica moves towards the
    center by this divided by the number of replicas."""

    def __post_init__(self) -> None:
        require_number("strength", self.strength, above=0, at_most=1)

    def approach(self, at: AtSync, *, joins: bool) -> None:
        """Pull every replica to the center, and the center to the mean of their votes."""
        told = {"strength": self.strength, "num_replicas": at.num_replicas}
        for weight, center in zip(at.here, at.copies["center"], strict=True):
            pulled, vote = elastic_step(weight.detach().to(center.dtype), center, **told)
            weight.copy_(pulled)
            center.copy_(vote)
        at.average(at.copies["center"])

    def put(self, at: AtSync, *, ends_round: bool) -> bool:
        """Let all take the center."""
        return _copy(at.copies["center"], at.here)


@dataclass(frozen=True, kw_only=True)
class OuterMerge(Merge):
    """An optimizer of its own takes the mean change of a round as its gradient (DiLoCo).

    See :func:`outer_step`. It keeps two more copies of the parameters.
    """

    has_state = True
    copies = ("anchor", "velocity")
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    """Of the outer optimizer, in Nesterov's form."""

    def __post_init__(self) -> None:
        require_number("lr", self.lr, above=0)
        require_number("momentum", self.momentum, at_least=0, below=1)

    def put(self, at: AtSync, *, ends_round: bool) -> bool:
        """Take one outer step from the anchor, and let all hold where it leads."""
        if not ends_round:
            return False
        anchors = at.copies["anchor"]
        for mean, anchor, velocity in zip(at.here, anchors, at.copies["velocity"], strict=True):
            wide = mean.detach().to(anchor.dtype)
            moved = outer_step(anchor, wide, velocity, lr=self.lr, momentum=self.momentum)
            anchor.copy_(moved[0])
            velocity.copy_(moved[1])
        return _copy(anchors, at.here)


@dataclass(frozen=True, kw_only=True)
class GradientNormMerge(Merge):
    r"""Replicas are pulled towards a mean in which a small gradient counts more (GRAWA).

    .. math:: x_r \leftarrow (1 - \lambda)\, x_r + \lambda \sum_s w_s x_s

    The weights are :func:`inverse_norm_weights`, ``pull`` is :math:`\lambda`. Replicas stay apart until
    the end or a save. There is one more copy of the parameters.
    """

    compares_gradients = True
    stays_apart = True
    copies = ("center",)
    pull: float = 0.5
    """Moves replicas so far towards the weighted mean."""

    def __post_init__(self) -> None:
        require_number("pull", self.pull, above=0, at_most=1)

    def weights(self, losses: Sequence[float], norms: Sequence[float]) -> list[float]:
        """See :func:`inverse_norm_weights`."""
        return inverse_norm_weights(norms)

    def approach(self, at: AtSync, *, joins: bool) -> None:
        """Pull every replica to the weighted mean, unless all take that mean itself."""
        if joins:
            return
        centers = at.copies["center"]
        _copy(at.here, centers)
        at.average(centers)
        for weight, center in zip(at.here, centers, strict=True):
            weight.lerp_(center.to(weight.dtype), self.pull)


@dataclass(frozen=True, kw_only=True)
class LateMerge(Merge):
    """Gradients are shared at first. Then replicas train alone, and at the end their mean is taken (SWAP).

    Gupta et al. 2020 (arXiv:2001.02312). It needs ``total_steps``.
    """

    stays_apart = True
    merges_at_syncs = False
    start: float = 0.75
    """Share of the run after which replicas train alone."""

    def __post_init__(self) -> None:
        require_number("start", self.start, above=0, below=1)

    def local_from(self, total_steps: int | None) -> int:
        """The step after the share of the run in which gradients are shared."""
        assert total_steps is not None, "checked when the ensemble was built"
        return max(1, round(self.start * total_steps))


def _copy(sources: Sequence[Array], targets: Sequence[Array]) -> bool:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return True
