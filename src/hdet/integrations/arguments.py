"""The arguments ``explore``, ``controllers`` and ``probe`` of callbacks: checked when they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hdet.checks import shown
from hdet.errors import bad_argument
from hdet.explore import LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.replicas.probe import Probe, ProbeOrBatches
from hdet.steering.needs import NEEDS, controllers_of


def checked_settings(probe: ProbeOrBatches | None, **settings: Any) -> dict[str, Any]:
    """Return the settings of :class:`hdet.AutoLR`; raise if they cannot go together, and not after a search.

    >>> from hdet import HeldOutWeightDecay
    >>> checked_settings(None, spread=0.0, explore=[], controllers=[HeldOutWeightDecay()])
    Traceback (most recent call last):
    ValueError: probe must be given for a HeldOutWeightDecay, got None: pass held-out batches
    """
    LearningRate(settings["spread"])
    is_data = isinstance(probe, Iterable) and not isinstance(probe, str | Tensor)
    if not (probe is None or is_data or isinstance(probe, Probe)):
        must = "must be held-out batches, such as a DataLoader, an hdet.Probe, or None"
        raise bad_argument("probe", must, shown(probe), kind=TypeError)
    hyperparameters_of(settings["explore"], may_be_empty=True)
    for controller in controllers_of(settings["controllers"]):
        if probe is None and any(need.argument == "probe" for need in NEEDS[type(controller)]):
            must = f"must be given for a {type(controller).__name__}"
            raise bad_argument("probe", must, "None", "pass held-out batches")
    return settings
