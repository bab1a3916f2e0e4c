"""The rows of the ablation: the paper's six, and what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hdet.method.controller import first_controlled_sync, floor_matching, num_controlled_rounds
from hdet.method.recipe import one_cycle

__all__ = ["ROWS", "Row", "between", "controller_start", "decay_shape", "sync_every"]

_At = Literal["low", "high", "best", "between"]

SPREAD = 1 / 9
NOISE_SCALE = 0.01
EMA_DECAY = 0.99
SWA_SHARE = 0.25
FLOOR = 1 / (25 * 1e4)
"""The controller's floor over the peak, as OneCycleLR has it."""


def sync_every(steps: int) -> int:
    """T, scaled to the length of the run: the paper's 1000 for a run of hours.

    >>> sync_every(300), sync_every(5000)
    (5, 50)
    """
    return max(5, steps // 100)


def controller_start(steps: int) -> int:
    """The step from which the controller acts: a fifth of the run.

    >>> controller_start(300)
    60
    """
    return round(0.2 * steps)


def decay_shape(step: int, *, steps: int) -> float:
    r"""Factor on the peak where the controller's decay acts and its signal does not (eq. 7 with v = 0).

    .. math:: c(t) = c(t_0 - 1)\,(1-\gamma)^{1 + \lfloor (t-t_0)/T \rfloor}, \qquad t \ge t_0

    Before :math:`t_0`, the first sync that the controller acts at, it is the plan: warmup and linear anneal.

    >>> decay_shape(10, steps=100), round(decay_shape(99, steps=100) * 25 * 1e4, 6)
    (1.0, 1.0)
    """
    start, interval = controller_start(steps), sync_every(steps)
    first = first_controlled_sync(start, interval)
    if step < first:
        return one_cycle(step, steps)
    taken_over = one_cycle(first - 1, steps)  # what the last step before the sync was made with
    gamma = floor_matching(taken_over, FLOOR, num_controlled_rounds(start, interval, steps))
    return taken_over * (1 - gamma) ** (1 + (step - first) // interval)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table."""

    key: str
    """In the ledger."""
    name: str
    description: str
    at: _At
    """Its learning rate."""
    is_in_paper: bool = False
    settings: Callable[[int], dict[str, Any]] = lambda steps: {}
    """By the number of steps: what differs from a plain run. Fields of RunConfig, or ``average`` and
    ``shape`` of a plain run."""


def _replicas(steps: int, **changes: Any) -> dict[str, Any]:
    """Settings of RunConfig; losses are the replicas' own, as in the paper."""
    plain = {"spread": 0.0, "controller": "none", "noise_scale": 0.0, "probe": False}
    return {**plain, "sync_every": sync_every(steps), "per_group": True, **changes}


def _hdet(steps: int, *, controls: bool = True, noise_scale: float = NOISE_SCALE) -> dict[str, Any]:
    control = {"controller": "paper", "controller_start": controller_start(steps)} if controls else {}
    return _replicas(steps, spread=SPREAD, noise_scale=noise_scale, **control)


def _hdet_rows(at: _At) -> list[Row]:
    """The paper's three at High; at the best learning rate they show what the parts do where all trains."""
    parts = (
        ("hdet_no_controller", "HDET without controller", "spread and noise", {"controls": False}),
        ("hdet_no_warm_start", "HDET without warm start", "spread and controller", {"noise_scale": 0.0}),
        ("hdet", "HDET (full)", "spread, noise and controller", {}),
    )
    return [
        Row(
            key=key,
            name=name,
            description=description,
            at=at,
            is_in_paper=at == "high",
            settings=partial(_hdet, **changes),
        )
        for key, name, description, changes in parts
    ]


def _decay_row(at: _At) -> Row:
    return Row(
        key="plain_decay",
        name="Plain with the controller's decay",
        description="exponential from the controller's start to its floor",
        at=at,
        settings=lambda steps: {"shape": "decay"},
    )


ROWS = (
    Row(key="plain", name="Baseline-Low", description="plain", at="low", is_in_paper=True),
    Row(key="grid", name="Baseline-High", description="plain", at="high", is_in_paper=True),
    Row(
        key="warm_init",
        name="Warm-Init",
        description="noise on each replica's start; averaged at the end only",
        at="high",
        is_in_paper=True,
        settings=lambda steps: _replicas(steps, noise_scale=NOISE_SCALE, sync_every=steps),
    ),
    *_hdet_rows("high"),
    Row(
        key="warm_init_averaged",
        name="Warm-Init, averaged",
        description="noise on each replica's start; averaged every T",
        at="high",
        settings=lambda steps: _replicas(steps, noise_scale=NOISE_SCALE),
    ),
    _decay_row("high"),
    Row(
        key="local_sgd",
        name="Local SGD",
        description="own gradients, averaged every T; no spread",
        at="high",
        settings=lambda steps: _replicas(steps, gradients="local"),
    ),
    Row(
        key="hdet_local",
        name="HDET (full), local gradients",
        description="as HDET (full), with the replicas' own gradients",
        at="high",
        settings=lambda steps: _hdet(steps) | {"gradients": "local"},
    ),
    Row(key="grid", name="Best plain LR", description="plain, the best of the grid", at="best"),
    Row(
        key="ema",
        name="EMA",
        description=f"weights averaged over the run with decay {EMA_DECAY:g}",
        at="best",
        settings=lambda steps: {"average": "ema", "decay": EMA_DECAY},
    ),
    Row(
        key="swa",
        name="SWA",
        description=f"weights averaged over the last {100 * SWA_SHARE:g} % of the steps",
        at="best",
        settings=lambda steps: {"average": "swa", "share": SWA_SHARE},
    ),
    *_hdet_rows("best"),
    _decay_row("best"),
)
"""In the order of the table; plain runs between Low and High come in between."""


def between(low: float, high: float) -> list[float]:
    """Learning rates above Low and below High, a factor of the root of ten apart.

    >>> between(0.1, 3.0)
    [0.3162, 1.0]
    """
    count = math.ceil(2 * math.log10(high / low) - 1e-3)
    return [float(f"{low * 10 ** (k / 2):.4g}") for k in range(1, count)]
