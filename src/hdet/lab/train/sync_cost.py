"""What a sync will cost, before a run: seconds and bytes from five numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hdet.checks import require_count, require_number

ACCEPTED_OVERHEAD_PERCENT = 0.1
"""What the suggestion keeps to; the benchmark holds the library to it too."""
_REPORT_BYTES = 80
"""Ten numbers in double precision: losses, health, step, base, checksum, moments, gradient norm."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What :func:`plan` predicts."""

    num_collectives_per_sync: int
    """The small exchange of losses, and all-reduces of half a bucket each where replicas are averaged."""
    bytes_per_sync: float
    """Sent by each replica in one sync."""
    bytes_per_step: float
    """The same, spread over the steps of a round."""
    ddp_bytes_per_step: float
    """Sent by each replica for the gradients of one step, with hdet or without."""
    traffic_percent: float
    """Bytes of the syncs over bytes of the gradients."""
    transfer_seconds_per_sync: float
    """Time on the wire."""
    latency_seconds_per_sync: float
    """Time until collectives start."""
    copy_seconds_per_sync: float
    """Time to check the weights, to copy them into buckets, and back."""
    seconds_per_sync: float
    """The three together; in truth copies and transfers overlap in part."""
    overhead_percent: float
    """Time of the syncs over time of the training."""
    suggested_sync_every: int
    """The smallest ``sync_every`` whose overhead is at most 0.1 %."""
    num_syncs: int | None = None
    """In the whole run; None without ``num_steps``, like the two below."""
    training_seconds: float | None = None
    """The whole run without hdet."""
    sync_seconds: float | None = None
    """What all syncs add to it."""


def plan(
    num_parameters: int,
    num_replicas: int,
    step_seconds: float,
    bandwidth_bytes_per_second: float,
    sync_every: int,
    bytes_per_parameter: int = 4,
    latency_seconds: float = 1e-3,
    num_steps: int | None = None,
    *,
    averages: bool = True,
    num_shards: int = 1,
    bucket_mib: float = 25.0,
    memory_bandwidth_bytes_per_second: float = 10e9,
) -> Plan:
    r"""Predict what syncs cost.

    With :math:`N` replicas, :math:`B` bytes of weights and :math:`T` steps per round, a sync takes

    .. math:: t = \frac{2 (N - 1)}{N} \frac{B}{\text{bandwidth}} + (\lceil B / b \rceil + 1)\,\text{latency}
        + \frac{5 B}{\text{memory bandwidth}}

    a ring all-reduce, :math:`b` half a bucket, one collective for the losses, and five passes over the
    memory: one reads all weights for NaN, two copy into a bucket, two copy back. It is an upper bound: large
    tensors skip the copies, and copies go on during transfers. The overhead is
    :math:`t / (T \cdot \text{step\_seconds})`.

    Replicas that are equal are not averaged. A sync then is one all-gather of ten numbers per replica,
    :math:`80 (N - 1)` bytes, and two passes over the weights, for NaN and for a checksum. The all-gather is
    all that grows with :math:`N`.

    Half precisions are averaged in float32, so :math:`B` counts at least four bytes per parameter; the
    gradients of plain data-parallel training count what they have. One replica syncs with nobody, at no cost.
    Optimizer moments that are averaged too are not counted. ``hdet doctor`` measures bandwidth and latency
    between two processes of this machine.

    Args:
        num_parameters: of one replica; of one rank's shard, where a replica spans several ranks.
        num_replicas: N.
        step_seconds: time of one training step without hdet.
        bandwidth_bytes_per_second: what one replica can send.
        sync_every: steps per round, T.
        bytes_per_parameter: 4 for float32, 2 for half precisions.
        latency_seconds: time of a collective of one number: 1 ms with gloo, 0.05 ms with NCCL in one machine.
        num_steps: length of the run, for the totals.
        averages: whether replicas differ, so that a sync averages them; not in ``AutoLR``.
        num_shards: ranks that hold a replica together; they exchange their numbers first.
        bucket_mib: buffer size for averaging, in MiB.
        memory_bandwidth_bytes_per_second: 10 GB/s for one core, 1 TB/s or more for a GPU.

    A model of 125 M parameters on 8 replicas, half a second per step, 25 Gbit/s:

    >>> costs = plan(125_000_000, 8, 0.5, bandwidth_bytes_per_second=25e9 / 8, sync_every=1000)
    >>> f"{costs.seconds_per_sync:.2f} s per sync, {costs.overhead_percent:.3f} % of the training"
    '0.57 s per sync, 0.114 % of the training'
    >>> costs.suggested_sync_every
    1140
    """
    require_count("num_parameters", num_parameters)
    require_count("num_replicas", num_replicas)
    require_number("step_seconds", step_seconds, above=0)
    require_number("bandwidth_bytes_per_second", bandwidth_bytes_per_second, above=0)
    require_count("sync_every", sync_every)
    require_count("bytes_per_parameter", bytes_per_parameter)
    require_number("latency_seconds", latency_seconds, at_least=0)
    if num_steps is not None:
        require_count("num_steps", num_steps)
    require_count("num_shards", num_shards)
    require_number("bucket_mib", bucket_mib, above=0)
    require_number("memory_bandwidth_bytes_per_second", memory_bandwidth_bytes_per_second, above=0)

    syncs = num_replicas > 1
    ring = 2 * (num_replicas - 1) / num_replicas
    weight_bytes = num_parameters * bytes_per_parameter
    averaged_bytes = num_parameters * max(4, bytes_per_parameter)  # half precisions are summed in float32
    bucket_bytes = int(bucket_mib * 2**20)

    num_buckets = math.ceil(averaged_bytes / (bucket_bytes / 2)) if averages else 0
    num_collectives = num_buckets + 1 + (num_shards > 1) if syncs else 0
    bytes_per_sync = ring * averaged_bytes
    if not averages:
        bytes_per_sync = float(_REPORT_BYTES * (num_replicas - 1 + num_shards - 1)) if syncs else 0.0
    touched_bytes = 5 * averaged_bytes if averages else 2 * weight_bytes
    transfer = bytes_per_sync / bandwidth_bytes_per_second
    latency = num_collectives * latency_seconds
    copy = touched_bytes / memory_bandwidth_bytes_per_second if syncs else 0.0
    seconds_per_sync = transfer + latency + copy

    bytes_per_step = bytes_per_sync / sync_every
    ddp_bytes_per_step = ring * weight_bytes
    exact = 100 * seconds_per_sync / (ACCEPTED_OVERHEAD_PERCENT * step_seconds)
    num_syncs = None
    if num_steps is not None:
        num_syncs = math.ceil(num_steps / sync_every) if syncs else 0  # the last step is one
    return Plan(
        num_collectives_per_sync=num_collectives,
        bytes_per_sync=bytes_per_sync,
        bytes_per_step=bytes_per_step,
        ddp_bytes_per_step=ddp_bytes_per_step,
        traffic_percent=100 * bytes_per_step / ddp_bytes_per_step if syncs else 0.0,
        transfer_seconds_per_sync=transfer,
        latency_seconds_per_sync=latency,
        copy_seconds_per_sync=copy,
        seconds_per_sync=seconds_per_sync,
        overhead_percent=100 * seconds_per_sync / (sync_every * step_seconds),
        suggested_sync_every=max(1, math.ceil(exact * (1 - 1e-12))),  # rounding must not add a step
        num_syncs=num_syncs,
        training_seconds=None if num_steps is None else num_steps * step_seconds,
        sync_seconds=None if num_syncs is None else num_syncs * seconds_per_sync,
    )
