"""All trials of a process in one pass: each is a row of the weights and has a learning rate of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.errors import CannotVectorizeError
from hdet.replicas.copies import generator_states, restore_generators
from hdet.replicas.row_optimizers import RowOptimizer
from hdet.replicas.rows import Loss, ModelRows
from hdet.replicas.tensors import is_sharded, parameters_of
from hdet.search.decisions import trial_shape

_MOST_ELEMENTS = 2**18
"""A larger model keeps its device busy with a part of a batch, so that rows gain nothing. And eight of it,
with their gradients and moments, take memory that nobody has planned for."""
_TOLERANCE = 1e-3
"""How far the gradient of a row may be off that of the model, as a share of it."""


def train_rows(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    parts: Sequence[Sequence[Any]],
    factors: Sequence[float],
    asked: Sequence[float],
    clip_norm: float | None,
    steps_made: Callable[[], None],
) -> tuple[ModelRows, list[bool]]:
    """Train all trials from the weights of the model. Returns their weights, and which losses were finite.

    Neither the parameters of the model nor the optimizer change. Random numbers are those that each trial
    would see alone. Raises where the model, the loss or the optimizer cannot be trained as rows.

    Args:
        model: bare, without gradients.
        optimizer: as it begins.
        loss: the user's.
        parts: for each step, the batch of each trial.
        factors: of the trials, on the user's learning rates.
        asked: those learning rates, one for each parameter group.
        clip_norm: of each trial's gradient.
        steps_made: is called after each step.
    """
    _require_plain(model, optimizer)
    step_rows, generators = RowOptimizer(optimizer), generator_states()
    rows = ModelRows(
        model, optimizer, loss, num_replicas=len(factors), vectorize=True, same_random_numbers=True
    )
    loss(model, parts[0][0]).backward()
    expected = [_gradient(group) for group in optimizer.param_groups]
    restore_generators(generators)
    seen = list[torch.Tensor]()
    with _attributes_kept(model), warnings.catch_warnings():
        warnings.filterwarnings("error", "There is a performance drop")  # no batching rule
        for step, batches in enumerate(parts):
            losses, gradients = rows.losses_and_gradients(batches, lambda _: None, len(factors))
            if step == 0:
                _require_same([gradient[0] for gradient in gradients], expected)
            if clip_norm is not None:
                norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in gradients])
                norm = torch.linalg.vector_norm(norms, dim=0)
                for gradient in gradients:
                    gradient.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0)[:, None])
            now = [factor * trial_shape(step, len(parts)) for factor in factors]
            lrs = [{"lr": [factor * lr for factor in now]} for lr in asked]
            step_rows.step(rows.matrices, gradients, lrs.__getitem__)
            seen.append(losses)
            steps_made()
    return rows, torch.stack(seen).isfinite().all(dim=0).tolist()


def _require_plain(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise where rows would leave something out, or take too much memory."""
    tensors = [*parameters_of(optimizer), *model.buffers()]
    has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
    is_compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl for m in model.modules())  # noqa: SLF001
    is_wide = all(p.dtype in (torch.float32, torch.float64) for p in parameters_of(optimizer))
    is_small = sum(tensor.numel() for tensor in tensors) <= _MOST_ELEMENTS
    if has_hooks or is_compiled or not is_wide or not is_small or any(map(is_sharded, tensors)):
        raise CannotVectorizeError("the model or the optimizer is not plain, or large")


def _gradient(group: dict[str, Any]) -> torch.Tensor:
    trained = [p for p in group["params"] if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def _require_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raise where the gradient is another one: a hook or a loss may hold the parameters themselves."""
    off = torch.linalg.vector_norm(torch.cat([a - b for a, b in zip(found, expected, strict=True)]))
    if not off <= _TOLERANCE * torch.linalg.vector_norm(torch.cat(list(expected))):
        raise CannotVectorizeError("the gradient of a row is not that of the model")


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put back what modules hold after the block: a model may have kept what lives within one pass."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for held, before in kept:
            held.clear()
            held.update(before)
