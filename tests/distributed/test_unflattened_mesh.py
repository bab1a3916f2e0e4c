"""An axis of a mesh that was unflattened, as torchtitan makes them, has the replicas that it should."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hdet.replicas import ReplicaGroup
from tests.helpers.replicas import run_replicas


def _groups(rank):
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (2, 2), ("dp_replicate", "dp_shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    group = ReplicaGroup.of_parameters(mesh["dp_replicate"], list(model.parameters()))
    with pytest.raises(ValueError, match="must be an axis of the parameters' mesh"):
        ReplicaGroup.of_parameters(mesh["dp_replicate"], list(nn.Linear(2, 2).parameters()))
    within = [dist.get_process_group_ranks(part) for part in group.within]
    return group.index, group.count, within, group.is_writer


def test_the_other_axes_hold_the_parts_of_a_replica():
    assert run_replicas(_groups, 4) == [
        (0, 2, [[0, 1]], True),
        (0, 2, [[0, 1]], False),
        (1, 2, [[2, 3]], False),
        (1, 2, [[2, 3]], False),
    ]
