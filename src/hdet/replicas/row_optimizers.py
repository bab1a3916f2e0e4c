"""Optimizer steps for all replicas at once: rows are replicas, hyperparameters may differ by row.

Each rule follows the torch optimizer of its name, value by value, in plain broadcasting arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hdet.replicas.tensors import widest_float

Hyper = Mapping[str, Any]
"""Hyperparameters of one parameter group; each a column in double precision with one entry per replica, or a
number where all have the same, which is faster. With them: the number of the step, and flags."""

Moments = dict[str, Tensor]

Rule = Callable[[Tensor, Tensor, Moments, Hyper], None]
"""``rule(parameters, gradient, moments, hyper)`` changes parameters and moments in place, and may use the
gradient's memory."""


class RowOptimizer:
    """One optimizer for all rows: its rule, its moments, and how many steps it has made.

    Args:
        optimizer: the user's, which is never stepped. Its groups hold the hyperparameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._rule = rule_for(optimizer)
        self._optimizer = optimizer
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self.moments: list[Moments] = [{} for _ in self._optimizer.param_groups]
        """By parameter group, with a row for each that is computed."""
        self.num_updates = 0
        """Steps, as Adam's bias correction counts them."""

    @torch.no_grad()
    def step(
        self,
        matrices: Sequence[Tensor],
        gradients: Sequence[Tensor],
        explored: Callable[[int], Mapping[str, Sequence[float]]],
    ) -> None:
        """One step of every row.

        Args:
            matrices: the parameters of each group, a row for each replica.
            gradients: the same for gradients; a single row stands for all.
            explored: the values of a group that differ by row.
        """
        self.num_updates += 1
        self.fit(len(matrices[0]))
        for i, group in enumerate(self._optimizer.param_groups):
            hyper = {
                **columns_of(group, explored(i), matrices[i]),
                "step": self.num_updates,
                "has_momentum": bool(group.get("momentum", 0)),
                "nesterov": group.get("nesterov", False),
                "is_decoupled": group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW)),
            }
            self._rule(matrices[i], gradients[i], self.moments[i], hyper)

    def fit(self, num_rows: int) -> None:
        """One row of moments for each row that is computed; the mean of another number of them."""
        for moments in self.moments:
            for name, value in moments.items():
                if len(value) != num_rows:
                    moments[name] = value.mean(dim=0, keepdim=True).expand(num_rows, -1).clone()

    def matrices(self) -> list[Tensor]:
        """All moments, with a row for each replica that is computed."""
        return [value for moments in self.moments for value in moments.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything."""
        return {"moments": copy.deepcopy(self.moments), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint."""
        self.clear()
        groups = self._optimizer.param_groups
        for group, moments, saved in zip(groups, self.moments, state["moments"], strict=True):
            device = group["params"][0].device
            moments.update({name: value.to(device, copy=True) for name, value in saved.items()})
        self.num_updates = state["num_updates"]


def columns_of(group: dict[str, Any], explored: Mapping[str, Sequence[float]], matrix: Tensor) -> Hyper:
    """The hyperparameters of a group, each a number, or a column with one entry for each row."""
    names = ("lr", "weight_decay", "momentum", "dampening", "eps")
    held = {key: group[key] for key in names if key in group}
    held |= {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}
    every = {key: [float(value)] * len(matrix) for key, value in held.items()} | dict(explored)
    # Half precisions need columns: in their own arithmetic a beta of 0.999 would be one.
    may_be_numbers = matrix.dtype in (torch.float32, torch.float64)
    told = {"dtype": widest_float(matrix.device), "device": matrix.device}
    return {
        key: values[0] if may_be_numbers and len(set(values)) == 1 else torch.tensor(values, **told)[:, None]
        for key, values in every.items()
    }


def rule_for(optimizer: Optimizer) -> Rule:
    """The rule of this optimizer; raises for what it cannot do."""
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ValueError(
                    f"optimizer must not use {flag} with virtual replicas, got {flag}=True: turn it off, or "
                    "train on real ranks with hdet.Ensemble"
                )
    # The exact class: a subclass may have changed the step.
    rules: dict[type[Optimizer], Rule] = {SGD: sgd, Adam: adam, AdamW: adam}
    if type(optimizer) not in rules:
        raise TypeError(
            "optimizer must be torch.optim.SGD, Adam or AdamW with virtual replicas, got "
            f"{type(optimizer).__name__}: train on real ranks with hdet.Ensemble, which takes any optimizer"
        )
    return rules[type(optimizer)]


def sgd(parameters: Tensor, gradient: Tensor, moments: Moments, hyper: Hyper) -> None:
    """Stochastic gradient descent, with momentum where it is above zero."""
    direction = _with_decay(gradient, parameters, hyper)
    if hyper["has_momentum"]:
        momentum = _working(hyper["momentum"], parameters)
        if "momentum_buffer" in moments:
            buffer = moments["momentum_buffer"].mul_(momentum)
            _add(buffer, direction, 1 - hyper["dampening"])
        else:
            buffer = direction.expand_as(parameters).to(parameters.dtype, copy=True)
            moments["momentum_buffer"] = buffer
        direction = direction + momentum * buffer if hyper["nesterov"] else buffer
    _add(parameters, direction, -hyper["lr"])


def adam(parameters: Tensor, gradient: Tensor, moments: Moments, hyper: Hyper) -> None:
    """Adam with coupled, AdamW with decoupled weight decay."""
    if "exp_avg" not in moments:
        moments["exp_avg"] = torch.zeros_like(parameters)
        moments["exp_avg_sq"] = torch.zeros_like(parameters)
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    beta1, beta2, step = hyper["beta1"], hyper["beta2"], hyper["step"]
    if not hyper["is_decoupled"]:
        gradient = _with_decay(gradient, parameters, hyper)
    elif isinstance(hyper["weight_decay"], Tensor) or hyper["weight_decay"]:
        parameters.mul_(_working(1 - hyper["lr"] * hyper["weight_decay"], parameters))
    rate = _working(1 - beta1, parameters)
    dtype = _wide(parameters)
    if first.dtype == dtype:
        first.lerp_(gradient.expand_as(first), rate)
    else:
        first.mul_(_working(beta1, parameters)).add_(rate * gradient)
    # One matrix serves for all that follows, the gradient itself if it has a row for every replica: fresh
    # memory would cost more than the arithmetic.
    is_own = gradient.shape == parameters.shape and gradient.dtype == dtype
    scratch = gradient if is_own else gradient.to(dtype).expand_as(parameters).clone()
    scratch.square_().mul_(_working(1 - beta2, parameters))
    second.mul_(_working(beta2, parameters)).add_(scratch)
    scratch.copy_(second).sqrt_()
    scratch.div_(_working((1 - beta2**step) ** 0.5, parameters)).add_(_working(hyper["eps"], parameters))
    torch.div(first, scratch, out=scratch)
    parameters.sub_(scratch.mul_(_working(hyper["lr"] / (1 - beta1**step), parameters)))


def _with_decay(gradient: Tensor, parameters: Tensor, hyper: Hyper) -> Tensor:
    decay = hyper["weight_decay"]
    if not isinstance(decay, Tensor) and decay == 0:
        return gradient
    return gradient + _working(decay, parameters) * parameters


def _add(target: Tensor, values: Tensor, factor: Any) -> None:
    """``target += factor * values``; for a number without memory of its own."""
    if isinstance(factor, Tensor):
        target.add_(_working(factor, target) * values)
    else:
        target.add_(values, alpha=factor)


def _working(column: Any, parameters: Tensor) -> Any:
    """A column in the precision of the arithmetic: half precisions are computed in float32.

    In bfloat16 a beta of 0.999 would be one.
    """
    return column.to(_wide(parameters)) if isinstance(column, Tensor) else column


def _wide(parameters: Tensor) -> torch.dtype:
    return torch.float64 if parameters.dtype == torch.float64 else torch.float32
