"""Predict what hdet costs, before a run: seconds and bytes of syncs, memory by part, steps of the search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from hdet.lab.limits import CountFromZero, NotNegative, Positive, require_hinted
from hdet.search.decisions import LEAST_STEPS, lengths, num_parts

ACCEPTED_OVERHEAD_PERCENT = 0.1
"""The suggestion keeps to this; the benchmark holds the library to it too."""
_BUCKET_BYTES = 25 * 2**20
_NUM_GUARD, _NUM_SEARCH = 3, 2
"""Copies: the guard has the first weights and two later ones, the search the first and those of its ramp."""
MOMENTS = {"sgd": 0, "sgd-momentum": 1, "muon": 1, "lion": 1, "adam": 2, "adamw": 2}
"""Numbers that an optimizer keeps for each parameter."""
_REPORT_BYTES = 72
"""Nine numbers in double precision: losses, health, score, step, base, checksum, moments."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds what :func:`plan` predicts of one sync."""

    num_collectives_per_sync: int
    """The small exchange of losses, and all-reduces of half a bucket each where replicas are averaged."""
    bytes_per_sync: float
    """Sent by each replica."""
    seconds_per_sync: float
    """On the wire, until collectives start, and for copies; in truth the last go on during the first."""
    overhead_percent: float
    """Time of the syncs over time of the training."""
    suggested_sync_every: int
    """The smallest ``sync_every`` whose overhead is at most 0.1 %."""


def plan(
    num_parameters: int,
    num_replicas: int,
    step_seconds: Positive,
    bandwidth_bytes_per_second: Positive,
    sync_every: int,
    *,
    bytes_per_parameter: int = 4,
    latency_seconds: NotNegative = 1e-3,
    averages: bool = True,
    num_shards: int = 1,
    memory_bandwidth_bytes_per_second: Positive = 10e9,
) -> Plan:
    r"""Predict what syncs cost.

    With :math:`N` replicas, :math:`B` bytes of weights and :math:`T` steps per round, a sync takes

    .. math:: t = \frac{2 (N - 1)}{N} \frac{B}{\text{bandwidth}} + (\lceil B / b \rceil + 1)\,\text{latency}
        + \frac{5 B}{\text{memory bandwidth}}

    a ring all-reduce, :math:`b` half a bucket, one collective for the losses, and five passes over the
    memory: one reads all weights for NaN, two copy into a bucket, two copy back. It is an upper bound: large
    tensors skip the copies, and copies go on during transfers. The overhead is
    :math:`t / (T \cdot \text{step\_seconds})`.

    Replicas that are equal are not averaged. A sync then is one all-gather of nine numbers per replica,
    :math:`72 (N - 1)` bytes, and two passes over the weights, for NaN and for a checksum. The all-gather is
    all that grows with :math:`N`.

    Half precisions are averaged in float32, so :math:`B` counts at least four bytes per parameter. One
    replica syncs with nobody, at no cost. Optimizer moments that are averaged too are not counted.

    Args:
        num_parameters: of one replica; of one rank's shard, where a replica spans several ranks.
        num_replicas: N.
        step_seconds: time of one training step without hdet.
        bandwidth_bytes_per_second: what one replica can send.
        sync_every: steps per round, T.
        bytes_per_parameter: 4 for float32, 2 for half precisions.
        latency_seconds: time of a collective of one number: 1 ms with gloo, 0.05 ms with NCCL in one machine.
        averages: whether replicas differ, so that a sync averages them; not in ``AutoLR``.
        num_shards: ranks that hold a replica together; they exchange their numbers first.
        memory_bandwidth_bytes_per_second: 10 GB/s for one core, 1 TB/s or more for a GPU.

    A model of 125 M parameters on 8 replicas, half a second per step, 25 Gbit/s:

    >>> costs = plan(125_000_000, 8, 0.5, bandwidth_bytes_per_second=25e9 / 8, sync_every=1000)
    >>> f"{costs.seconds_per_sync:.2f} s per sync, {costs.overhead_percent:.3f} % of the training"
    '0.57 s per sync, 0.114 % of the training'
    >>> costs.suggested_sync_every
    1140
    """
    require_hinted(plan, locals())
    syncs = num_replicas > 1
    averaged_bytes = num_parameters * max(4, bytes_per_parameter)  # half precisions are summed in float32
    if averages:
        num_collectives = math.ceil(averaged_bytes / (_BUCKET_BYTES / 2)) + 1
        bytes_per_sync = 2 * (num_replicas - 1) / num_replicas * averaged_bytes
        touched_bytes = 5 * averaged_bytes
    else:
        num_collectives = 1
        bytes_per_sync = float(_REPORT_BYTES * (num_replicas - 1 + num_shards - 1)) if syncs else 0.0
        touched_bytes = 2 * num_parameters * bytes_per_parameter
    num_collectives = num_collectives + (num_shards > 1) if syncs else 0
    copy_seconds = touched_bytes / memory_bandwidth_bytes_per_second if syncs else 0.0
    seconds = bytes_per_sync / bandwidth_bytes_per_second + num_collectives * latency_seconds + copy_seconds
    exact = 100 * seconds / (ACCEPTED_OVERHEAD_PERCENT * step_seconds)
    return Plan(
        num_collectives_per_sync=num_collectives,
        bytes_per_sync=bytes_per_sync,
        seconds_per_sync=seconds,
        overhead_percent=100 * seconds / (sync_every * step_seconds),
        suggested_sync_every=max(1, math.ceil(exact * (1 - 1e-12))),  # rounding must not add a step
    )


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
    thermostat: int
    """Beside the peak below, until 35 % of a run with a thermostat: the mean of a round. Where replicas keep
    parts of it, or parameters have fewer bits, also the weights while it is scored."""
    search: int
    """Two copies of the parameters during ``find_lr``. They are given back before the run."""
    bucket: int
    """Buffer that messages are packed into, at most."""
    saving: int
    """Whole copies of the guard and the mean of the tail for the checkpoint, in host memory unless the model
    is sharded. Where replicas keep parts of them, they are held from ``converge()`` to the next step."""
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
    num_moments: CountFromZero = 2,
    are_equal: bool = True,
) -> MemoryCost:
    r"""Predict the memory that a run of ``find_lr`` and ``AutoLR`` takes.

    With :math:`P` bytes of parameters on a rank and :math:`N` replicas that are equal, the guard keeps
    :math:`3 P / N`, the tail and a thermostat :math:`P / N` each, and the search, before the run,
    :math:`2 P / N`. Replicas that differ keep whole copies in the run, as one replica alone does. Messages
    take one bucket of 25 MiB, or as much as there is to send: half of it is hdet's, the other half the
    backend's while it travels. Buffers of the model are not counted.

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
    require_hinted(memory_cost, locals())
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
    is_swapped = wide == size and (not has_others or not are_equal)
    in_run, in_search = tail + guard + gathered, search + packed
    saving = here * wide + _NUM_GUARD * here * size
    return MemoryCost(
        parameters=here * size,
        training=(2 + num_moments) * here * size,
        tail=tail,
        guard=guard,
        thermostat=kept * wide + (0 if is_swapped else here * size),
        search=search,
        bucket=max(packed, gathered),
        saving=saving,
        peak=max(in_run, in_search),
        peak_while_saving=max(in_run + saving, in_search),
    )


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """Holds what :func:`search_cost` predicts."""

    fewest_steps: int
    """Steps of a search whose ramp turns in time."""
    most_steps: int
    """Steps where it does not turn. Trials that learn nothing are repeated, up to a quarter of the run."""
    trials_at_a_time: int
    """Trials that are made at the same time, over all replicas."""


def search_cost(
    total_steps: Annotated[int, {"at_least": LEAST_STEPS, "remedy": "a shorter run cannot search"}],
    num_replicas: int,
    *,
    batch_size: int = 32,
    num_shards: int = 1,
) -> SearchCost:
    """Predict the steps of :func:`hdet.find_lr`.

    A sharded model shares its gradients by itself, so that all replicas make every trial together.

    Args:
        total_steps: length of the run.
        num_replicas: N.
        batch_size: examples of a batch on one rank, which few replicas split between their trials.
        num_shards: ranks that hold a replica together.

    >>> search_cost(1000, 8)
    SearchCost(fewest_steps=80, most_steps=100, trials_at_a_time=8)
    """
    require_hinted(search_cost, locals())
    places = num_replicas if num_shards == 1 else 1
    trials_at_a_time = places * num_parts(places, batch_size)
    sizes = lengths(total_steps, trials_at_a_time)
    trial_steps = sizes.trial * sizes.num_turns
    return SearchCost(
        fewest_steps=sizes.ramp + trial_steps,
        most_steps=sizes.most_ramp_steps + trial_steps,
        trials_at_a_time=trials_at_a_time,
    )
