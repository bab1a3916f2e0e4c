"""JointOptimizer: several optimizers that train one model, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.checks import require_kind
from hdet.errors import bad_argument


class JointOptimizer(Optimizer):
    """Several optimizers, such as Muon for the matrices and AdamW for the rest, that step together.

    Its parameter groups are theirs, in order, so that schedules, :func:`hdet.find_lr` and
    :class:`hdet.AutoLR` see all of them. All learning rates are found and scheduled in proportion.

    Args:
        *optimizers: of different parameters. From now on step this object instead of them.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> matrices, others = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=1e-3)
    >>> joint = JointOptimizer(matrices, others)
    >>> [group["lr"] for group in joint.param_groups]
    [0.1, 0.001]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise bad_argument("optimizers", "must be at least one", "none")
        for one in optimizers:
            require_kind("optimizers must be torch.optim.Optimizer objects", one, isinstance(one, Optimizer))
        owners = [id(p) for one in optimizers for group in one.param_groups for p in group["params"]]
        if len(set(owners)) < len(owners):
            raise bad_argument("optimizers", "must not share a parameter", "two that hold the same one")
        self.optimizers = list(optimizers)
        """The optimizers themselves."""
        super().__init__([group for one in optimizers for group in one.param_groups], {})

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Give what each keeps for its parameters, in one mapping."""
        return _JointState(self.optimizers)

    @state.setter
    def state(self, value: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # torch's own constructor would set it; the optimizers have theirs

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step of each. A closure is evaluated once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has given."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        counts = [len(one.param_groups) for one in self.optimizers]
        if len(groups) != sum(counts):
            remedy = "build the optimizers that it was saved with"
            must = f"must hold {sum(counts)} parameter groups"
            raise bad_argument("state_dict", must, str(len(groups)), remedy)
        left = iter(groups)
        for one, count in zip(self.optimizers, counts, strict=True):
            mine = list(islice(left, count))
            held = {i: state[i] for group in mine for i in group["params"] if i in state}
            one.load_state_dict({"state": held, "param_groups": mine})
        self.param_groups[:] = [group for one in self.optimizers for group in one.param_groups]


class _JointState(MutableMapping[Tensor, Any]):
    """The states of several optimizers, each parameter's at its owner."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers

    def _owner(self, parameter: Tensor) -> Optimizer:
        for one in self._optimizers:
            if any(parameter is p for group in one.param_groups for p in group["params"]):
                return one
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        for one in self._optimizers:
            if parameter in one.state:
                return one.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._owner(parameter).state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owner(parameter).state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        for one in self._optimizers:
            yield from list(one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)
