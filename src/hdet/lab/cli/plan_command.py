"""``hdet plan``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hdet.checks import require_choice, require_number
from hdet.errors import bad_argument
from hdet.lab.cli.options import Json, takes
from hdet.lab.cli.screen import Screen, numbers, usage_errors
from hdet.lab.page.sentences import count as count_of
from hdet.lab.plan import MOMENTS, Plan, memory_cost, search_cost
from hdet.lab.plan import plan as predict
from hdet.method.loudness import heard_from
from hdet.method.recipe import Recipe

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(kw_only=True)
class _PlanOptions:
    """Options, with their help.

    Args:
        parameters: Parameters of one replica, such as 125e6 or 7B.
        replicas: Number of replicas, N.
        shards: Ranks that hold a replica together (fully_shard).
        dtype: Of the parameters: float32, bfloat16, float16, float64.
        optimizer: sgd, sgd-momentum, adam, adamw, muon or lion.
        steps: Length of the run.
        sync_every: Steps per round, T. (default: AutoLR's).
        spread: Of what is explored. Above 0 replicas differ and are averaged.
        batch_size: Examples of a batch on one rank.
        step_seconds: Time of one training step without hdet, for the overhead.
        bandwidth: What one rank can send, in Gbit/s; several with commas.
        latency_ms: Time of a collective of one number: about 1 with gloo, 0.05 with NCCL.
        memory_bandwidth: Of a rank, in GB/s: about 10 for one core, 1000 or more for a GPU.
        signal: Signal over noise of the replicas in a round, from the report of a run with this T.
    """

    parameters: str
    replicas: int
    shards: int = 1
    dtype: str = "float32"
    optimizer: str = "adamw"
    steps: int = 10_000
    sync_every: int | None = None
    spread: float = 0.0
    batch_size: int = 32
    step_seconds: float | None = None
    bandwidth: str = "10,100,400"
    latency_ms: float = 1.0
    memory_bandwidth: float = 10.0
    signal: float | None = None


@takes(_PlanOptions)
def plan(is_json: Json = False, **settings: Any) -> None:
    """Predict what hdet costs before a run: memory by part, bytes and seconds of syncs, steps of the search.

    What does it cost for 7 B parameters on 64 GPUs, as 8 replicas of 8 ranks?

    hdet plan --parameters 7B --dtype bfloat16 --replicas 8 --shards 8 --step-seconds 2 --latency-ms 0.05
    --memory-bandwidth 2000
    """
    asked = _PlanOptions(**settings)
    screen = Screen(is_json=is_json, is_quiet=False)
    replicas, shards, steps = asked.replicas, asked.shards, asked.steps
    with usage_errors(settings):
        require_choice("optimizer", asked.optimizer, tuple(MOMENTS))
        count, size = _count(asked.parameters), _BYTES[require_choice("dtype", asked.dtype, tuple(_BYTES))]
        sync_every = Recipe(total_steps=steps, sync_every=asked.sync_every).steps_per_round
        moments, is_equal = MOMENTS[asked.optimizer], asked.spread == 0
        of_ranks: dict[str, Any] = {"num_shards": shards, "bytes_per_parameter": size}
        memory = memory_cost(count, replicas, num_moments=moments, are_equal=is_equal, **of_ranks)
        of_links = of_ranks | {
            "averages": not is_equal,
            "latency_seconds": asked.latency_ms / 1000,
            "memory_bandwidth_bytes_per_second": asked.memory_bandwidth * 1e9,
        }
        shard = -(-count // shards)
        links = {
            speed: predict(
                shard, replicas, asked.step_seconds or 1.0, speed * 1e9 / 8, sync_every, **of_links
            )
            for speed in numbers("--bandwidth", asked.bandwidth)
        }
        search = search_cost(steps, replicas, batch_size=asked.batch_size, num_shards=shards)
        heard = asked.signal and heard_from(sync_every, require_number("signal", asked.signal, above=0))
    num_syncs = math.ceil(steps / sync_every) if replicas > 1 else 0  # the last step is one
    in_ranks = f" of {count_of(shards, 'rank')} each" if shards > 1 else ""
    parts = [(what, getattr(memory, part)) for part, what in _PARTS.items()]
    screen.show(
        ("part", "bytes", "of the parameters"),
        [(what, _bytes(number), f"{number / memory.parameters:.3g}") for what, number in parts],
        f"Memory of each rank: {count:,} parameters, {count_of(replicas, 'replica')}{in_ranks}",
    )
    if replicas * shards > 1:
        columns = ("link", "messages", "sent", "seconds", "whole run", "overhead")
        rows = [_sync_row(speed, sync, num_syncs) for speed, sync in links.items()]
        shown = len(columns) - (asked.step_seconds is None)
        title = f"A sync, every {sync_every} steps of {steps}"
        screen.show(columns[:shown], [row[:shown] for row in rows], title)
    low, high = search.fewest_steps, search.most_steps
    share = f"{100 * low / steps:.2g} to {100 * high / steps:.2g} %"
    row = (f"{low} to {high}", share, str(search.trials_at_a_time))
    screen.show(("steps", "of the run", "trials at a time"), [row], "The search")
    screen.say(
        f"Settings: {asked.latency_ms:g} ms for a small collective (--latency-ms), "
        f"{asked.memory_bandwidth:g} GB/s of memory bandwidth (--memory-bandwidth)."
    )
    if heard:
        screen.say(
            f"A controller hears the replicas from about T = {math.ceil(heard)} on: the mean of its last "
            f"rounds is then clear. Here T is {sync_every} (--sync-every)."
        )
    # What follows from the time of a step is not known where that was not given.
    names = ("overhead_percent", "suggested_sync_every")
    unknown = dict.fromkeys(names) if asked.step_seconds is None else {}
    told = asdict(asked) | {
        "parameters": count,
        "sync_every": sync_every,
        "num_syncs": num_syncs,
        "heard_from": heard,
    }
    of_links = [{"gbit_per_second": speed} | asdict(link) | unknown for speed, link in links.items()]
    screen.give(told | {"memory": asdict(memory), "links": of_links, "search": asdict(search)})


_PARTS = {
    "training": "training itself: parameters, gradients, moments",
    "guard": "guard: three copies to go back to",
    "tail": "tail: mean of the last steps",
    "thermostat": "thermostat, if there is one: beside the most below, until 35 % of the run",
    "search": "search: two copies, before the run only",
    "bucket": "bucket for messages, at most",
    "saving": "saving: what a checkpoint gathers",
    "peak": "hdet, most at a time",
    "peak_while_saving": "hdet, most at a time while saving",
}
"""Names of the parts of the memory, in the order of the table."""


def _sync_row(speed: float, sync: Plan, num_syncs: int) -> tuple[str, ...]:
    return (
        f"{speed:g} Gbit/s",
        str(sync.num_collectives_per_sync),
        _bytes(sync.bytes_per_sync),
        f"{sync.seconds_per_sync:.3g}",
        f"{num_syncs} syncs, {num_syncs * sync.seconds_per_sync:.3g} s",
        f"{sync.overhead_percent:.3g} %",
    )


def _count(text: str) -> int:
    """Read a count as people write it.

    >>> _count("125e6"), _count("7B"), _count("1.3b"), _count("64k")
    (125000000, 7000000000, 1300000000, 64000)
    """
    factors = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    factor = factors.get(text[-1:].lower())
    try:
        return round(float(text[:-1]) * factor if factor else float(text))
    except (ValueError, OverflowError):
        must = "must be a count such as 125e6, 350M or 7B"
        raise bad_argument("parameters", must, repr(text)) from None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
