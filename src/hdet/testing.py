"""Scripted faults, to test how a training run survives them.

A :class:`Fault` says what happens to which replica at which step. :class:`Faults` makes it happen, from four
calls in the training loop. Nothing of torch is replaced: processes end, sleep, and get real NaN and real
errors of the operating system.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdet.checks import require_choice, require_count, require_number

__all__ = ["KINDS", "Fault", "Faults"]

KINDS = {
    "kill": "the process ends at once, as by the kernel",
    "hang": "the process sleeps for `seconds`, an hour if not told",
    "slow": "the process sleeps for `seconds`, a tenth if not told",
    "nan_loss": "the loss is NaN, and so are this replica's gradients before they are averaged",
    "nan_gradients": "gradients are NaN on this replica alone, after they were averaged",
    "nan_parameters": "parameters are NaN",
    "scaled_parameters": "parameters are multiplied by `factor`",
    "full_disk": "what is written beyond `num_bytes` of a file fails with an OSError (not on Windows)",
    "kill_while_saving": "the process ends when `num_bytes` of a file are written (not on Windows)",
    "torn_checkpoint": "the newest file of the folder loses its second half after it was written",
}
"""All kinds of faults, and what they do."""

_SECONDS = {"hang": 3600.0, "slow": 0.1}
"""They take so long if they are not told."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which replica at which step.

    >>> Fault("nan_gradients", replica=1, step=40).name
    'nan_gradients-replica1-step40'
    """

    kind: str
    """One of :data:`KINDS`."""
    replica: int
    """Whom it happens to."""
    step: int
    """The step that it happens in, counted from zero."""
    last_step: int | None = None
    """It happens at every step up to this one; None for one step only."""
    seconds: float | None = None
    """A hang or a slow step takes so long."""
    factor: float = 1e4
    """Parameters are multiplied by this."""
    num_bytes: int = 1000
    """So much of each file is still written."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, tuple(KINDS))
        require_count("replica", self.replica, at_least=0)
        require_count("step", self.step, at_least=0)
        if self.last_step is not None:
            require_count("last_step", self.last_step, at_least=self.step)
        if self.seconds is not None:
            require_number("seconds", self.seconds, at_least=0)
        require_number("factor", self.factor)
        require_count("num_bytes", self.num_bytes, at_least=0)

    @property
    def name(self) -> str:
        """Name it as in the folder of those that have happened."""
        return f"{self.kind}-replica{self.replica}-step{self.step}"

    def happens_at(self, step: int) -> bool:
        """Tell if it happens in this step."""
        return self.step <= step <= (self.step if self.last_step is None else self.last_step)


class Faults:
    """Makes faults happen in a training loop. Every replica has the same list.

    Args:
        faults: what shall happen.
        happened: a folder that remembers what has happened, so that a restarted run does not meet it again.
            None: a fault happens whenever its step is reached.
        replica: which replica this process is; the rank if None.

    A loop calls it at four places, or at those that its faults need::

        faults = Faults([Fault("nan_loss", replica=1, step=40), Fault("kill", replica=0, step=70)])
        for step in range(total_steps):
            faults.before_step(step, model)
            loss = faults.loss(step, loss_of(model, batch))
            optimizer.zero_grad()
            loss.backward()
            faults.after_backward(step, model)
            optimizer.step()
            auto.step(loss)
            if step % 100 == 99:
                with faults.saving(step, folder):
                    save(folder / "checkpoint.pt")

    >>> faults = Faults([Fault("nan_loss", replica=0, step=3)], replica=0)
    >>> [faults.loss(step, torch.tensor(1.0)).item() for step in (2, 3, 4)]
    [1.0, nan, 1.0]
    """

    def __init__(
        self, faults: Iterable[Fault], *, happened: Path | str | None = None, replica: int | None = None
    ) -> None:
        self.faults = list(faults)
        """All of them, of all replicas."""
        self._happened = None if happened is None else Path(happened)
        if self._happened is not None:
            self._happened.mkdir(parents=True, exist_ok=True)
        self._replica = _this_replica() if replica is None else replica

    @torch.no_grad()
    def before_step(self, step: int, model: nn.Module | None = None) -> None:
        """Kill, sleep, or change parameters, at the beginning of a step."""
        for fault in self._due(step, "kill", "hang", "slow", "nan_parameters", "scaled_parameters"):
            if fault.kind == "kill":
                os._exit(1)
            elif fault.kind in _SECONDS:
                time.sleep(_SECONDS[fault.kind] if fault.seconds is None else fault.seconds)
            elif model is None:
                raise ValueError(f"model must be given to before_step() for the fault {fault.name}, got None")
            else:
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
    def saving(self, step: int, folder: Path | str) -> Iterator[None]:
        """Let the writing of a checkpoint in ``folder`` fail, within the block.

        Around nothing else: while a disk is full, no file of the process can be written.
        """
        limits = self._due(step, "kill_while_saving", "full_disk")
        kills = bool(limits) and limits[0].kind == "kill_while_saving"
        with _limited_files(limits[0].num_bytes, kills=kills) if limits else nullcontext():
            yield
        if self._due(step, "torn_checkpoint"):
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            newest = max(files, key=lambda path: path.stat().st_mtime_ns)
            os.truncate(newest, newest.stat().st_size // 2)

    def _due(self, step: int, *kinds: str) -> list[Fault]:
        """Find what happens to this replica now, and remember it: afterwards may be too late."""
        mine = [f for f in self.faults if f.replica == self._replica and f.kind in kinds]
        due = [f for f in mine if f.happens_at(step)]
        if self._happened is not None:
            due = [f for f in due if not (self._happened / f"{f.name}-at{step}").exists()]
            for fault in due:
                (self._happened / f"{fault.name}-at{step}").touch()
        return due


def _this_replica() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


@contextmanager
def _limited_files(num_bytes: int, *, kills: bool) -> Iterator[None]:
    """Let no file of this process grow beyond a size: writes fail there, or the kernel ends the process."""
    import resource  # not on Windows

    limits, core = resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_CORE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_CORE, core)
        signal.signal(signal.SIGXFSZ, handler)
