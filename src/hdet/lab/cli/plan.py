"""``hdet plan``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from hdet.lab.cli.options import Json
from hdet.lab.cli.output import Screen, usage_errors
from hdet.lab.page.sentences import count as count_of
from hdet.lab.train.memory_cost import MemoryCost, memory_cost, num_moments_of
from hdet.lab.train.search_cost import SearchCost, search_cost
from hdet.lab.train.sync_cost import Plan
from hdet.lab.train.sync_cost import plan as predict
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
        are_equal = spread == 0
        memory = memory_cost(
            count,
            replicas,
            num_shards=shards,
            bytes_per_parameter=size,
            num_moments=num_moments_of(optimizer),
            are_equal=are_equal,
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
                averages=not are_equal,
                num_shards=shards,
                memory_bandwidth_bytes_per_second=memory_bandwidth * 1e9,
            )
            for speed in _speeds(bandwidth)
        }
        search = search_cost(
            steps, replicas, batch_size=batch_size, num_shards=shards, bytes_on_rank=memory.parameters
        )
    screen.show(_memory_table(memory, count, replicas, shards))
    if replicas * shards > 1:
        screen.show(_sync_table(links, recipe.steps_per_round, steps, step_seconds))
    screen.show(_search_table(search, steps))
    screen.say(
        f"Settings: {latency_ms:g} ms for a small collective (--latency-ms; hdet doctor measures it), "
        f"{memory_bandwidth:g} GB/s of memory bandwidth (--memory-bandwidth)."
    )
    screen.give(
        {
            "parameters": count,
            "replicas": replicas,
            "shards": shards,
            "sync_every": recipe.steps_per_round,
            "memory": asdict(memory),
            "links": [
                {"gbit_per_second": speed} | _known(sync, step_seconds) for speed, sync in links.items()
            ],
            "search": asdict(search),
            "settings": {"latency_ms": latency_ms, "memory_bandwidth": memory_bandwidth},
        }
    )


def _known(sync: Plan, step_seconds: float | None) -> dict[str, Any]:
    """Without what follows from the time of a step, where it was not given."""
    found = asdict(sync)
    if step_seconds is None:
        for name in ("overhead_percent", "training_seconds", "suggested_sync_every"):
            found[name] = None
    return found


def _memory_table(memory: MemoryCost, count: int, replicas: int, shards: int) -> Table:
    title = f"Memory of each rank: {count:,} parameters, {count_of(replicas, 'replica')}"
    if shards > 1:
        title += f" of {count_of(shards, 'rank')} each"
    table = Table("part", "bytes", "of the parameters", title=title, title_justify="left")
    rows = {
        "training itself: parameters, gradients, moments": memory.training,
        "guard: three copies to go back to": memory.guard,
        "tail: mean of the last steps": memory.tail,
        "search: two copies, before the run only": memory.search,
        "bucket for messages, at most": memory.bucket,
        "saving within the tail": memory.saving,
        "hdet, most at a time": memory.peak,
        "hdet, most at a time while saving": memory.peak_while_saving,
    }
    for what, size in rows.items():
        table.add_row(what, _bytes(size), f"{size / memory.parameters:.3g}")
    return table


def _sync_table(links: dict[float, Plan], sync_every: int, steps: int, step_seconds: float | None) -> Table:
    title = f"A sync, every {sync_every} steps of {steps}"
    table = Table("link", "messages", "sent", "seconds", "whole run", title=title, title_justify="left")
    if step_seconds is not None:
        table.add_column("overhead")
    for speed, sync in links.items():
        table.add_row(
            f"{speed:g} Gbit/s",
            str(sync.num_collectives_per_sync),
            _bytes(sync.bytes_per_sync),
            f"{sync.seconds_per_sync:.3g}",
            f"{sync.num_syncs} syncs, {sync.sync_seconds:.3g} s",
            *([] if step_seconds is None else [f"{sync.overhead_percent:.3g} %"]),
        )
    return table


def _search_table(search: SearchCost, steps: int) -> Table:
    table = Table("steps", "of the run", "trials at a time", "sent", title="The search", title_justify="left")
    low, high = search.fewest_steps, search.most_steps
    table.add_row(
        f"{low} to {high}",
        f"{100 * low / steps:.2g} to {100 * high / steps:.2g} %",
        str(search.trials_at_a_time),
        _bytes(search.bytes_sent),
    )
    return table


def _size_of(parameters: str | None, model: str | None, dtype: str | None) -> tuple[int, int]:
    """The number of parameters, and the bytes of one."""
    if (parameters is None) == (model is None):
        raise ValueError("give either --parameters or --model, not both and not none")
    if dtype is not None and dtype not in _BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_BYTES)}, got {dtype!r}")
    if model is not None:
        from hdet.lab.train.model_size import model_size  # it needs torch

        count, size = model_size(model)
    else:
        assert parameters is not None
        count, size = _count(parameters), 4
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
