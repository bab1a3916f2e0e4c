"""What hdet takes of a rank's memory, by part, before a run."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import require_count

_BUCKET_BYTES = 25 * 2**20
_NUM_GUARD, _NUM_SEARCH = 3, 2
"""Copies: the guard has the first weights and two later ones, the search the first and those of its ramp."""
_MOMENTS = {"sgd": 0, "sgd-momentum": 1, "muon": 1, "lion": 1, "adam": 2, "adamw": 2}


def num_moments_of(optimizer: str) -> int:
    """How many numbers an optimizer keeps for each parameter.

    >>> num_moments_of("adamw"), num_moments_of("sgd")
    (2, 0)
    """
    if optimizer not in _MOMENTS:
        raise ValueError(f"optimizer must be one of {', '.join(_MOMENTS)}, got {optimizer!r}")
    return _MOMENTS[optimizer]


@dataclass(frozen=True, kw_only=True)
class MemoryCost:
    """Bytes on each rank."""

    parameters: int
    """The parameters themselves, or the rank's shard of them."""
    training: int
    """Parameters, gradients and moments: what a run takes without hdet, activations aside."""
    tail: int
    """The mean of the last steps, in float32 or wider."""
    guard: int
    """Three copies of the parameters to go back to."""
    search: int
    """Two copies of the parameters during ``find_lr``. They are given back before the run."""
    bucket: int
    """What messages are packed into, at most."""
    saving: int
    """A whole mean of the tail for the checkpoint, in host memory unless the model is sharded. Where replicas
    keep parts of it, it is held from ``converge()`` to the next step."""
    peak: int
    """The most at any time, but for saving."""
    peak_while_saving: int
    """The most at any time."""


def memory_cost(
    num_parameters: int,
    num_replicas: int,
    *,
    num_shards: int = 1,
    bytes_per_parameter: int = 4,
    num_moments: int = 2,
    are_equal: bool = True,
) -> MemoryCost:
    r"""Predict the memory that a run of ``find_lr`` and ``AutoLR`` takes.

    With :math:`P` bytes of parameters on a rank and :math:`N` replicas that are equal, the guard keeps
    :math:`3 P / N`, the tail :math:`P / N` and the search, before the run, :math:`2 P / N`. Replicas that
    differ keep whole copies in the run, as one replica alone does. Messages take one bucket of 25 MiB, or as
    much as there is to send: half of it is hdet's, the other half the backend's while it travels. Buffers of
    the model are not counted.

    Args:
        num_parameters: of a whole replica.
        num_replicas: N.
        num_shards: ranks that hold a replica together.
        bytes_per_parameter: 4 for float32, 2 for half precisions.
        num_moments: numbers that the optimizer keeps for each parameter.
        are_equal: whether replicas hold the same parameters: nothing is explored, and gradients are shared.

    7 B parameters in bfloat16 on 64 ranks, as 8 replicas of 8 ranks:

    >>> cost = memory_cost(7_000_000_000, 8, num_shards=8, bytes_per_parameter=2)
    >>> f"{cost.tail / 1e9:.2f} GB + {cost.guard / 1e9:.2f} GB beside {cost.training / 1e9:.1f} GB"
    '0.44 GB + 0.66 GB beside 7.0 GB'
    """
    require_count("num_parameters", num_parameters)
    require_count("num_replicas", num_replicas)
    require_count("num_shards", num_shards)
    require_count("bytes_per_parameter", bytes_per_parameter)
    require_count("num_moments", num_moments, at_least=0)
    here = -(-num_parameters // num_shards)
    part = -(-here // num_replicas)
    kept = part if are_equal else here
    size, wide = bytes_per_parameter, max(4, bytes_per_parameter)
    has_others = num_replicas > 1
    tail, guard, search = kept * wide, _NUM_GUARD * kept * size, _NUM_SEARCH * part * size
    # A gradient is packed while the learning rate is searched for, a copy while it is put back.
    packed = min(_BUCKET_BYTES, here * wide) if has_others and num_shards == 1 else 0
    gathered = min(_BUCKET_BYTES // 2, num_replicas * part * size) if has_others else 0
    if has_others and not are_equal:
        gathered = min(_BUCKET_BYTES, here * wide)
    in_run, in_search = tail + guard + gathered, search + packed
    saving = here * wide
    return MemoryCost(
        parameters=here * size,
        training=(2 + num_moments) * here * size,
        tail=tail,
        guard=guard,
        search=search,
        bucket=max(packed, gathered),
        saving=saving,
        peak=max(in_run, in_search),
        peak_while_saving=max(in_run + saving, in_search),
    )
