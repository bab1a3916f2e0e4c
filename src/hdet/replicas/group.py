"""ReplicaGroup: how many replicas there are, which one this process is, and what joins them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hdet.errors import HdetWarning
from hdet.replicas.device import accelerator

__all__ = ["ReplicaGroup"]


@dataclass(frozen=True)
class ReplicaGroup:
    """The place of this process among replicas that live in one process each.

    >>> ReplicaGroup.of(None)
    ReplicaGroup(index=0, count=1, process_group=None)
    """

    index: int
    """Which replica this process is."""

    count: int
    """How many replicas there are."""

    process_group: dist.ProcessGroup | None = None
    """What joins them; None where there is nobody to talk to."""

    patience: float = field(default=60.0, repr=False)
    """Seconds to wait for a replica at an exchange, until it is named."""

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup | None, *, fallback_index: int = 0, fallback_count: int = 1
    ) -> ReplicaGroup:
        """The replicas of ``process_group``, of the world, or of this process alone.

        The fallback counts only where torch.distributed is not running.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise ValueError(
                    "process_group must be None while torch.distributed is not running, "
                    f"got {process_group!r}: call torch.distributed.init_process_group first"
                )
            if fallback_count > 1:
                warnings.warn(
                    f"replica {fallback_index} of {fallback_count} was asked for, but torch.distributed is "
                    "not running: values are spread, parameters and losses are not shared. "
                    "Call torch.distributed.init_process_group first",
                    HdetWarning,
                    stacklevel=3,
                )
            return cls(fallback_index, fallback_count)
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup that this process belongs to, "
                f"got {process_group!r}: build it with torch.distributed.new_group on every rank"
            )
        index = dist.get_rank(group)
        if index < 0:
            raise ValueError(
                f"process_group must contain this process, but rank {dist.get_rank()} is not in it: "
                "pass the group that this rank belongs to"
            )
        return cls(index, dist.get_world_size(group), group)

    @property
    def communicates(self) -> bool:
        """Whether there is anyone to exchange with."""
        return self.process_group is not None and self.count > 1

    @property
    def device(self) -> torch.device:
        """Where the small messages of this group must live."""
        assert self.process_group is not None
        backend = dist.get_backend(self.process_group)
        if "gloo" in backend or "fake" in backend or "mpi" in backend:
            return torch.device("cpu")
        return accelerator() or torch.device("cpu")
