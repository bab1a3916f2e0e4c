"""A run that is saved and resumed at random steps, and must end in the bits of the one that went on."""

from __future__ import annotations

import copy
import random
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.replicas.tensors import local_part
from tests.helpers.models import Net, batch, loss_of

__all__ = ["KINDS", "resumes"]

KINDS = {"one process": 1, "rows": 1, "ranks": 2, "ranks with a spread": 2, "shards": 4}
"""Processes of each kind of run. The last one has two replicas of two shards."""
STEPS, SYNC = 240, 3


class Run:
    """A recipe with all that a checkpoint has to hold: guard, thermostat, weight decay and tail.

    Args:
        kind: where replicas live, and whether they differ.
        rank: of this process.
        spoilt: the weights are spoilt after these steps, in all replicas alike, so that the guard goes back.
    """

    def __init__(self, kind: str, rank: int, spoilt: list[int]) -> None:
        self.kind, self.rank, self.spoilt = kind, rank, spoilt
        told: dict[str, Any] = {
            "controllers": [hdet.Guard(), hdet.Thermostat(), hdet.HeldOutWeightDecay()],
            "probe": hdet.Probe([batch(9, i) for i in range(8)], loss_of),
            "sync_every": SYNC,
        }
        self.net: nn.Module = Net()
        if kind != "rows":
            self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.model: nn.Module = self.net
        if kind == "shards":
            self.net = self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)
            told["replicas"] = mesh["replicate"]
        elif dist.is_initialized():
            self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        spread = 1 / 9 if kind in ("rows", "ranks with a spread") else 0.0
        self.auto: Any
        if kind == "rows":
            told |= {"explore": [hdet.LearningRate(spread)], "average_tail": 0.075, "total_steps": STEPS}
            self.auto = hdet.VirtualEnsemble(self.net, self.optimizer, loss_of, num_replicas=2, **told)
        else:
            self.auto = hdet.AutoLR(
                self.optimizer, model=self.model, total_steps=STEPS, spread=spread, **told
            )

    @property
    def engine(self) -> hdet.Ensemble:
        return self.auto.engine if self.kind == "rows" else self.auto

    def train(self, saves: list[int], folder: str, end: int = STEPS) -> list[Any]:
        """Go on to the end, and return what was saved after these steps."""
        states = []
        while self.engine.num_steps < end:
            step = self.engine.num_steps
            if self.kind == "rows":
                self.auto.step(batches=[batch(0, step), batch(1, step)])
                self._spoil(step, self.auto.replicas.rows.matrices)
            else:
                loss = loss_of(self.model, batch(self.rank, step))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self._spoil(step, [local_part(p) for p in self.net.parameters()])
                self.auto.step(loss)
            if step + 1 in saves:
                self.auto.converge()
                states.append(self.saved(f"{folder}/{step + 1}"))
        return states

    @torch.no_grad()
    def _spoil(self, step: int, weights: list[Tensor]) -> None:
        if step in self.spoilt:
            for weight in weights:
                weight.mul_(30)

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.net, "optimizer": self.optimizer, "auto": self.auto}
        return {"auto": self.auto} if self.kind == "rows" else parts

    def _sharded_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "auto": self.auto.state_dict()}

    def saved(self, path: str) -> Any:
        """All that a checkpoint holds, or the folder of a distributed one."""
        if self.kind == "shards":
            dcp.save(self._sharded_state(), checkpoint_id=path)
            return path
        return copy.deepcopy({name: part.state_dict() for name, part in self.parts().items()})

    def load(self, saved: Any) -> None:
        if self.kind != "shards":
            for name, part in self.parts().items():
                part.load_state_dict(copy.deepcopy(saved[name]))
            return
        state = self._sharded_state()
        dcp.load(state, checkpoint_id=saved)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.auto.load_state_dict(state["auto"])

    def end(self) -> list[Tensor]:
        """The last weights and the controllers' factors."""
        factors = [list(tunable.factors.values()) for tunable in self.engine.explored.tunables]
        weights = [local_part(p).detach().clone() for p in self.net.parameters()]
        return [*weights, torch.tensor([f for each in factors for f in each], dtype=torch.float64)]


def resumes(rank: int, kind: str, seed: int, count: int) -> tuple[int, list[int]]:
    """Resume a run of this seed from so many random steps; the number of brakes, and where the end differs.

    Odd seeds have brakes. After the first one the thermostat is off.
    """
    draw = random.Random(seed)
    spoilt = draw.sample(range(30, 170), 2) if seed % 2 else []
    near = [step + draw.randrange(1, 12) for step in spoilt]
    saves = sorted({*near, *draw.sample(range(1, STEPS), count - len(near))})
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    torch.manual_seed(seed)
    undisturbed = Run(kind, rank, spoilt)
    states = undisturbed.train(saves, folders[0])
    expected, differing = undisturbed.end(), []
    for step, state in zip(saves, states, strict=True):
        again = Run(kind, rank, spoilt)
        again.load(state)
        again.train([later for later in saves if later > step], f"{folders[0]}/from-{step}")
        if not all(torch.equal(a, b) for a, b in zip(again.end(), expected, strict=True)):
            differing.append(step)
    return undisturbed.engine.controllers.state_dict()["guard"]["num_brakes"], differing
