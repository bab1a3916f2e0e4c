"""Optimizers that torch does not have in one piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

__all__ = ["MuonAndAdamW", "orthogonalized"]


class MuonAndAdamW(Optimizer):
    """Muon for the groups that say ``"uses_muon": True``, AdamW for the others.

    Both follow torch's classes of these names. Only Muon's products are in the precision of the parameters:
    in bfloat16 they are slow on most CPUs, and crash on some.

    All groups can have the same ``lr``, in Muon's scale. AdamW uses ``adamw_ratio`` times that of its group.

    Args:
        groups: parameter groups. Those of Muon hold matrices only.
        lr: Muon's learning rate.
        weight_decay: decoupled, for both.
        momentum: of Muon.
        betas: of AdamW.
        eps: of AdamW.
        adamw_ratio: AdamW's learning rate over Muon's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float = 0.02,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_ratio: float = 0.15,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "adamw_ratio": adamw_ratio,
            "uses_muon": False,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            shapes = [tuple(p.shape) for p in group["params"] if p.ndim != 2]
            if group["uses_muon"] and shapes:
                raise ValueError(f"groups that use Muon must hold matrices only, got a shape of {shapes[0]}")

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None
    ) -> Any:
        """One step of all groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained:
                (self._muon_step if group["uses_muon"] else self._adamw_step)(group, trained)
        return loss

    def _muon_step(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        buffers = self._moments(trained, "momentum_buffer")
        for p, gradient, buffer in zip(trained, _gradients(trained), buffers, strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            direction = orthogonalized(gradient.lerp(buffer, momentum))  # Nesterov's
            rows, columns = p.shape
            p.mul_(1 - lr * group["weight_decay"])
            p.add_(direction, alpha=-lr * max(1, rows / columns) ** 0.5)

    def _adamw_step(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        for p in trained:
            self.state[p].setdefault("step", torch.tensor(0.0))
        adamw(
            trained,
            _gradients(trained),
            self._moments(trained, "exp_avg"),
            self._moments(trained, "exp_avg_sq"),
            [],
            [self.state[p]["step"] for p in trained],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["adamw_ratio"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _moments(self, trained: list[Tensor], name: str) -> list[Tensor]:
        for p in trained:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p)
        return [self.state[p][name] for p in trained]


def _gradients(trained: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in trained if p.grad is not None]


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with all singular values near one: five Newton-Schulz steps with Muon's coefficients.

    >>> values = torch.linalg.svdvals(orthogonalized(torch.diag(torch.tensor([1.0, 2.0, 3.0]))))
    >>> bool(((values > 0.6) & (values < 1.3)).all())
    True
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
