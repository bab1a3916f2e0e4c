"""Many random faults on four ranks, with new seeds until the time is over: ``make soak``.

For each seed one run is killed again and again, and must end in the bits of an undisturbed run. Another is
killed and spoilt, and must end finite, equal on all ranks, and as good. Runs of five kinds with all
controllers are resumed at random steps, and must end in the same bits. Seeds are printed, and ``--seed``
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
from tests.helpers.replicas import end_processes, run_replicas
from tests.helpers.resumes import KINDS, resumes

_LONGEST_SECONDS = 1200.0

PLAN = Plan(world_size=4, total_steps=400)
NUM_KILLS, NUM_SPOILS = 12, 12
NUM_RESUMES, LEAST_RESUMES = 10, 200
"""Of one run, and of all together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="of the first faults (default: the time)")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long at least (default 10)")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.monotonic()
    seed = int(time.time()) if args.seed is None else args.seed
    num_seeds = num_faults = num_resumes = 0
    while num_resumes < LEAST_RESUMES or time.monotonic() - begin < 60 * args.minutes:
        num_resumes += soak_resumes(seed)
        num_faults += soak(seed, timeout_seconds=_LONGEST_SECONDS)
        num_seeds, seed = num_seeds + 1, seed + 1
    print(
        f"survived {num_faults} faults and {num_resumes} resumes of {num_seeds} seeds in "
        f"{time.monotonic() - begin:.0f} s"
    )


def soak_resumes(seed: int) -> int:
    """Resume a run of each kind at random steps; the number of resumes."""
    for kind, world_size in KINDS.items():
        answers = run_replicas(resumes, world_size, kind, seed, NUM_RESUMES, timeout_seconds=_LONGEST_SECONDS)
        assert all(not differing for _, differing in answers), f"seed {seed}, {kind}: {answers}"
        print(f"seed {seed}, {kind}: {NUM_RESUMES} resumes, {answers[0][0]} brakes", flush=True)
    end_processes()
    return len(KINDS) * NUM_RESUMES


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
