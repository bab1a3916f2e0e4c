"""ModelRows: N copies of a model as rows of flat matrices, one matrix per parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from hdet.errors import CannotVectorizeError
from hdet.replicas.losses import scalar_of

Loss = Callable[[nn.Module, Any], Tensor]

_T = TypeVar("_T")


class _TensorPlaces:
    """Knows where a model holds its tensors, looked up once, so that others can be put there for one call.

    As ``torch.func.functional_call`` does, which looks everything up at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        names = {id(tensor): name for name, tensor in (self.parameters | self.buffers).items()}
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
        for module in model.modules():
            for held in (module._parameters, module._buffers):  # noqa: SLF001
                for key, tensor in held.items():
                    if tensor is not None:  # a tensor with two names has two places
                        self._places[names[id(tensor)]].append((held, key))

    def call(self, function: Callable[[], _T], tensors: Mapping[str, Tensor]) -> tuple[_T, dict[str, Tensor]]:
        """Call the function with these tensors in place.

        Buffers are returned too: a model may change them in place or put new ones in their place.
        """
        places = [(place, tensor) for name, tensor in tensors.items() for place in self._places[name]]
        before = [held[key] for (held, key), _ in places]
        try:
            for (held, key), tensor in places:
                held[key] = tensor
            result = function()
            return result, {name: held[key] for name in self.buffers for held, key in self._places[name][:1]}
        finally:
            for ((held, key), _), tensor in zip(places, before, strict=True):
                held[key] = tensor


class _Leaves(NamedTuple):
    """Parts of the matrices, in their own memory: what is differentiated by, and where results go."""

    weights: dict[str, Tensor]
    gradients: list[Tensor]


class ModelRows:
    """The replicas' parameters and buffers.

    Args:
        model: the template; all replicas start from its parameters.
        optimizer: its groups become the matrices.
        loss: ``loss(model, batch)``, a scalar.
        num_replicas: number of rows.
        vectorize: all replicas in one pass, or one after the other.
        same_random_numbers: in one pass, draw the same for all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        *,
        num_replicas: int,
        vectorize: bool,
        same_random_numbers: bool = False,
    ) -> None:
        self._model = model
        self._loss = loss
        self._vectorize = vectorize
        self._randomness = "same" if same_random_numbers else "different"
        self._num_replicas = num_replicas
        self._tensor_places = _TensorPlaces(model)
        self._templates = self._tensor_places.parameters
        names = {parameter: name for name, parameter in self._templates.items()}
        self.matrices: list[Tensor] = []
        self._places: list[list[tuple[str, torch.Size]]] = []
        for i, group in enumerate(optimizer.param_groups):
            missing = [p.shape for p in group["params"] if p not in names]
            if missing:
                raise ValueError(
                    f"optimizer must hold parameters of the model only, got {len(missing)} others in group "
                    f"{i}: build it from model.parameters()"
                )
            trained = [p for p in group["params"] if p.requires_grad]
            kinds = {(p.dtype, p.device) for p in trained}
            if len(kinds) != 1:
                raise ValueError(
                    "optimizer groups must hold trainable parameters of one precision and device each with "
                    f"virtual replicas, got {sorted(map(str, kinds))} in group {i}: "
                    + ("split the group" if kinds else "remove the group")
                )
            flat = torch.cat([p.detach().reshape(-1) for p in trained])
            self.matrices.append(flat.expand(num_replicas, -1).clone())
            self._places.append([(names[p], p.shape) for p in trained])
        # Gradients have the same layout, and keep their memory from step to step.
        self._gradient_matrices = [torch.empty_like(matrix) for matrix in self.matrices]
        held = {name for places in self._places for name, _ in places}
        self._fixed = {name: p.detach() for name, p in self._templates.items() if name not in held}
        self.buffers = {
            name: buffer.detach().expand(num_replicas, *buffer.shape).clone()
            for name, buffer in self._tensor_places.buffers.items()
        }
        self._leaves: dict[int | None, _Leaves] = {}

    def losses_and_gradients(
        self, batches: Sequence[Any], before: Callable[[int], None], num_rows: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss of every replica, and per group a matrix of gradients.

        Args:
            batches: one for each replica, or a single one for all.
            before: called with the replica's number before its own pass, where they go one by one.
            num_rows: compute the first rows only.
        """
        if self._vectorize and num_rows == self._num_replicas > 1:
            losses = self._all_at_once(batches)
        else:
            losses = self._one_by_one(batches, before, num_rows)
        return losses, [matrix[:num_rows] for matrix in self._gradient_matrices]

    def _all_at_once(self, batches: Sequence[Any]) -> Tensor:
        is_common = len(batches) == 1
        batch = batches[0] if is_common else _stack(batches)
        every = vmap(self._loss_of, in_dims=(0, 0, None if is_common else 0), randomness=self._randomness)
        leaves = self._leaves_of(None)
        try:
            # Other attention kernels have no batching rule everywhere.
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                losses, buffers = every(leaves.weights, self.buffers, batch)
                # A loss depends on its own row alone: the gradient of the sum is that of each.
                self._differentiate(losses.sum(), leaves)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise CannotVectorizeError(
                f"the model cannot run for all replicas at once: {reason} Pass vectorize=False (in a task: "
                "can_vectorize = False) to run them one after the other"
            ) from error
        self.buffers = {name: buffer.detach() for name, buffer in buffers.items()}
        return losses.detach()

    def _one_by_one(self, batches: Sequence[Any], before: Callable[[int], None], num_rows: int) -> Tensor:
        losses = []
        for r in range(num_rows):
            before(r)
            leaves = self._leaves_of(r)
            buffers = {name: buffer[r] for name, buffer in self.buffers.items()}
            with torch.enable_grad():
                loss, changed = self._loss_of(leaves.weights, buffers, batches[r % len(batches)])
                self._differentiate(loss, leaves)
            losses.append(loss.detach())
            for name, buffer in changed.items():
                if buffer is not buffers[name]:
                    self.buffers[name][r].copy_(buffer.detach())
        return torch.stack(losses)

    def _differentiate(self, loss: Tensor, leaves: _Leaves) -> None:
        found = torch.autograd.grad(loss, list(leaves.weights.values()), allow_unused=True)
        places, gradients = [], []
        for place, gradient in zip(leaves.gradients, found, strict=True):
            if gradient is None:  # the loss does not depend on it
                place.zero_()
            elif gradient.dim() == 3 and gradient[0].numel() >= 3600 and not gradient.is_contiguous():
                # Transposed, as linear layers give them: torch copies large ones fast, one at a time.
                places += place.unbind()
                gradients += gradient.unbind()
            else:
                places.append(place)
                gradients.append(gradient)
        torch._foreach_copy_(places, gradients)  # pyright: ignore[reportPrivateImportUsage]

    def _loss_of(
        self, trained: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss with these tensors in place, and the buffers after it."""
        function = partial(self._loss, self._model, batch)
        loss, changed = self._tensor_places.call(function, self._fixed | trained | buffers)
        return scalar_of("loss must return", loss), changed

    def scores(
        self, score: Callable[[nn.Module], Tensor], before: Callable[[int], None], num_rows: int
    ) -> list[float]:
        """``score(model)`` with the parameters of each of the first replicas."""
        views, result = self._views(self.matrices), []
        for r in range(num_rows):
            before(r)
            buffers = {name: buffer[r].clone() for name, buffer in self.buffers.items()}
            tensors = self._fixed | {name: view[r] for name, view in views.items()} | buffers
            value, _ = self._tensor_places.call(partial(score, self._model), tensors)
            result.append(value.item())
        return result

    def tensors(self) -> list[Tensor]:
        """The matrices and the buffers, with a row per replica each."""
        return [*self.matrices, *self.buffers.values()]

    @torch.no_grad()
    def average_(
        self, included: Sequence[int], others: Sequence[Tensor] = (), weights: Sequence[float] | None = None
    ) -> None:
        """Give every replica the mean over the included ones, and the template too."""
        # Constants stay as they are: a mean of equal values may differ in its last bit.
        floating = [b for b in self.buffers.values() if b.is_floating_point() and not (b == b[:1]).all()]
        average_rows((*self.matrices, *others, *floating), included, weights)
        self.write_template(included[0])

    @torch.no_grad()
    def write_template(self, replica: int) -> None:
        """Copy one replica into the model that the user gave."""
        for name, view in self._views(self.matrices).items():
            self._templates[name].copy_(view[replica])
        for name, buffer in self.buffers.items():
            self._tensor_places.buffers[name].copy_(buffer[replica])

    @torch.no_grad()
    def read_template(self, replica: int | None = None) -> None:
        """Give one replica, or all of them, the parameters and buffers of the user's model."""
        rows = slice(None) if replica is None else slice(replica, replica + 1)
        for name, view in self._views(self.matrices).items():
            view[rows].copy_(self._templates[name].expand_as(view[rows]))
        for name, buffer in self.buffers.items():
            buffer[rows].copy_(self._tensor_places.buffers[name].expand_as(buffer[rows]))

    def _leaves_of(self, replica: int | None) -> _Leaves:
        """Of one replica, or of all."""
        if replica not in self._leaves:
            weights, gradients = self._views(self.matrices), self._views(self._gradient_matrices)
            rows = slice(None) if replica is None else replica
            self._leaves[replica] = _Leaves(
                {name: view[rows].detach().requires_grad_() for name, view in weights.items()},
                [view[rows] for view in gradients.values()],
            )
        return self._leaves[replica]

    def _views(self, matrices: Sequence[Tensor]) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for matrix, places in zip(matrices, self._places, strict=True):
            parts = matrix.split([shape.numel() for _, shape in places], dim=1)
            for part, (name, shape) in zip(parts, places, strict=True):
                views[name] = part.view(self._num_replicas, *shape)
        return views


@torch.no_grad()
def average_rows(
    matrices: Sequence[Tensor], included: Sequence[int], weights: Sequence[float] | None = None
) -> None:
    """Give every row the mean over the included ones, or their sum with these weights.

    >>> rows = torch.tensor([[1.0], [3.0], [9.0]])
    >>> average_rows([rows], [0, 1], [0.75, 0.25, 0.0])
    >>> rows.flatten().tolist()
    [1.5, 1.5, 1.5]
    """
    for matrix in matrices:
        rows = matrix if len(included) == len(matrix) else matrix[list(included)]
        if weights is None:
            mean = rows.mean(dim=0, keepdim=True)
        else:
            share = torch.tensor([weights[r] for r in included], dtype=torch.float64).to(rows.device)
            dtype = torch.promote_types(rows.dtype, torch.float32)
            mean = torch.tensordot(share.to(dtype), rows.to(dtype), dims=1).unsqueeze(0)
        matrix.copy_(mean.expand_as(matrix))


def _stack(batches: Sequence[Any]) -> Any:
    """All batches as one, with a new first dimension."""
    try:
        return pytree.tree_map(lambda *leaves: torch.stack(list(map(torch.as_tensor, leaves))), *batches)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            "batches must have the same shapes, one per replica, got sizes "
            f"{[size_of(batch) for batch in batches]} ({str(error).splitlines()[0]}): leave out the last "
            "batch of an epoch (drop_last=True), or pass vectorize=False"
        ) from error


def join(batches: Sequence[Any]) -> Any:
    """One batch out of several, along the first dimension of every tensor."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *batches) if len(batches) > 1 else batches[0]


def digest_of(batch: Any) -> float:
    """Give a number that tells batches apart."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return math.fsum(tensor.double().nan_to_num().sum().item() for tensor in tensors)


def size_of(batch: Any) -> int:
    """Count the examples of a batch: the first dimension of its first tensor; one if it has none."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else 1


def split(batch: Any, num_parts: int, *, least: int = 1) -> list[Any]:
    """Several batches out of one, along the first dimension; what has another size goes into all of them.

    Parts that would have fewer than ``least`` examples are shared by neighbours.

    >>> [part["x"].tolist() for part in split({"x": torch.arange(5), "scale": torch.ones(2)}, 2)]
    [[0, 1], [2, 3, 4]]
    >>> [part.tolist() for part in split(torch.arange(4), 4, least=2)]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    size = size_of(batch)
    edges = [i * size // num_parts for i in range(num_parts + 1)]
    ends = list(pairwise(edges))
    if size // num_parts < least:
        starts = [min(edge // least * least, size - least) for edge in edges[:-1]]
        ends = [(start, start + least) for start in starts]

    def part_of(start: int, end: int, leaf: Any) -> Any:
        has_examples = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size
        return leaf[start:end] if has_examples else leaf

    return [pytree.tree_map(partial(part_of, *each), batch) for each in ends]
