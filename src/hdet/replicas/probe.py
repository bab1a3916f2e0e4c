"""Probe: held-out data that a run may look at, scored part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from hdet.checks import require_batches, require_kind, shown
from hdet.errors import bad_argument
from hdet.method.weight_decay import NUM_PARTS
from hdet.replicas.copies import keeping_generators, same_draws
from hdet.replicas.losses import evaluating, first_loss, scalar_of
from hdet.replicas.optimizers import without_ddp
from hdet.replicas.rows import size_of, split
from hdet.replicas.tensors import reshard

if TYPE_CHECKING:
    from hdet.replicas.port import Replicas

REMEDY = "write hdet.Probe([(x, y)], loss)"


class Probe:
    """Scores a model on held-out data, so that a run can be steered by it.

    For a weight decay the data must be held out: a run that is scored on what it trains on learns nothing of
    it. For a :class:`hdet.Thermostat` a few training batches do. Keep other data for the final test. On
    several ranks give each rank its part of the data, or all of it to every rank. A loss that draws random
    numbers from torch, such as that of a diffusion model, draws the same ones in every score.

    Args:
        batches: such as a DataLoader or a list. They are read once and kept.
        loss: ``loss(model, batch)``, a mean over the examples, as for :func:`hdet.find_lr`.

    >>> data = torch.randn(400, 3)
    >>> probe = Probe(data.split(100), lambda model, x: model(x).square().mean())
    >>> probe.num_examples, probe(nn.Linear(3, 1)).shape
    (400, torch.Size([8]))
    """

    def __init__(self, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor]) -> None:
        require_batches(batches, REMEDY, (Mapping, Tensor))
        require_kind("loss must be a function loss(model, batch)", loss, callable(loss), REMEDY)
        with torch.random.fork_rng(devices=[]), keeping_generators(batches):  # a DataLoader draws a seed
            held = list(batches)
        self.num_examples = sum(map(size_of, held))
        """Examples of this rank."""
        if not self.num_examples:
            is_used_up = iter(batches) is batches
            remedy = "pass the DataLoader itself, not iter(loader) or a generator that was read before"
            raise ValueError(
                "batches must hold at least one example, got none: "
                + (remedy if is_used_up else "give held-out data")
            )
        self.batches = held
        """As they were given."""
        self._cut()
        self._loss = loss
        self._device: torch.device | None = None

    @same_draws()
    def __call__(self, model: nn.Module, *, only_first: bool = False) -> Tensor:
        """Give the losses of its parts, or of the first one, where an error says how the loss was called."""
        self._follow(model)
        if only_first:
            first = self._parts[0]
            is_leaf = not isinstance(first, Sequence | Mapping)
            remedy = f"batches must be a list of batches, {REMEDY}" if is_leaf else ""
            losses = [first_loss(self._loss, model, first, remedy)]
        else:
            losses = [self._loss(model, part) for part in self._parts]
        return torch.stack([scalar_of("loss must return", loss).detach() for loss in losses])

    @same_draws()
    def mean(self, model: nn.Module) -> Tensor:
        """Give the mean loss over all its examples, batch by batch."""
        self._follow(model)
        losses = [scalar_of("loss must return", self._loss(model, batch)).detach() for batch in self.batches]
        if len(losses) == 1:
            return losses[0]
        sizes = torch.tensor([size_of(batch) for batch in self.batches], dtype=torch.float64)
        return (torch.stack(losses).double().cpu() * sizes).sum() / sizes.sum()

    def _cut(self) -> None:
        cuts = -(-NUM_PARTS // len(self.batches))
        self._parts = [
            part for batch in self.batches for part in split(batch, min(cuts, max(1, size_of(batch) // 2)))
        ]

    def _follow(self, model: nn.Module) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if device != self._device:
            self.batches = [pytree.tree_map(lambda x: _moved(x, device), batch) for batch in self.batches]
            self._cut()
            self._device = device


def _moved(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


ProbeOrBatches = Probe | Iterable[Any]
"""What users give where a loss is known: a probe, or held-out batches that become one."""


def probe_of(
    given: ProbeOrBatches | None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    name: str = "probe",
) -> Probe | None:
    """Return what the user gave as the argument ``name``. Held-out batches become one where a loss is known.

    >>> probe_of(lambda model: 0.0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: probe must be an hdet.Probe or None, got <function <lambda>...
    """
    if given is None or isinstance(given, Probe):
        return given
    is_batch = isinstance(given, (tuple, Tensor, Mapping))
    if loss is not None and isinstance(given, Iterable) and not (is_batch or isinstance(given, str)):
        try:
            return Probe(given, loss)
        except (TypeError, ValueError) as error:
            error.args = (f"probe {error}",)  # else it would name other batches
            raise
    also = ", held-out batches such as a DataLoader or a list of them," if loss is not None else ""
    remedy = "write [batch]" if loss is not None and is_batch else REMEDY
    must = f"must be an hdet.Probe{also} or None"
    raise bad_argument(name, must, shown(given), remedy, kind=TypeError)


def losses_of(probe: Probe, model: nn.Module | None) -> list[float]:
    """Give the losses of the parts of a probe, for the model as it is."""
    assert model is not None, "checked when the ensemble was built"
    return probe(without_ddp(model)).tolist()


def require_scorable(replicas: Replicas) -> None:
    """Score the first part of the probe, so that an error shows before the run. Nothing is left changed.

    Collective where the model is sharded: all its ranks compute together. An error of some of them alone
    leaves the others waiting there, as it would in the run.
    """
    probe, model = replicas.probe, replicas.model
    if probe is None or model is None or any(p.is_meta for p in model.parameters()):
        return  # it has no weights yet
    # A buffer that the model puts in the place of another stays: in evaluation it is a cache that has grown.
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with evaluating(model), batch_statistics(model):
            probe(without_ddp(model), only_first=True)
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
        reshard(model)


@contextmanager
def scaled(parameters: Sequence[Tensor]) -> Iterator[Callable[[float], None]]:
    """Yield what multiplies the parameters by a number. They are put back, bit for bit, after the block."""
    if not parameters:  # torch has no operations on nothing
        yield lambda _: None
        return
    kept = [parameter.detach().clone() for parameter in parameters]
    held = [parameter.detach() for parameter in parameters]

    def put(scale: float) -> None:
        torch._foreach_copy_(held, kept)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(held, scale)  # pyright: ignore[reportPrivateImportUsage]

    try:
        yield put
    finally:
        torch._foreach_copy_(held, kept)  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def batch_statistics(model: nn.Module | None) -> Iterator[None]:
    """Let BatchNorm of a model in evaluation mode use the statistics of each batch, within the block.

    Its running statistics belong to the weights that were trained. With scaled weights they would show a
    scale that BatchNorm removes.
    """
    layers = [] if model is None else [m for m in model.modules() if isinstance(m, _BatchNorm)]
    kept = [(layer, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, mean, variance in kept:
            layer.running_mean = mean
            layer.running_var = variance
