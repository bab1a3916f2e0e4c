"""ReplicaGroup: how many replicas there are, which one this process is, and what joins them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from hdet.errors import HdetWarning, warn
from hdet.replicas.tensors import accelerator, is_sharded

_told: set[str] = set()
"""Keys of the warnings that this process has given."""


@dataclass
class Traffic:
    """Counts the bytes that this process puts into collectives."""

    num_bytes: int = 0


@dataclass(frozen=True)
class ReplicaGroup:
    """The place of this process among replicas that live in one process each, or in several.

    >>> ReplicaGroup.of(None)
    ReplicaGroup(index=0, count=1, process_group=None)
    """

    index: int
    """Which replica this process is."""

    count: int
    """The number of replicas."""

    process_group: dist.ProcessGroup | None = None
    """Joins them; None where there is nobody to talk to."""

    within: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False)
    """Join the processes of one replica, along each axis of its mesh; empty where it is one process."""

    patience: float = field(default=60.0, repr=False)
    """Seconds to wait for a replica at an exchange, until it is named."""

    failures: str = field(default="", repr=False)
    """Key in the store of the processes, under which a replica that fails tells why; empty if none does."""

    traffic: Traffic = field(default_factory=Traffic, repr=False, compare=False)
    """Counts the bytes that this process has sent."""

    @classmethod
    def of(
        cls,
        process_group: dist.ProcessGroup | None,
        *,
        fallback_index: int = 0,
        fallback_count: int = 1,
        name: str = "process_group",
    ) -> ReplicaGroup:
        """The replicas of ``process_group``, of the world, or of this process alone.

        The fallback counts only where torch.distributed is not running. ``name`` is what the user calls it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise ValueError(
                    f"{name} must be None while torch.distributed is not running, "
                    f"got {process_group!r}: call torch.distributed.init_process_group first"
                )
            if fallback_count > 1:
                warn(
                    f"replica {fallback_index} of {fallback_count} was asked for, but torch.distributed is "
                    "not running: values are spread, parameters and losses are not shared. "
                    "Call torch.distributed.init_process_group first",
                    HdetWarning,
                )
            else:
                _warn_if_launched()
            return cls(fallback_index, fallback_count)
        group = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{name} must be a torch.distributed.ProcessGroup that this process belongs to, "
                f"got {process_group!r}: build it with torch.distributed.new_group on every rank"
            )
        index = dist.get_rank(group)
        if index < 0:
            raise ValueError(
                f"{name} must contain this process, but rank {dist.get_rank()} is not in it: "
                "pass the group that this rank belongs to"
            )
        return cls(index, dist.get_world_size(group), group)

    @classmethod
    def of_axis(cls, axis: Any, parameters: Sequence[object] = ()) -> ReplicaGroup:
        """The replicas along one axis of a DeviceMesh; along its other axes lie the parts of a replica.

        An axis of a mesh that was unflattened, as torchtitan's are, does not know the others. The parameters
        then do.
        """
        if axis.ndim != 1:
            raise ValueError(
                f"replicas must be one axis of a mesh, got a mesh of {axis.ndim} axes: pass the axis along "
                'which the model is replicated, such as replicas=mesh["replicate"]'
            )
        root = _root_of(axis)
        (name,) = axis.mesh_dim_names or (None,)
        if name not in (root.mesh_dim_names or ()):
            meshes = meshes_of(parameters)
            known = [mesh for mesh in meshes if name in (mesh.mesh_dim_names or ())]
            if not known:
                raise ValueError(
                    f"replicas must be an axis of the parameters' mesh, got {axis} with parameters on "
                    f"{meshes[0] if meshes else 'none'}: pass the axis along which the model is replicated"
                )
            root = max(known, key=lambda mesh: mesh.ndim)
        others = [root.get_group(other) for other in root.mesh_dim_names or () if other != name]
        group = axis.get_group()
        return cls(dist.get_rank(group), dist.get_world_size(group), group, tuple(others))

    @classmethod
    def of_parameters(cls, replicas: Any, parameters: Sequence[object]) -> ReplicaGroup:
        """Read what the user gave as ``replicas``; raises if a part of these parameters is left over."""
        if hasattr(replicas, "mesh_dim_names"):
            return cls.of_axis(replicas, parameters)
        if isinstance(replicas, ReplicaGroup):
            return replicas
        meshes = meshes_of(parameters)
        if not meshes:
            return cls.of(replicas, name="replicas")
        if any(mesh.ndim > 1 for mesh in meshes) or {m.size() for m in meshes} != {dist.get_world_size()}:
            raise ValueError(
                "replicas must be the axis along which a sharded model is replicated, got "
                f'{replicas!r} with parameters on {meshes[0]}: pass replicas=mesh["replicate"]'
            )
        return cls(0, 1, None, (meshes[0].get_group(),))

    @property
    def is_writer(self) -> bool:
        """Tell whether this process speaks for all: the first of the first replica."""
        return self.index == 0 and all(dist.get_rank(group) == 0 for group in self.within)

    @cached_property
    def communicates(self) -> bool:
        """Tell whether there is anyone to exchange with."""
        return self.process_group is not None and self.count > 1

    @cached_property
    def joins(self) -> list[dist.ProcessGroup]:
        """Every process group that takes part: within this replica first, then between replicas."""
        between = [self.process_group] if self.process_group is not None and self.communicates else []
        return [*self.within, *between]

    @cached_property
    def device(self) -> torch.device:
        """Where the small messages of this group must live."""
        backend = dist.get_backend(self.process_group or self.within[0])
        is_on_host = any(name in backend for name in ("gloo", "fake", "mpi"))
        return (None if is_on_host else accelerator()) or torch.device("cpu")


def meshes_of(parameters: Iterable[Any]) -> list[Any]:
    """The meshes that these parameters are sharded over, each once."""
    return list({id(p.device_mesh): p.device_mesh for p in parameters if is_sharded(p)}.values())


def _root_of(axis: Any) -> Any:
    """The mesh that an axis was taken from."""
    if hasattr(axis, "_get_root_mesh"):
        return axis._get_root_mesh()  # noqa: SLF001
    from torch.distributed import device_mesh  # older torch

    return device_mesh._mesh_resources.get_root_mesh(axis)  # noqa: SLF001  # pyright: ignore


def _warn_if_launched() -> None:
    """Say once that the processes of a launcher do not know of each other. Rank zero says it for all."""
    world_size = os.environ.get("WORLD_SIZE", "")
    is_launched = world_size.isdecimal() and int(world_size) > 1 and os.environ.get("RANK", "0") == "0"
    if is_launched and "launched" not in _told:
        _told.add("launched")
        warn(
            f"WORLD_SIZE={world_size} processes were launched, but torch.distributed is not running: each "
            "trains alone, and nothing is compared or averaged. Call torch.distributed.init_process_group "
            "first",
            HdetWarning,
        )
