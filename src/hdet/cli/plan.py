"""``hdet plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hdet.cli.options import Json
from hdet.cli.output import Screen, usage_errors
from hdet.run.sync_cost import plan as predict

__all__ = ["plan"]


def plan(
    parameters: Annotated[str, typer.Option(help="Parameters of one replica, such as 125e6 or 7B.")],
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")],
    step_seconds: Annotated[float, typer.Option(help="Time of one training step without hdet.")],
    bandwidth: Annotated[float, typer.Option(help="What one replica can send, in Gbit/s.")],
    sync_every: Annotated[int, typer.Option(help="Steps per round, T.")] = 1000,
    steps: Annotated[int | None, typer.Option(help="Length of the run, for the totals.")] = None,
    bytes_per_parameter: Annotated[int, typer.Option(help="4 for float32, 2 for half precisions.")] = 4,
    latency_ms: Annotated[float, typer.Option(help="Time of a collective of one number.")] = 1.0,
    finder: Annotated[
        bool, typer.Option("--finder", help="Count the two copies of the weights that a finder keeps.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Predict what syncs cost: time, bytes and memory, before a run.

    Example: hdet plan --parameters 1.3B --replicas 32 --step-seconds 0.8 --bandwidth 100
    """
    screen = Screen(is_json=is_json, is_quiet=False)
    with usage_errors():
        costs = predict(
            _count(parameters),
            replicas,
            step_seconds,
            bandwidth * 1e9 / 8,
            sync_every,
            bytes_per_parameter,
            latency_ms / 1000,
            steps,
            copies=2 if finder else 0,
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("a sync takes", f"{costs.seconds_per_sync:.3g} s")
    table.add_row("overhead", f"{costs.overhead_percent:.3g} % of training time")
    table.add_row(
        "sent by each replica",
        f"{_bytes(costs.bytes_per_sync)} per sync, {_bytes(costs.bytes_per_step)} per step "
        f"(gradients: {_bytes(costs.ddp_bytes_per_step)} per step, so {costs.traffic_percent:.2g} % more)",
    )
    table.add_row("extra memory", _bytes(costs.extra_memory_bytes))
    table.add_row("smallest T for 0.1 %", str(costs.suggested_sync_every))
    if costs.sync_seconds is not None and costs.training_seconds is not None:
        table.add_row(
            "whole run",
            f"{costs.num_syncs} syncs, {costs.sync_seconds:.3g} s on top of {costs.training_seconds:.4g} s",
        )
    screen.show(table)
    screen.give(asdict(costs))


def _count(text: str) -> int:
    """A count as people write it.

    >>> _count("125e6"), _count("7B"), _count("1.3b"), _count("64k")
    (125000000, 7000000000, 1300000000, 64000)
    """
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    factor = factors.get(text[-1:].lower())
    try:
        return round(float(text[:-1]) * factor if factor else float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"parameters must be a count such as 125e6, 350M or 7B, got {text!r}") from None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
