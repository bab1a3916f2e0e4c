"""Scripted faults, to test how a training run survives them.

A :class:`Fault` says what happens to which replica at which step. :class:`Faults` makes it happen, from four
calls in the training loop. Nothing of torch is replaced: processes end, and get real NaN.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

KINDS = {
    "kill": "the process ends at once, as by the kernel",
    "nan_loss": "the loss is NaN, and so are this replica's gradients before they are averaged",
    "nan_gradients": "gradients are NaN on this replica alone, after they were averaged",
    "nan_parameters": "parameters are NaN",
    "scaled_parameters": "parameters are multiplied by `factor`",
    "kill_while_saving": "the process ends when `num_bytes` of a file are written (not on Windows)",
}
"""All kinds of faults, and what they do."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which replica at which step.

    >>> Fault("nan_gradients", replica=1, step=40).name
    'nan_gradients-replica1-step40'
    """

    kind: str
    """One of :data:`KINDS`."""
    replica: int
    step: int
    """The step that it happens in, counted from zero."""
    factor: float = 1e4
    """Parameters are multiplied by this."""
    num_bytes: int = 1000
    """So much of each file is still written."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS

    @property
    def name(self) -> str:
        """Name it as in the folder of those that have happened."""
        return f"{self.kind}-replica{self.replica}-step{self.step}"


class Faults:
    """Makes faults happen in a training loop. Every replica has the same list.

    Args:
        faults: what shall happen.
        replica: which replica this process is.
        happened: a folder that remembers what has happened, so that a restarted run does not meet it again.
            None: a fault happens whenever its step is reached.

    >>> faults = Faults([Fault("nan_loss", replica=0, step=3)], replica=0)
    >>> [faults.loss(step, torch.tensor(1.0)).item() for step in (2, 3, 4)]
    [1.0, nan, 1.0]
    """

    def __init__(self, faults: Iterable[Fault], *, replica: int, happened: Path | None = None) -> None:
        self._mine = [fault for fault in faults if fault.replica == replica]
        self._happened = happened
        if happened is not None:
            happened.mkdir(parents=True, exist_ok=True)

    @torch.no_grad()
    def before_step(self, step: int, model: nn.Module) -> None:
        """Kill, or change parameters, at the beginning of a step."""
        for fault in self._due(step, "kill", "nan_parameters", "scaled_parameters"):
            if fault.kind == "kill":
                os._exit(1)
            for parameter in model.parameters():
                parameter.mul_(math.nan if fault.kind == "nan_parameters" else fault.factor)

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """Change the loss of this step, before its backward pass."""
        return loss * math.nan if self._due(step, "nan_loss") else loss

    def after_backward(self, step: int, model: nn.Module) -> None:
        """Change gradients, after the backward pass."""
        if self._due(step, "nan_gradients"):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Let the process end while it writes a checkpoint, within the block. Put nothing else there."""
        due = self._due(step, "kill_while_saving")
        with _killed_at(due[0].num_bytes) if due else nullcontext():
            yield

    def _due(self, step: int, *kinds: str) -> list[Fault]:
        """Find what happens to this replica now, and remember it: afterwards may be too late."""
        due = [fault for fault in self._mine if fault.step == step and fault.kind in kinds]
        if self._happened is not None:
            due = [fault for fault in due if not (self._happened / fault.name).exists()]
            for fault in due:
                (self._happened / fault.name).touch()
        return due


@contextmanager
def _killed_at(num_bytes: int) -> Iterator[None]:
    """Let the kernel end the process when a file grows beyond a size."""
    import resource  # not on Windows

    limits, core = resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_CORE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_CORE, core)
        signal.signal(signal.SIGXFSZ, handler)
