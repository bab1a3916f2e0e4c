"""What the search for the learning rate will cost, before a run."""

from __future__ import annotations

from dataclasses import dataclass

from hdet.checks import require_count
from hdet.search.decisions import LEAST_STEPS, lengths, num_parts


@dataclass(frozen=True, kw_only=True)
class SearchCost:
    """What :func:`search_cost` predicts."""

    fewest_steps: int
    """Steps of a search whose ramp turns in time."""
    most_steps: int
    """Where the ramp does not turn. If trials learn nothing, they are repeated, up to a fifth of the run."""
    trials_at_a_time: int
    """Trials that are made at the same time, over all replicas."""
    num_gathers: int
    """How often every replica is given whole weights from the parts that all of them keep."""
    bytes_sent: float
    """By each rank: gradients of the longest ramp, and weights that are gathered."""


def search_cost(
    total_steps: int,
    num_replicas: int,
    *,
    batch_size: int = 32,
    num_shards: int = 1,
    bytes_on_rank: float = 0.0,
) -> SearchCost:
    """Predict the steps of :func:`hdet.find_lr`, and what they send.

    A sharded model shares its gradients by itself, so that all replicas make every trial together.

    Args:
        total_steps: length of the run.
        num_replicas: N.
        batch_size: examples of a batch on one rank, which few replicas split between their trials.
        num_shards: ranks that hold a replica together.
        bytes_on_rank: of the parameters.

    >>> search_cost(1000, 8).fewest_steps, search_cost(1000, 8).most_steps
    (80, 100)
    """
    require_count("total_steps", total_steps, at_least=LEAST_STEPS, remedy="a shorter run cannot search")
    require_count("num_replicas", num_replicas)
    require_count("batch_size", batch_size)
    places = num_replicas if num_shards == 1 else 1
    parts = num_parts(places, batch_size)
    sizes = lengths(total_steps, places * parts)
    trial_steps = sizes.trial * sizes.num_turns
    has_others = num_replicas > 1
    num_gathers = 2 + parts * sizes.num_turns if has_others else 0
    share = (num_replicas - 1) / num_replicas
    joined = 2 * sizes.most_ramp_steps if num_shards == 1 else 0  # an all-reduce is two passes of the ring
    return SearchCost(
        fewest_steps=sizes.ramp + trial_steps,
        most_steps=sizes.most_ramp_steps + trial_steps,
        trials_at_a_time=places * parts,
        num_gathers=num_gathers,
        bytes_sent=share * (joined + num_gathers) * bytes_on_rank,
    )
