"""``hdet plan``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hdet.lab.cli.screen import Json, Screen, usage_errors
from hdet.lab.page.words import count as count_of
from hdet.lab.plan import MOMENTS, MemoryCost, Plan, SearchCost, memory_cost, model_size, search_cost
from hdet.lab.plan import plan as predict
from hdet.method.recipe import Recipe

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def plan(
    replicas: Annotated[int, typer.Option(help="Number of replicas, N.")],
    parameters: Annotated[
        str | None, typer.Option(help="Parameters of one replica, such as 125e6 or 7B.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead: file.py:function that builds the model. It takes no memory."),
    ] = None,
    shards: Annotated[int, typer.Option(help="Ranks that hold a replica together (fully_shard).")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Of the parameters: float32, bfloat16, float16, float64.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, sgd-momentum, adam, adamw, muon or lion.")] = "adamw",
    steps: Annotated[int, typer.Option(help="Length of the run.")] = 10_000,
    sync_every: Annotated[int | None, typer.Option(help="Steps per round, T. [default: AutoLR's]")] = None,
    spread: Annotated[
        float, typer.Option(help="Of what is explored. Above 0 replicas differ and are averaged.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Examples of a batch on one rank.")] = 32,
    step_seconds: Annotated[
        float | None, typer.Option(help="Time of one training step without hdet, for the overhead.")
    ] = None,
    bandwidth: Annotated[
        str, typer.Option(help="What one rank can send, in Gbit/s; several with commas.")
    ] = "10,100,400",
    latency_ms: Annotated[
        float, typer.Option(help="Time of a collective of one number: about 1 with gloo, 0.05 with NCCL.")
    ] = 1.0,
    memory_bandwidth: Annotated[
        float, typer.Option(help="Of a rank, in GB/s: about 10 for one core, 1000 or more for a GPU.")
    ] = 10.0,
    is_json: Json = False,
) -> None:
    """Predict what hdet costs before a run: memory by part, bytes and seconds of syncs, steps of the search.

    What does it cost for 7 B parameters on 64 GPUs, as 8 replicas of 8 ranks?

    hdet plan --parameters 7B --dtype bfloat16 --replicas 8 --shards 8 --step-seconds 2 --latency-ms 0.05
    --memory-bandwidth 2000
    """
    screen = Screen(is_json=is_json, is_quiet=False)
    with usage_errors():
        count, size = _size_of(parameters, model, dtype)
        recipe = Recipe(total_steps=steps, sync_every=sync_every)
        if optimizer not in MOMENTS:
            raise ValueError(f"optimizer must be one of {', '.join(MOMENTS)}, got {optimizer!r}")
        memory = memory_cost(
            count,
            replicas,
            num_shards=shards,
            bytes_per_parameter=size,
            num_moments=MOMENTS[optimizer],
            are_equal=spread == 0,
        )
        links = {
            speed: predict(
                -(-count // shards),
                replicas,
                step_seconds or 1.0,
                speed * 1e9 / 8,
                recipe.steps_per_round,
                size,
                latency_ms / 1000,
                steps,
                averages=spread != 0,
                num_shards=shards,
                memory_bandwidth_bytes_per_second=memory_bandwidth * 1e9,
            )
            for speed in _speeds(bandwidth)
        }
        search = search_cost(
            steps, replicas, batch_size=batch_size, num_shards=shards, bytes_on_rank=memory.parameters
        )
    of_ranks = f" of {count_of(shards, 'rank')} each" if shards > 1 else ""
    title = f"Memory of each rank: {count:,} parameters, {count_of(replicas, 'replica')}{of_ranks}"
    screen.show(_table(title, ("part", "bytes", "of the parameters"), _memory_rows(memory)))
    if replicas * shards > 1:
        columns = ("link", "messages", "sent", "seconds", "whole run", "overhead")
        columns = columns if step_seconds is not None else columns[:-1]
        title = f"A sync, every {recipe.steps_per_round} steps of {steps}"
        screen.show(_table(title, columns, [_sync_row(speed, sync) for speed, sync in links.items()]))
    columns = ("steps", "of the run", "trials at a time", "sent")
    screen.show(_table("The search", columns, [_search_row(search, steps)]))
    screen.say(
        f"Settings: {latency_ms:g} ms for a small collective (--latency-ms; hdet doctor measures it), "
        f"{memory_bandwidth:g} GB/s of memory bandwidth (--memory-bandwidth)."
    )
    # What follows from the time of a step is not known where that was not given.
    names = ("overhead_percent", "training_seconds", "suggested_sync_every")
    unknown = dict.fromkeys(names) if step_seconds is None else {}
    screen.give(
        {
            "parameters": count,
            "replicas": replicas,
            "shards": shards,
            "sync_every": recipe.steps_per_round,
            "memory": asdict(memory),
            "links": [{"gbit_per_second": speed} | asdict(links[speed]) | unknown for speed in links],
            "search": asdict(search),
            "settings": {"latency_ms": latency_ms, "memory_bandwidth": memory_bandwidth},
        }
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row[: len(columns)])
    return table


def _memory_rows(memory: MemoryCost) -> list[tuple[str, str, str]]:
    parts = {
        "training itself: parameters, gradients, moments": memory.training,
        "guard: three copies to go back to": memory.guard,
        "tail: mean of the last steps": memory.tail,
        "search: two copies, before the run only": memory.search,
        "bucket for messages, at most": memory.bucket,
        "saving within the tail": memory.saving,
        "hdet, most at a time": memory.peak,
        "hdet, most at a time while saving": memory.peak_while_saving,
    }
    return [(what, _bytes(size), f"{size / memory.parameters:.3g}") for what, size in parts.items()]


def _sync_row(speed: float, sync: Plan) -> tuple[str, ...]:
    return (
        f"{speed:g} Gbit/s",
        str(sync.num_collectives_per_sync),
        _bytes(sync.bytes_per_sync),
        f"{sync.seconds_per_sync:.3g}",
        f"{sync.num_syncs} syncs, {sync.sync_seconds:.3g} s",
        f"{sync.overhead_percent:.3g} %",
    )


def _search_row(search: SearchCost, steps: int) -> tuple[str, ...]:
    low, high = search.fewest_steps, search.most_steps
    share = f"{100 * low / steps:.2g} to {100 * high / steps:.2g} %"
    return f"{low} to {high}", share, str(search.trials_at_a_time), _bytes(search.bytes_sent)


def _size_of(parameters: str | None, model: str | None, dtype: str | None) -> tuple[int, int]:
    """The number of parameters, and the bytes of one."""
    if (parameters is None) == (model is None):
        raise ValueError("give either --parameters or --model, not both and not none")
    if dtype is not None and dtype not in _BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_BYTES)}, got {dtype!r}")
    count, size = model_size(model) if model is not None else (_count(parameters or ""), 4)
    return count, size if dtype is None else _BYTES[dtype]


def _speeds(text: str) -> list[float]:
    try:
        return [float(speed) for speed in text.split(",")]
    except ValueError:
        raise ValueError(f"bandwidth must be numbers with commas, such as 10,100, got {text!r}") from None


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
