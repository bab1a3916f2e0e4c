"""The arguments ``explore`` and ``probe`` of callbacks: checked when they are given, not after a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from hdet.checks import require_kind
from hdet.explore import Hyperparameter, WeightDecay
from hdet.explore.values import hyperparameters_of
from hdet.method.controller import Controller
from hdet.method.thermostat import Thermostat
from hdet.replicas.probe import AnyProbe

HeldOut = AnyProbe | Iterable[Any]
"""What users give to a callback: a probe, or held-out batches of which it makes one."""


def require_exploration(
    explore: Sequence[Hyperparameter], probe: HeldOut | None, controller: Controller | Thermostat | None
) -> None:
    """Raise if these cannot go together.

    >>> require_exploration([WeightDecay()], None, None)
    Traceback (most recent call last):
    ValueError: probe must be given to explore weight decay, got None: pass held-out batches
    """
    is_data = callable(probe) or (isinstance(probe, Iterable) and not isinstance(probe, str | Tensor))
    rule = "probe must be held-out batches, such as a DataLoader, an hdet.Probe, or None"
    require_kind(rule, probe, probe is None or is_data)
    hyperparameters = hyperparameters_of(explore, may_be_empty=True)
    if probe is None and isinstance(controller, Thermostat):
        raise ValueError("probe must be given for a Thermostat, got None: pass held-out batches")
    if probe is None and controller is None and any(isinstance(h, WeightDecay) for h in hyperparameters):
        raise ValueError("probe must be given to explore weight decay, got None: pass held-out batches")
