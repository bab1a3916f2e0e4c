"""What predictions are worth: area under the ROC curve and normalised entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hdet.lab.tasks.feed.events import TARGETS


def auc(scores: Tensor, labels: Tensor) -> float:
    """Chance that a positive scores above a negative, a tie counting one half; NaN with one class only.

    Exact, from the ranks (Mann-Whitney).

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 1, 0, 1]))
    0.875
    """
    is_positive = labels.flatten() > 0
    num_positive = int(is_positive.sum())
    num_negative = is_positive.numel() - num_positive
    if not (num_positive and num_negative):
        return math.nan
    _, place, counts = torch.unique(scores.flatten(), sorted=True, return_inverse=True, return_counts=True)
    # Ranks count from one; equal scores share the middle of theirs.
    ranks = counts.cumsum(0).double() - (counts - 1).double() / 2
    rank_sum = ranks[place][is_positive].sum().item()
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def normalized_entropy(loss: float, rate: float) -> float:
    """Cross-entropy over that of predicting the base rate always; NaN where the rate is zero or one.

    >>> normalized_entropy(math.log(2) / 2, 0.5)
    0.5
    """
    if not 0 < rate < 1:
        return math.nan
    return loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))


def summary(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss, AUC and NE of each target and their means, from two (num_events, 3) matrices.

    The means of AUC and NE are over the targets that have both classes.
    """
    losses = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none").mean(0)
    result = {"loss": losses.mean().item()}
    areas, entropies = {}, {}
    for k, name in enumerate(TARGETS):
        result[f"loss_{name}"] = losses[k].item()
        areas[name] = auc(logits[:, k], labels[:, k])
        entropies[name] = normalized_entropy(losses[k].item(), labels[:, k].double().mean().item())
    for kind, values in (("auc", areas), ("ne", entropies)):
        result |= {f"{kind}_{name}": value for name, value in values.items()}
        known = [value for value in values.values() if not math.isnan(value)]
        result[kind] = math.fsum(known) / len(known) if known else math.nan
    return result
