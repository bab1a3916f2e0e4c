"""Hyperparameters of the model and of the loss: attributes of modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import require_kind
from hdet.errors import NoEffectWarning, warn
from hdet.explore.hyperparameter import Spreading, read_number
from hdet.explore.slots import FunctionSlot
from hdet.explore.tunable import Tunable


@dataclass(frozen=True, eq=False)
class _Of:
    # Fields of a first base come first, so that the model can be given first.
    model: nn.Module = field(repr=False)


@dataclass(frozen=True, eq=False)
class _OfAttribute(_Of):
    attribute: str


class _ModuleSlots(Spreading):
    """Mechanism of the members below: attributes of the modules that match, on one tunable."""

    model: nn.Module
    pattern: str
    looked_for: ClassVar[str] = ""
    changes_loss: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kind("model must be a torch.nn.Module", self.model, isinstance(self.model, nn.Module))
        if not isinstance(self.pattern, str):
            raise TypeError(f"pattern must be a text such as '*.attention.*', got {self.pattern!r}")

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable for all modules that match; each keeps its own base."""
        name = self._name()
        slots = []
        for path, module in self.model.named_modules():
            path = path.replace("_orig_mod.", "").removeprefix("module.")  # of torch.compile and of DDP
            if fnmatch.fnmatchcase(path, self.pattern):
                for attribute in self._attributes(module):
                    where = f"{name} of {path or type(module).__name__}"
                    value = getattr(module, attribute)
                    if isinstance(value, bool) or value != 0:  # zero stays zero under any factor
                        read_number(where, value)
                        slots.append(_attribute_slot(module, attribute))
        if not slots:
            warn(
                f"{type(self).__name__} found no {self._looked_for()} in {type(self.model).__name__}, "
                f"pattern {self.pattern!r}: nothing is explored",
                NoEffectWarning,
            )
        return self._tunable(name, slots, changes_loss=self.changes_loss)

    def _name(self) -> str:
        raise NotImplementedError

    def _attributes(self, module: nn.Module) -> Sequence[str]:
        raise NotImplementedError

    def _looked_for(self) -> str:
        return self.looked_for


def _attribute_slot(module: nn.Module, attribute: str) -> FunctionSlot:
    return FunctionSlot(
        lambda: float(getattr(module, attribute)), lambda value: setattr(module, attribute, value)
    )


@dataclass(frozen=True, eq=False)
class ModuleAttribute(_ModuleSlots, Spreading, _OfAttribute):
    """Explore a float attribute of modules, such as the drop rate of stochastic depth.

    ``ModuleAttribute(model, "drop_prob", spread=0.3, bounds=(0, 0.5))``
    """

    pattern: str = "*"
    """Which modules, by the name that ``model.named_modules()`` gives them."""

    def _name(self) -> str:
        return self.attribute

    def _attributes(self, module: nn.Module) -> Sequence[str]:
        has_it = hasattr(module, self.attribute) and not isinstance(
            getattr(module, self.attribute), (nn.Module, Tensor)
        )
        return [self.attribute] if has_it else []

    def _looked_for(self) -> str:
        return f"attribute {self.attribute!r} above zero"


@dataclass(frozen=True, eq=False)
class Dropout(_ModuleSlots, Spreading, _Of):
    """Explore dropout rates: every ``nn.Dropout*``, and ``dropout`` of attention and recurrent modules."""

    spread: float = 0.3
    bounds: tuple[float, float] | None = (0.0, 0.9)
    pattern: str = "*"
    """Which modules, by the name that ``model.named_modules()`` gives them."""

    looked_for = "dropout rate above zero"

    def _name(self) -> str:
        return "dropout"

    def _attributes(self, module: nn.Module) -> Sequence[str]:
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001
            return ["p"] if module.p > 0 else []
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            return ["dropout"] if module.dropout > 0 else []
        return []


class AttentionScale(nn.Module):
    """A factor on attention logits that can be explored: multiply the queries by it before the attention.

    The hook for attention that has no scale of its own::

        self.attention_scale = hdet.AttentionScale()
        ...
        q = self.attention_scale(q)
        y = F.scaled_dot_product_attention(q, k, v)
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.attention_scale = float(scale)

    def forward(self, queries: Tensor) -> Tensor:
        """The scaled queries."""
        return queries * self.attention_scale


@dataclass(frozen=True, eq=False)
class AttentionTemperature(_ModuleSlots, Spreading, _Of):
    """Explore the scale on attention logits (one over the temperature).

    It looks for :class:`AttentionScale` modules and for attention modules that expose their scale as a
    float: ``attention_scale``, ``softmax_scale``, ``scaling`` (Hugging Face) or ``scale`` (timm).
    """

    pattern: str = "*"
    """Which modules, by the name that ``model.named_modules()`` gives them."""

    looked_for = "AttentionScale, attention_scale, softmax_scale, scaling or scale"

    def _name(self) -> str:
        return "attention_scale"

    def _attributes(self, module: nn.Module) -> Sequence[str]:
        for attribute in ("attention_scale", "softmax_scale", "scaling", "scale"):
            if isinstance(getattr(module, attribute, None), float):
                return [attribute]
        return []


@dataclass(frozen=True, eq=False)
class LabelSmoothing(_ModuleSlots, Spreading, _Of):
    """Explore ``label_smoothing`` of ``nn.CrossEntropyLoss`` modules. It changes the loss: give a probe."""

    spread: float = 0.5
    bounds: tuple[float, float] | None = (0.0, 0.5)
    pattern: str = "*"
    """Which modules, by the name that ``model.named_modules()`` gives them."""

    looked_for = "CrossEntropyLoss with label_smoothing above zero"
    changes_loss = True

    def _name(self) -> str:
        return "label_smoothing"

    def _attributes(self, module: nn.Module) -> Sequence[str]:
        is_smoothed = isinstance(module, nn.CrossEntropyLoss) and module.label_smoothing > 0
        return ["label_smoothing"] if is_smoothed else []
