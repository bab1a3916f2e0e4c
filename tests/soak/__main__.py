"""Many random faults on four ranks, with new seeds until the time is over: ``make soak``.

For each seed one run is killed again and again, and must end in the bits of an undisturbed run. Another is
killed and spoilt, and must end finite, equal on all ranks, and as good. Seeds are printed, and ``--seed``
repeats one.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path

from tests.helpers.chaos import (
    SPOILS,
    Plan,
    assert_healed,
    assert_same_bits,
    random_kills,
    random_spoils,
    run_to_the_end,
)

PLAN = Plan(world_size=4, total_steps=400)
NUM_KILLS, NUM_SPOILS = 12, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the first faults (default: the time)")
    parser.add_argument("--minutes", type=float, default=10.0, help="when to stop (default 10)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    seed = int(time.time()) if args.seed is None else args.seed
    left = longest = 60 * args.minutes
    num_seeds = num_faults = 0
    while num_seeds == 0 or left > 1.2 * longest:
        num_faults += soak(seed, timeout_seconds=left)
        num_seeds, seed = num_seeds + 1, seed + 1
        spent = time.monotonic() - begin
        left, longest = 60 * args.minutes - spent, spent / num_seeds
    print(f"survived {num_faults} faults of {num_seeds} seeds in {time.monotonic() - begin:.0f} s")


def soak(seed: int, *, timeout_seconds: float) -> int:
    """Three runs; the number of faults that have happened."""
    begin = time.monotonic()
    generator = random.Random(seed)
    kills = random_kills(PLAN, generator, NUM_KILLS)
    mixed = random_kills(PLAN, generator, NUM_KILLS) + random_spoils(
        PLAN, generator, NUM_SPOILS, (*SPOILS, "scaled_parameters")
    )
    results = {}
    with tempfile.TemporaryDirectory(prefix="hdet-soak-") as folder:
        for name, faults in {"undisturbed": [], "killed": kills, "killed and spoilt": mixed}.items():
            print(f"seed {seed}, {name}: {len(faults)} faults", flush=True)
            for fault in sorted(faults, key=lambda fault: fault.step):
                print(f"    step {fault.step:3d}, replica {fault.replica}: {fault.kind}", flush=True)
            results[name] = result = run_to_the_end(
                PLAN,
                Path(folder) / name,
                faults,
                timeout_seconds=timeout_seconds - (time.monotonic() - begin),
                tell=lambda text: print(f"  {time.monotonic() - begin:4.0f} s: {text}", flush=True),
            )
            assert result.happened == {fault.name for fault in faults}, "a fault did not happen"
    assert_same_bits(results["killed"], results["undisturbed"])
    assert_healed(results["killed and spoilt"], results["undisturbed"])
    print(f"seed {seed} survived", flush=True)
    return len(kills) + len(mixed)


if __name__ == "__main__":
    main()
