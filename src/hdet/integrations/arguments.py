"""The arguments ``explore``, ``controllers`` and ``probe`` of callbacks: checked when they are given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from hdet.checks import shown
from hdet.errors import bad_argument
from hdet.explore import Hyperparameter
from hdet.explore.values import hyperparameters_of
from hdet.replicas.probe import Probe, ProbeOrBatches
from hdet.steering.needs import NEEDS, AnyController, controllers_of


def require_steering(
    explore: Sequence[Hyperparameter],
    controllers: Sequence[AnyController],
    probe: ProbeOrBatches | None,
) -> None:
    """Raise if these cannot go together, and not after a search.

    >>> from hdet import HeldOutWeightDecay
    >>> require_steering([], [HeldOutWeightDecay()], None)
    Traceback (most recent call last):
    ValueError: probe must be given for a HeldOutWeightDecay, got None: pass held-out batches
    """
    is_data = isinstance(probe, Iterable) and not isinstance(probe, str | Tensor)
    if not (probe is None or is_data or isinstance(probe, Probe)):
        must = "must be held-out batches, such as a DataLoader, an hdet.Probe, or None"
        raise bad_argument("probe", must, shown(probe), kind=TypeError)
    hyperparameters_of(explore, may_be_empty=True)
    for controller in controllers_of(controllers):
        if probe is None and any(need.argument == "probe" for need in NEEDS[type(controller)]):
            must = f"must be given for a {type(controller).__name__}"
            raise bad_argument("probe", must, "None", "pass held-out batches")
