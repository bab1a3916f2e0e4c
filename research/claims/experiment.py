"""Run the studies; what is there is not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hdet.checks import require_choice, require_count
from hdet.lab.pool import Pool
from research.claims.studies import STUDIES
from research.claims.training import train
from research.compare.ledger import Ledger, Record, read_ledger, run_missing

__all__ = ["STUDIES", "Claims", "read_claims", "run_claims"]

_FILE = "claims.jsonl"
_KEY = ("study", "variant", "task", "task_options", "steps", "replicas", "lr", "seed", "settings")


@dataclass(frozen=True)
class Claims:
    """The runs of the studies."""

    records: list[Record]
    is_complete: bool = True

    def of(self, study: str) -> list[Record]:
        """Those of one study."""
        return [record for record in self.records if record["study"] == study]


def run_claims(
    *,
    studies: Sequence[str] = tuple(STUDIES),
    seeds: int | Sequence[int] = 3,
    steps: int = 500,
    replicas: int = 8,
    folder: str | Path,
    num_jobs: int = 0,
    on_done: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Claims:
    """Run the studies on ``charlm``.

    Args:
        studies: names of :data:`STUDIES`.
        seeds: how many, or which.
        steps: optimizer steps of every run.
        replicas: N.
        folder: of ``claims.jsonl``.
        num_jobs: runs at a time; 0 for one per core.
        on_done: called with the number of runs done and that of all.
        should_stop: asked now and then.
    """
    for study in studies:
        require_choice("studies", study, tuple(STUDIES))
    seeds = list(range(require_count("seeds", seeds))) if isinstance(seeds, int) else list(seeds)
    base = {
        "task": "charlm",
        "steps": require_count("steps", steps, at_least=100),
        "replicas": require_count("replicas", replicas, at_least=2),
    }
    specs = [
        {"study": study, "seed": seed, **base, **spec}
        for study in studies
        for spec in STUDIES[study](steps)
        for seed in seeds
    ]
    ledger = Ledger(Path(folder), _FILE, _KEY, "corrections")
    done = sum(spec in ledger for spec in specs)

    def one_more() -> None:
        nonlocal done
        done += 1
        on_done(done, len(specs))

    on_done(done, len(specs))
    with Pool(num_jobs) as pool:
        is_complete = run_missing(specs, ledger, pool, train=train, on_done=one_more, should_stop=should_stop)
    return Claims(list(ledger.find(specs)), is_complete)


def read_claims(folder: str | Path) -> Claims:
    """What an earlier call left in this folder."""
    path = Path(folder) / _FILE
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} must be the folder of these studies, but it has no {_FILE}")
    records = list(read_ledger(path, _KEY, "corrections").values())
    lengths = {(r["steps"], r["replicas"]) for r in records}
    if len(lengths) > 1:
        found = ", ".join(f"{steps} steps with {replicas} replicas" for steps, replicas in sorted(lengths))
        raise ValueError(
            f"{str(folder)!r} must hold runs of one length and number of replicas to be judged together, got "
            f"{found}: give each its own --out"
        )
    return Claims(records)
