"""Problem: a task of the zoo, with the optimizer and the setting that its users would choose."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch.optim import AdamW, Optimizer

from hdet.lab.tasks.task import Task

__all__ = ["Problem", "Split"]

Split = Literal["dev", "held out"]


class Problem(Task):
    """A task that also says how it is trained. A class attribute is all that most problems change.

    ``learning_rate`` is where the sweep begins to look, not the best. Names are those of the class, in
    snake case.
    """

    family: ClassVar[str]
    """What kind of model on what kind of data, in two or three words."""
    split: ClassVar[Split]
    """Constants are chosen on ``"dev"`` alone."""
    num_replicas: ClassVar[int] = 8
    """How many replicas share a step; each has ``batch_size`` examples."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm, if it is set."""
    weight_decay: float = 0.0

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """The optimizer, over what :meth:`parameter_groups` gives."""
        return AdamW(groups, lr=lr, weight_decay=self.weight_decay)
