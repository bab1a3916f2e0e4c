"""Warm noisy start: perturb each replica's weights around a common checkpoint (paper, eq. 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hdet.checks import require_choice, require_count, require_kind, require_number
from hdet.method.fan_out import derived_seed, noise_std
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.tensors import is_sharded, local_part, require_initialized, whole, widest_float

Norm = Literal["tensor", "global"]

_perturbed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def warm_start(
    model: nn.Module,
    noise_scale: float = 0.01,
    *,
    norm: Norm = "tensor",
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    replica: int | None = None,
) -> None:
    r"""Add Gaussian noise to every trainable parameter, a different draw on each replica.

    .. math:: \theta_r \leftarrow \bar\theta_0 + \epsilon_r, \qquad
              \epsilon_r \sim \mathcal N\left(0,\ \nu^2 \lVert\bar\theta_0\rVert^2 / d\right)

    Call it once, after loading the checkpoint and **after** wrapping the model in
    DistributedDataParallel: the wrapper's constructor copies rank zero's parameters to all others and
    would undo the noise. The draw depends on ``seed`` and the replica alone; torch's global generators
    are not touched.

    Args:
        model: the model, wrapped or not.
        noise_scale: :math:`\nu`.
        norm: ``"tensor"`` scales by each tensor's own norm and size (the reference code's form);
            ``"global"`` by the norm and size of all parameters together (the paper's form).
        seed: of the noise, the same on every replica.
        process_group: joins the replicas; the world if None.
        replica: which replica this is; taken from the process group if None.

    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.detach().clone()
    >>> warm_start(model, noise_scale=0.01)
    >>> bool((model.weight != before).all())
    True
    """
    require_kind("model must be a torch.nn.Module", model, isinstance(model, nn.Module))
    require_initialized(model.parameters())
    index = ReplicaGroup.of(process_group).index if replica is None else replica
    require_count("replica", index, at_least=0)
    require_count("seed", seed, at_least=0)
    add_noise(list(model.parameters()), noise_scale, norm=norm, seed=seed, replica=index)
    _perturbed.update(dict.fromkeys(model.parameters(), True))


def was_warm_started(parameters: Sequence[Tensor]) -> bool:
    """Tell whether :func:`warm_start` has made these differ between replicas. It is told once."""
    told = [_perturbed.pop(parameter, False) for parameter in parameters]
    return any(told)


@torch.no_grad()
def add_noise(
    parameters: Sequence[Tensor], noise_scale: float, *, norm: Norm, seed: int, replica: int
) -> None:
    """The noise of :func:`warm_start`, added to those of the parameters that are trained."""
    noise_scale = require_number("noise_scale", noise_scale, at_least=0)
    require_choice("norm", norm, ("tensor", "global"))
    parameters = [p for p in parameters if p.requires_grad and p.numel()]
    if not parameters:
        raise ValueError("model must have parameters that require a gradient, got none: unfreeze some first")

    # Double precision, so that the norm of many or large half-precision values neither overflows nor
    # loses the small ones.
    norms = [float(whole(torch.linalg.vector_norm(p, dtype=widest_float(p.device)))) for p in parameters]
    if norm == "global":
        num_elements = sum(p.numel() for p in parameters)
        together = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))
        stds = [noise_std(noise_scale, together, num_elements)] * len(parameters)
    else:
        stds = [noise_std(noise_scale, n, p.numel()) for n, p in zip(norms, parameters, strict=True)]

    own_seed = derived_seed(seed, "warm_start", replica)
    devices = {parameter.device for parameter in parameters}
    generators = {device: torch.Generator(device).manual_seed(own_seed) for device in devices}
    for parameter, std in zip(parameters, stds, strict=True):
        # The whole noise everywhere, also where this process holds a part: the draw is the same then.
        noise = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        noise.normal_(0.0, std, generator=generators[parameter.device])
        local_part(parameter).add_(local_part(_distributed(noise, parameter)))


def _distributed(noise: Tensor, parameter: Any) -> Tensor:
    if not is_sharded(parameter):
        return noise
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(noise, parameter.device_mesh, parameter.placements, src_data_rank=None)
