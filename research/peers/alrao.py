"""Alrao: every feature of a network has a learning rate of its own (Blier, Wolinski & Ollivier 2018)."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from hdet.lab.train.runner import evaluate
from hdet.method.fan_out import derived_seed
from research.peers.base import Diverged, Job, Method, Trained
from research.peers.many_models import mixture

__all__ = ["METHODS", "Outputs", "feature_rates", "switch"]

_LOWEST, _HIGHEST = 1e-5, 10.0
_NUM_OUTPUTS = 10
_THETA = 0.9999


def switch(weights: Tensor, losses: Tensor, step: int) -> Tensor:
    r"""Weights of models after a batch, by the switch distribution (van Erven et al. 2007, algorithm 1).

    With :math:`p_j = e^{-L_j}`, :math:`\pi_t = 1/(t+1)` and K models:

    .. math:: w^a_j \leftarrow (1-\pi_t)\,w^a_j p_j + \tfrac{\theta}{K}\,\pi_t \sum_i w^a_i p_i, \qquad
        w^b_j \leftarrow w^b_j p_j + \tfrac{1-\theta}{K}\,\pi_t \sum_i w^a_i p_i

    Args:
        weights: (2, K): those that may still switch, and those that may not. A model counts by their sum.
        losses: mean loss of every model on the batch.
        step: t, from 1 on.
    """
    after = weights * torch.exp(losses.min() - losses)
    pool = after[0].sum() / (step + 1)
    after = torch.stack([after[0] * step / (step + 1), after[1]])
    after += pool / len(losses) * torch.tensor([[_THETA], [1 - _THETA]], dtype=weights.dtype)
    return after / after.sum()


def feature_rates(model: nn.Module, generator: torch.Generator) -> dict[nn.Parameter, Tensor]:
    """A learning rate for every feature, log-uniform from 1e-5 to 10, in the shape of its parameters.

    A feature is a unit or a channel with its bias, a column of a table, or one entry of a norm.
    """
    rates: dict[nn.Parameter, Tensor] = {}
    for module in model.modules():
        drawn: dict[int, Tensor] = {}
        for parameter in module.parameters(recurse=False):
            dim = 1 if isinstance(module, nn.Embedding) else 0
            size = parameter.shape[dim]
            if size not in drawn:
                places = torch.rand(size, generator=generator)
                drawn[size] = _LOWEST * (_HIGHEST / _LOWEST) ** places
            shape = [size if i == dim else 1 for i in range(parameter.ndim)]
            rates[parameter] = drawn[size].reshape(shape)
    return rates


class Outputs(nn.Module):
    """Copies of an output layer; what comes out is the mixture of what they predict.

    Args:
        layer: the layer; the copies are initialised anew.
        task: says how predictions are mixed.
    """

    def __init__(self, layer: nn.Linear, task: Any) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(_NUM_OUTPUTS))
        for each in self.copies:
            each.reset_parameters()  # pyright: ignore[reportCallIssue]
        self._task = task
        self.weights = torch.tensor([[_THETA], [1 - _THETA]]).expand(2, _NUM_OUTPUTS) / _NUM_OUTPUTS
        self.features = torch.empty(0)

    def forward(self, features: Tensor) -> Tensor:
        """The mixture; the features are kept for the losses of the copies."""
        self.features = features.detach()
        return mixture(self._task, [each(features) for each in self.copies], self.weights.sum(dim=0))


class _Answer(nn.Module):
    """Gives an output that was computed before; a task takes it for its model."""

    def __init__(self, model: nn.Module, output: Tensor) -> None:
        super().__init__()
        self.module, self.output = model, output

    def forward(self, *_: Any) -> Tensor:
        return self.output


def _run(job: Job) -> Trained:
    model, batches = job.build_model(), job.batches()
    generator = torch.Generator().manual_seed(derived_seed(job.seed, "alrao"))
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    outputs = None
    if linear:
        name, layer = linear[-1]
        outputs = Outputs(layer, job.task)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, outputs)
    rates = feature_rates(model, generator)
    for i, each in enumerate([] if outputs is None else outputs.copies):
        rate = _LOWEST * (_HIGHEST / _LOWEST) ** (i / (_NUM_OUTPUTS - 1))
        rates |= {parameter: torch.tensor(rate) for parameter in each.parameters()}
    for step in range(1, job.steps + 1):
        batch = next(batches)
        model.zero_grad()
        loss = job.task.loss(model, batch)
        if not math.isfinite(loss.item()):
            raise Diverged
        loss.backward()
        if outputs is not None:  # each copy learns as if it were alone
            outputs.zero_grad()
            answers = [_Answer(model, each(outputs.features)) for each in outputs.copies]
            losses = torch.stack([job.task.loss(answer, batch) for answer in answers])
            losses.nan_to_num(1e30).sum().backward()
            outputs.weights = switch(outputs.weights, losses.detach().nan_to_num(1e30), step)
        with torch.no_grad():
            for parameter, rate in rates.items():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    return Trained(evaluate(job.task, model))


METHODS = (
    Method(
        name="alrao",
        description="Alrao: an SGD with a random LR from 1e-5 to 10 for every feature, and ten output layers "
        "that are mixed; no schedule",
        run=_run,
        uses_start=False,
    ),
)
