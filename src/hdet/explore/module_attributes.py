"""Hyperparameters of the model and of the loss: attributes of modules."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checks import require_kind
from hdet.errors import NoEffectWarning, warn
from hdet.explore.hyperparameters import Spreading, read_number
from hdet.explore.slots import FunctionSlot
from hdet.explore.tunable import Tunable


@dataclass(frozen=True, eq=False)
class _Of:
    # Fields of a first base come first, so that the model can be given first.
    model: nn.Module = field(repr=False)


@dataclass(frozen=True, eq=False)
class _OfAttribute(_Of):
    attribute: str


@dataclass(frozen=True, eq=False)
class _ModuleSlots(Spreading, _Of):
    """Mechanism of the members below: attributes of the modules that match, on one tunable."""

    pattern: str = "*"
    """Which modules, by the name that ``model.named_modules()`` gives them."""

    changes_loss: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_kind("model must be a torch.nn.Module", self.model, isinstance(self.model, nn.Module))
        is_text = isinstance(self.pattern, str)
        require_kind("pattern must be a text such as '*.attention.*'", self.pattern, is_text)

    def tunables(self, optimizer: Optimizer) -> list[Tunable]:
        """One tunable for all modules that match; each keeps its own base."""
        name, looked_for = self._words()
        slots = []
        for path, module in self.model.named_modules():
            path = path.replace("_orig_mod.", "").removeprefix("module.")  # of torch.compile and of DDP
            attribute = self._attribute(module) if fnmatch.fnmatchcase(path, self.pattern) else None
            if attribute is not None:
                value = getattr(module, attribute)
                if isinstance(value, bool) or value != 0:  # zero stays zero under any factor
                    read_number(f"{name} of {path or type(module).__name__}", value)
                    get = partial(_read, module, attribute)
                    slots.append(FunctionSlot(get, partial(setattr, module, attribute)))
        if not slots:
            warn(
                f"{type(self).__name__} found no {looked_for} in {type(self.model).__name__}, "
                f"pattern {self.pattern!r}: nothing is explored",
                NoEffectWarning,
            )
            return []
        return [self._tunable(name, slots, changes_loss=self.changes_loss)]

    def _words(self) -> tuple[str, str]:
        """The name of the tunable, and what is looked for."""
        raise NotImplementedError

    def _attribute(self, module: nn.Module) -> str | None:
        """The attribute of a module that is explored, if it has one."""
        raise NotImplementedError


def _read(module: nn.Module, attribute: str) -> float:
    return float(getattr(module, attribute))


@dataclass(frozen=True, eq=False)
class ModuleAttribute(_ModuleSlots, _OfAttribute):
    """Explore a float attribute of modules, such as the drop rate of stochastic depth.

    ``ModuleAttribute(model, "drop_prob", spread=0.3, bounds=(0, 0.5))``
    """

    def _words(self) -> tuple[str, str]:
        return self.attribute, f"attribute {self.attribute!r} above zero"

    def _attribute(self, module: nn.Module) -> str | None:
        is_other = isinstance(getattr(module, self.attribute, None), (nn.Module, Tensor))
        return self.attribute if hasattr(module, self.attribute) and not is_other else None


@dataclass(frozen=True, eq=False)
class Dropout(_ModuleSlots):
    """Explore dropout rates: every ``nn.Dropout*``, and ``dropout`` of attention and recurrent modules."""

    spread: float = 0.3
    bounds: tuple[float, float] | None = (0.0, 0.9)

    def _words(self) -> tuple[str, str]:
        return "dropout", "dropout rate above zero"

    def _attribute(self, module: nn.Module) -> str | None:
        name = "dropout" if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) else ""
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else name  # noqa: SLF001
        return name if name and getattr(module, name) > 0 else None


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
class AttentionTemperature(_ModuleSlots):
    """Explore the scale on attention logits (one over the temperature).

    It looks for :class:`AttentionScale` modules and for attention modules that expose their scale as a
    float: ``attention_scale``, ``softmax_scale``, ``scaling`` (Hugging Face) or ``scale`` (timm).
    """

    def _words(self) -> tuple[str, str]:
        return "attention_scale", "AttentionScale, attention_scale, softmax_scale, scaling or scale"

    def _attribute(self, module: nn.Module) -> str | None:
        known = ("attention_scale", "softmax_scale", "scaling", "scale")
        return next((name for name in known if isinstance(getattr(module, name, None), float)), None)


@dataclass(frozen=True, eq=False)
class LabelSmoothing(_ModuleSlots):
    """Explore ``label_smoothing`` of ``nn.CrossEntropyLoss`` modules. It changes the loss: give a probe."""

    spread: float = 0.5
    bounds: tuple[float, float] | None = (0.0, 0.5)

    changes_loss = True

    def _words(self) -> tuple[str, str]:
        return "label_smoothing", "CrossEntropyLoss with label_smoothing above zero"

    def _attribute(self, module: nn.Module) -> str | None:
        is_smoothed = isinstance(module, nn.CrossEntropyLoss) and module.label_smoothing > 0
        return "label_smoothing" if is_smoothed else None
