"""Warm-start noise: how strongly a replica's initial weights are perturbed."""

from __future__ import annotations

import math


def noise_std(noise_scale: float, norm: float, num_elements: int) -> float:
    r"""Standard deviation of the warm-start noise (paper, eq. 10).

    .. math:: \text{std} = \nu\,\frac{\lVert\theta\rVert}{\sqrt d}

    ``noise_scale`` is :math:`\nu`. The norm and the number of elements are one tensor's (the form of
    the reference code) or the whole model's (the form of the paper).

    >>> noise_std(0.01, norm=2.0, num_elements=4)
    0.01
    """
    return noise_scale * norm / math.sqrt(num_elements)
