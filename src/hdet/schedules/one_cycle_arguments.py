"""The arguments of OneCycleAutoLR that it shares with OneCycleLR, checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from hdet.checks import is_list, require_count, require_flag, require_number

_SHARE = {"at_least": 0, "below": 1}
_NUMBERS: dict[str, dict[str, Any]] = {
    "div_factor": {"above": 0},
    "final_div_factor": {"above": 0},
    "ensemble_lr_spread_ratio": _SHARE | {"remedy": "at 1 the lowest replica would not train"},
    "lr_of_lr": {"above": 0},
    "momentum_of_lr": _SHARE,
}
_COUNTS: Mapping[str, Any] = {
    "model_sync_interval": {},
    "auto_lr_warmup_steps": {"at_least": 0},
    "world_size": {"at_most": 2**16},
    "rank": {"at_least": 0},
}


def check_ranges(told: Mapping[str, Any]) -> None:
    """Raise where one of the plain numbers is out of its range."""
    for name, limits in _NUMBERS.items():
        require_number(name, told[name], **limits)
    for name, limits in _COUNTS.items():
        require_count(name, told[name], **limits)


def as_list(value: float | Sequence[float]) -> float | list[float]:
    """Make a list of a sequence; torch asks for lists."""
    return list(value) if isinstance(value, Sequence) else value


def per_group(name: str, value: object, num_groups: int, **limits: Any) -> list[float]:
    """Check a number, or one for each parameter group."""
    if is_list(value):
        if len(value) != num_groups:
            raise ValueError(
                f"{name} must be a number or one per parameter group, got {len(value)} for {num_groups} "
                "groups: give one entry for each group"
            )
        return [require_number(f"{name}[{i}]", v, **limits) for i, v in enumerate(value)]
    return [require_number(name, value, **limits)] * num_groups


def num_steps(total_steps: object, epochs: object, steps_per_epoch: object) -> int:
    """Check the length of a run, given in steps or in epochs."""
    if total_steps is not None:
        if epochs is not None or steps_per_epoch is not None:
            raise ValueError(
                "total_steps must not be given together with epochs or steps_per_epoch, got "
                f"{total_steps!r}, {epochs!r} and {steps_per_epoch!r}: keep total_steps, or the other two"
            )
        return require_count("total_steps", total_steps)
    if epochs is None or steps_per_epoch is None:
        raise ValueError(
            "total_steps must be given, or epochs and steps_per_epoch, got "
            f"epochs={epochs!r} and steps_per_epoch={steps_per_epoch!r}"
        )
    return require_count("epochs", epochs) * require_count("steps_per_epoch", steps_per_epoch)


def check_momentum(optimizer: Optimizer, cycle: object, base: object, highest: object) -> None:
    """Raise where the momentum cannot be cycled between these."""
    num_groups = len(optimizer.param_groups)
    lower = per_group("base_momentum", base, num_groups, at_least=0, below=1)
    upper = per_group("max_momentum", highest, num_groups, at_least=0, below=1)
    if require_flag("cycle_momentum", cycle):
        if "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ValueError(
                "cycle_momentum must be False for an optimizer without momentum or betas, got True for "
                f"{type(optimizer).__name__}: pass cycle_momentum=False"
            )
        for low, high in zip(lower, upper, strict=True):
            if low > high:
                raise ValueError(
                    f"base_momentum must be at most max_momentum={high:g}, got {low:g}: swap them"
                )


def check_phases(pct_start: float, total_steps: int, three_phase: bool) -> None:
    """OneCycleLR divides by the length of each phase that it enters."""
    first = pct_start * total_steps - 1
    ends = [first, 2 * first, total_steps - 1] if three_phase else [first, total_steps - 1]
    start = 0.0
    for i, end in enumerate(ends):
        is_entered = i == len(ends) - 1 or start <= end
        if is_entered and math.isclose(start, end, abs_tol=1e-12):
            raise ValueError(
                f"pct_start must not make a phase of the schedule empty, got {pct_start!r} with "
                f"total_steps={total_steps}: use a larger or smaller pct_start, or more steps"
            )
        start = end
