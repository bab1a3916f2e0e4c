"""What the finders did, taken from the records: the scout's trials and the anchored controller's path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hdet.telemetry import RoundRecord

__all__ = ["finder_of"]


def finder_of(records: Sequence[RoundRecord], controller: object) -> dict[str, Any]:
    """The data of the finders' charts; empty where none was at work.

    Args:
        records: of the run.
        controller: the name that the settings give to it.
    """
    found: dict[str, Any] = {}
    fans = [record.scout for record in records if record.scout]
    scout = _scout(fans) if fans else None
    if scout is not None:
        found["scout"] = scout
    factor = fans[-1].get("factor") if fans else 1.0
    path = [r for r in records if not r.scout and r.ends_round and r.correction and r.signal]
    if controller == "anchored" and path and isinstance(factor, int | float) and factor > 0:
        names = list(path[0].signal)
        shut = next((r for r in path if r.gate), None)
        found["anchored"] = {
            "step": [r.step for r in path],
            "log_factors": {
                name: [math.log(max(1e-300, r.correction.get(name, factor) / factor)) for r in path]
                for name in names
            },
            "z": {name: [r.signal.get(name) for r in path] for name in names},
            "num_brakes": path[-1].num_brakes,
            "gate": None if shut is None else {"step": shut.step, "reason": shut.gate},
        }
    return found


def _scout(fans: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        peak = float(fans[0]["peak_lr"])
        rounds = [
            {
                "stage": fan.get("stage", ""),
                "lrs": [peak * f for f in fan["factors"]],
                "losses": fan["scores"],
            }
            for fan in fans
        ]
        scout: dict[str, Any] = {"rounds": rounds}
        last = fans[-1]
        if "factor" in last:
            chosen, factor = last["chosen_factor"], last["factor"]
            scout |= {
                "chosen_lr": peak * factor,
                "low": peak * factor * last["low"] / chosen,
                "high": peak * factor * last["high"] / chosen,
                "reason": last["reason"],
                "curve": _curve([r for r in rounds if r["stage"] == rounds[-1]["stage"]], peak * chosen),
            }
        return scout
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # a record that another version wrote


def _curve(rounds: Sequence[dict[str, Any]], best_lr: float) -> dict[str, float] | None:
    """Least squares of minimum + curvature * (log lr - center)^2 around the scout's best, for the eye."""
    points = [
        (math.log(lr / best_lr) ** 2, loss)
        for fan in rounds
        for lr, loss in zip(fan["lrs"], fan["losses"], strict=True)
        if loss is not None and abs(math.log(lr / best_lr)) < 1.4
    ]
    if len(points) < 3:
        return None
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    variance = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if variance == 0:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / variance
    return {
        "center_log_lr": math.log(best_lr),
        "curvature": slope,
        "minimum": mean_y - slope * mean_x,
    }
