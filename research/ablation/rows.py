"""The rows of the ablation: the paper's six, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hdet.lab.ablation import (
    FLOOR,
    LOW_FACTOR,
    NOISE_SCALE,
    RESIDUAL,
    method_settings,
    replica_settings,
    taken_over,
)

__all__ = ["ROWS", "Row", "equation8_end"]

_At = Literal["low", "high", "best"]

EMA_DECAY = 0.99
SWA_SHARE = 0.25


def equation8_end(steps: int) -> float:
    """Where eq. 8 ends, over the peak, if the sign of its logarithm is turned: a 400th of the start.

    >>> round(1 / equation8_end(1000))
    449
    """
    return taken_over(steps) * 25 / 1e4


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
    is_decisive: bool = False
    """Whether a verdict hangs on it, so that it is worth more seeds than the others."""
    settings: Callable[[int], dict[str, Any]] = lambda steps: {}
    """By the number of steps: what differs from a plain run. Fields of RunConfig and ``checkpoint``, see
    :func:`hdet.lab.ablation.train`, or ``average`` and ``decay_to`` of a plain run."""


def _rows(at: _At) -> list[Row]:
    """Rows at one learning rate: High as in the paper, and the best, where all of them train.

    At High the checkpoint is trained at a ninth of it, because a plain run at High breaks.
    """
    warm = {"checkpoint": 1.0 if at == "best" else 1 / LOW_FACTOR}
    replicas = (
        (
            "hdet",
            "HDET (full)",
            f"spread, noise, and a decay to {100 * RESIDUAL:g} % of the peak",
            {},
        ),
        ("hdet_floor", "HDET (full), floor-matching", "the decay ends at OneCycleLR's floor", {"end": FLOOR}),
        ("hdet_no_controller", "HDET without controller", "spread and noise", {"end": None}),
        ("hdet_no_warm_start", "HDET without warm start", "spread and controller", {"noise_scale": 0.0}),
        ("equal", "Equal replicas, same decay", "HDET (full) with zero spread", {"spread": 0.0}),
        ("averaging", "Averaging, zero spread", "noise, averaged every T", {"spread": 0.0, "end": None}),
        ("hdet_checkpoint", "HDET (full), checkpoint", "from a trained checkpoint with noise", warm),
    )
    rows = [
        Row(
            key=key,
            name=name,
            description=description,
            at=at,
            is_in_paper=key in ("hdet", "hdet_no_controller", "hdet_no_warm_start"),
            is_decisive=key in ("hdet", "equal"),
            settings=partial(method_settings, **changes),
        )
        for key, name, description, changes in replicas
    ]
    return [
        *rows,
        Row(
            key="plain_checkpoint",
            name="Plain, checkpoint",
            description="from the same checkpoint",
            at=at,
            settings=partial(replica_settings, **warm),
        ),
        Row(
            key="plain_decay",
            name="Plain, same decay",
            description=f"exponential from the controller's start to {100 * RESIDUAL:g} %",
            at=at,
            is_decisive=True,
            settings=lambda steps: {"decay_to": RESIDUAL},
        ),
    ]


ROWS = (
    Row(key="plain", name="Baseline-Low", description="plain", at="low", is_in_paper=True),
    Row(key="grid", name="Baseline-High", description="plain", at="high", is_in_paper=True, is_decisive=True),
    Row(
        key="warm_init",
        name="Warm-Init",
        description="noise on each replica's start; averaged at the end only",
        at="high",
        is_in_paper=True,
        settings=lambda steps: replica_settings(steps, noise_scale=NOISE_SCALE, sync_every=steps),
    ),
    *_rows("high"),
    Row(
        key="local_sgd",
        name="Local SGD",
        description="own gradients, averaged every T; no spread",
        at="high",
        is_decisive=True,
        settings=partial(replica_settings, gradients="local"),
    ),
    Row(
        key="hdet_local",
        name="HDET (full), local gradients",
        description="as HDET (full), with the replicas' own gradients",
        at="high",
        is_decisive=True,
        settings=partial(method_settings, gradients="local"),
    ),
    Row(
        key="grid",
        name="Best plain LR",
        description="plain, the best of the grid",
        at="best",
        is_decisive=True,
    ),
    *_rows("best"),
    Row(
        key="hdet_equation8",
        name="HDET (full), eq. 8",
        description="the decay of eq. 8 with the sign of its logarithm turned",
        at="best",
        settings=lambda steps: method_settings(steps, end=equation8_end(steps)),
    ),
    Row(
        key="plain_decay_floor",
        name="Plain, floor-matching",
        description="exponential from the controller's start to OneCycleLR's floor",
        at="best",
        settings=lambda steps: {"decay_to": FLOOR},
    ),
    Row(
        key="hdet_checkpoint_only",
        name="HDET (full), checkpoint, no noise",
        description="from the trained checkpoint itself",
        at="best",
        settings=partial(method_settings, checkpoint=1.0, noise_scale=0.0),
    ),
    Row(
        key="equal_checkpoint",
        name="Equal replicas, checkpoint, same decay",
        description="HDET (full), checkpoint, with zero spread",
        at="best",
        settings=partial(method_settings, checkpoint=1.0, spread=0.0),
    ),
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
)
"""In the order of the table."""
