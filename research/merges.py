"""Five published merge rules that gained nothing here, as users of :class:`hdet.Merge`, with their presets.

``docs/local-training.md`` has a table of them with what was measured. A preset returns arguments of
:class:`hdet.Ensemble` and :class:`hdet.VirtualEnsemble`::

    ensemble = hdet.Ensemble(optimizer, model=model, total_steps=1000, **easgd())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import hdet
from hdet.checks import require_number, require_number_or_choice
from hdet.method.controller import auto_temperature, softmax_weights
from hdet.method.merges import AtSync
from hdet.presets import local_sgd

Loss = Callable[[nn.Module, Any], Tensor]

# --- rules that weigh the replicas -------------------------------------------------------------------


def best_weights(losses: Sequence[float]) -> list[float]:
    """All weight on the replica with the lowest loss; the first of equal ones.

    >>> best_weights([0.5, 0.2, 0.2])
    [0.0, 1.0, 0.0]
    """
    best = min(range(len(losses)), key=lambda r: losses[r])
    return [float(r == best) for r in range(len(losses))]


@dataclass(frozen=True, kw_only=True)
class BestMerge(hdet.Merge):
    """Every replica takes what the one with the lowest loss holds, as in population-based training."""

    compares_losses = True

    def shares(self, losses: Sequence[float]) -> list[float]:
        """See :func:`best_weights`."""
        return best_weights(losses)


def pbt(*, sync_every: int = 1000, spread: float = 0.2) -> dict[str, Any]:
    """Population-based training: all take the best replica's weights and learning rate, then vary it again.

    Jaderberg et al. 2017, arXiv:1711.09846, with their factors of 0.8 and 1.2 at the ends of the spread.
    There the worst fifth copies one of the best fifth, and only these change their learning rate. Here all
    copy the best. It replaces your schedule. Pass ``probe=``, or the training losses decide.

    >>> pbt()["merge"], pbt()["controllers"][0].form
    (BestMerge(), 'paper')
    """
    # At this temperature all weight is on the best, and eq. 7 then moves the base to its value.
    takes_the_best = hdet.Controller(form="paper", temperature=1e-12, momentum=0.0, step_size=1.0)
    return _settings(BestMerge(), sync_every) | {
        "explore": [hdet.LearningRate(spread)],
        "controllers": [takes_the_best],
        "moments": "average",
    }


@dataclass(frozen=True, kw_only=True)
class LossWeightedMerge(hdet.Merge):
    """Every replica takes a mean in which a lower loss counts more, by the weights of the paper's eq. 4.

    >>> [round(share, 2) for share in LossWeightedMerge(temperature=1.0).shares([1.0, 2.0])]
    [0.73, 0.27]
    """

    compares_losses = True
    temperature: float | Literal["auto"] = "auto"
    """Softness of the weights; ``"auto"`` is the spread of the losses."""

    def __post_init__(self) -> None:
        require_number_or_choice("temperature", self.temperature, ("auto",), above=0)

    def shares(self, losses: Sequence[float]) -> list[float]:
        """See :func:`hdet.method.controller.softmax_weights`."""
        temperature = auto_temperature(losses) if self.temperature == "auto" else self.temperature
        return softmax_weights(losses, temperature)


def loss_weighted(*, sync_every: int = 8) -> dict[str, Any]:
    """Local SGD with a mean in which a lower loss counts more.

    >>> loss_weighted()["merge"]
    LossWeightedMerge(temperature='auto')
    """
    return local_sgd(sync_every=sync_every) | {"merge": LossWeightedMerge()}


# --- rules that let replicas stay apart --------------------------------------------------------------


def elastic_step(replica: Any, center: Any, *, strength: float, num_replicas: int) -> tuple[Any, Any]:
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


@dataclass(frozen=True, kw_only=True)
class ElasticMerge(hdet.Merge):
    """Replicas are pulled towards a center that follows them (EASGD); see :func:`elastic_step`.

    They stay apart. Before a save and at the end all take the center.
    """

    stays_apart = True
    copies: ClassVar = {"center": 1}
    strength: float = 0.9
    """Moves the center so far towards the mean of the replicas at each sync. Each replica moves towards the
    center by this divided by the number of replicas."""

    def __post_init__(self) -> None:
        require_number("strength", self.strength, above=0, at_most=1)

    def merge(self, at: AtSync) -> None:
        """Pull every replica to the center, and the center to the mean of their votes."""
        told = {"strength": self.strength, "num_replicas": at.num_replicas}
        centers = at.copies["center"]
        for weight, center in zip(at.weights, centers, strict=True):
            pulled, vote = elastic_step(weight.to(center.dtype), center, **told)
            weight.copy_(pulled)
            center.copy_(vote)
        at.average(centers)
        if at.joins:
            at.join()
            for weight, center in zip(at.weights, centers, strict=True):
                weight.copy_(center)


def easgd(*, sync_every: int = 10, strength: float = 0.9) -> dict[str, Any]:
    """Elastic averaging SGD: replicas and a center pull at each other.

    Zhang et al. 2015, arXiv:1412.6651: the synchronous form, a period of 10 and a strength (their beta) of
    0.9. The paper takes the gradient and the pull at the same point. Here the pull follows the step. With
    momentum in your SGD it is close to their EAMSGD.

    >>> easgd()["merge"]
    ElasticMerge(strength=0.9)
    """
    return _settings(ElasticMerge(strength=strength), sync_every)


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


def gradient_norm(loss: Loss) -> Loss:
    """Make a function that scores a model by the norm of its gradient on a batch, for :class:`hdet.Probe`.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> gradient_norm(lambda m, x: m(x).sum())(model, torch.tensor([[3.0], [1.0]]))
    tensor(4.)
    """

    def norm_of(model: nn.Module, batch: Any) -> Tensor:
        # Leaves of their own: those of the model hold the gradients of the run, or need none.
        leaves = {f"model.{name}": p.detach().requires_grad_() for name, p in model.named_parameters()}
        with torch.enable_grad():
            total = torch.func.functional_call(_Scored(model, loss), leaves, (batch,))
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])

    return norm_of


class _Scored(nn.Module):
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


@dataclass(frozen=True, kw_only=True)
class GradientNormMerge(hdet.Merge):
    r"""Replicas are pulled towards a mean in which a small gradient counts more (GRAWA).

    .. math:: x_r \leftarrow (1 - \lambda)\, x_r + \lambda \sum_s w_s x_s

    The weights are :func:`inverse_norm_weights`, ``pull`` is :math:`\lambda`. Replicas are compared by a
    probe whose loss is :func:`gradient_norm`. They stay apart until the end or a save.
    """

    compares_losses = True
    stays_apart = True
    pull: float = 0.5
    """Moves replicas so far towards the weighted mean."""

    def __post_init__(self) -> None:
        require_number("pull", self.pull, above=0, at_most=1)

    def shares(self, losses: Sequence[float]) -> list[float]:
        """See :func:`inverse_norm_weights`."""
        return inverse_norm_weights(losses)

    def merge(self, at: AtSync) -> None:
        """Pull every replica to the weighted mean, unless all take that mean itself."""
        if at.joins:
            return
        centers = [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in at.weights]
        at.average(centers)
        for weight, center in zip(at.weights, centers, strict=True):
            weight.lerp_(center.to(weight.dtype), self.pull)


def grawa(batches: Iterable[Any], loss: Loss, *, sync_every: int = 16, pull: float = 0.5) -> dict[str, Any]:
    """GRAWA: replicas are pulled to a mean in which small gradients count more.

    Dimlioglu and Choromanska 2024, arXiv:2403.04206, with weights for the whole model (MGRAWA). Here it is
    synchronous, the gradient is that of the same ``batches`` for every replica, with the model in evaluation
    mode, and both defaults are ours. The model must be whole in each process.

    >>> grawa([torch.ones(1, 1)], lambda m, x: m(x).sum())["merge"]
    GradientNormMerge(pull=0.5)
    """
    probe = hdet.Probe(batches, gradient_norm(loss))
    return _settings(GradientNormMerge(pull=pull), sync_every) | {"probe": probe}


@dataclass(frozen=True, kw_only=True)
class LateMerge(hdet.Merge):
    """Replicas take nothing from each other until the end of the run, or a save, when all take the mean."""

    stays_apart = True


def swap(*, sync_every: int = 1000) -> dict[str, Any]:
    """The second phase of SWAP: replicas alone, and their mean once at the end.

    Gupta et al. 2020, arXiv:2001.02312. The first phase is a run with shared gradients. Save it, close it,
    build an ensemble with these settings, and load what was saved: :func:`resumed` does it. There the first
    phase ends at a training accuracy, here where you end it. Batch size and schedule are yours: the paper
    lets the learning rate fall again in the second phase. Statistics of BatchNorm are averaged. The paper
    computes them anew: call ``torch.optim.swa_utils.update_bn`` for that. At a sync replicas are only looked
    at.

    >>> swap()["merge"]
    LateMerge()
    """
    return _settings(LateMerge(), sync_every)


def resumed(ensemble: Any, build: Callable[[], Any]) -> Any:
    """Go on with a run in an ensemble of other settings, such as those of :func:`swap`. Collective.

    Args:
        ensemble: is closed.
        build: makes the new one, for the same model and optimizer.
    """
    ensemble.converge()
    state = ensemble.state_dict()
    ensemble.close()
    again = build()
    again.load_state_dict(state)
    return again


def _settings(merge: hdet.Merge, sync_every: int) -> dict[str, Any]:
    return {
        "gradients": "local",
        "merge": merge,
        "sync_every": sync_every,
        "explore": [hdet.LearningRate(0.0)],
    }
