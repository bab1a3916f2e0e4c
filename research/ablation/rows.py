"""The rows of the ablation: those of the lab, the same from new weights, and what the paper leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from hdet.lab.ablation import (
    FLOOR,
    RESIDUAL,
    TABLE_1,
    method_settings,
    replica_settings,
    warm_init_settings,
)

__all__ = ["ROWS", "Row"]

_At = Literal["low", "high", "best"]

EMA_DECAY = 0.99
SWA_SHARE = 0.25
_IN_PAPER = ("plain", "grid", "warm_init", "hdet", "hdet_no_controller", "hdet_no_warm_start")
_DECISIVE = ("grid", "hdet", "equal", "plain_decay", "local_sgd", "hdet_local")


@dataclass(frozen=True)
class Row:
    """One row of the table: a configuration at a learning rate."""

    key: str
    """In the ledger."""
    name: str
    description: str
    at: _At
    """Its learning rate."""
    settings: Callable[[int], dict[str, Any]] = lambda steps: {}
    """By the number of steps: what differs from a plain run. Fields of RunConfig and ``checkpoint``, see
    :func:`hdet.lab.ablation.train`, or ``average`` and ``decay_to`` of a plain run."""

    @property
    def is_in_paper(self) -> bool:
        """The paper has it, from a checkpoint or from new weights."""
        return self.key in _IN_PAPER and self.name != BEST

    @property
    def is_decisive(self) -> bool:
        """A verdict hangs on it, so that it is worth more seeds than the others."""
        return self.key in _DECISIVE


BEST = "Best plain LR"


def _of_lab(key: str, at: _At) -> Row:
    """The lab's row. Its checkpoint is trained at the row's learning rate, but at High at a ninth of it."""
    row = next(row for row in TABLE_1 if row.key == key)
    if key in ("plain", "grid"):
        return Row(key, row.name, row.description, at)
    is_same = at == "best" and "checkpoint" in row.settings(100)
    settings = partial(row.settings, checkpoint=1.0) if is_same else row.settings
    return Row(key, row.name, row.description, at, settings)


def _method(key: str, name: str, description: str, at: _At, **changes: Any) -> Row:
    return Row(key, name, description, at, partial(method_settings, **changes))


def _rows(at: _At) -> list[Row]:
    """Rows at one learning rate: High as in the paper, and the best, where all of them train."""
    return [
        _method("hdet", "HDET (full)", f"spread, noise, and a decay to {100 * RESIDUAL:g} % of the peak", at),
        _method(
            "hdet_floor",
            "HDET (full), floor-matching",
            "the decay ends at OneCycleLR's floor",
            at,
            end=FLOOR,
        ),
        _method("hdet_no_controller", "HDET without controller", "spread and noise", at, end=None),
        _of_lab("hdet_no_warm_start", at),
        _method("equal", "Equal replicas, same decay", "HDET (full) with zero spread", at, spread=0.0),
        _method("averaging", "Averaging, zero spread", "noise, averaged every T", at, spread=0.0, end=None),
        _of_lab("hdet_checkpoint", at),
        _of_lab("plain_checkpoint", at),
        Row(
            "plain_decay",
            "Plain, same decay",
            f"exponential from the controller's start to {100 * RESIDUAL:g} %",
            at,
            lambda steps: {"decay_to": RESIDUAL},
        ),
    ]


ROWS = (
    _of_lab("plain", "low"),
    _of_lab("grid", "high"),
    Row(
        "warm_init",
        "Warm-Init",
        "noise on each replica's start; averaged at the end only",
        "high",
        warm_init_settings,
    ),
    *_rows("high"),
    Row(
        "local_sgd",
        "Local SGD",
        "own gradients, averaged every T; no spread",
        "high",
        partial(replica_settings, gradients="local"),
    ),
    _method(
        "hdet_local",
        "HDET (full), local gradients",
        "as HDET (full), with the replicas' own gradients",
        "high",
        gradients="local",
    ),
    Row("grid", BEST, "plain, the best of the grid", "best"),
    *_rows("best"),
    Row(
        "plain_decay_floor",
        "Plain, floor-matching",
        "exponential from the controller's start to OneCycleLR's floor",
        "best",
        lambda steps: {"decay_to": FLOOR},
    ),
    _method(
        "hdet_checkpoint_only",
        "HDET (full), checkpoint, no noise",
        "from the trained checkpoint itself",
        "best",
        checkpoint=1.0,
        noise_scale=0.0,
    ),
    _of_lab("equal_checkpoint", "best"),
    Row(
        "ema",
        "EMA",
        f"weights averaged over the run with decay {EMA_DECAY:g}",
        "best",
        lambda steps: {"average": "ema", "decay": EMA_DECAY},
    ),
    Row(
        "swa",
        "SWA",
        f"weights averaged over the last {100 * SWA_SHARE:g} % of the steps",
        "best",
        lambda steps: {"average": "swa", "share": SWA_SHARE},
    ),
)
"""In the order of the table."""
