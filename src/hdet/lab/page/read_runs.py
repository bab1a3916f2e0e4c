"""Read the directory of a run: everything that can be read, and a plain note for what cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet.records import RoundRecord, SearchRecord, scan_records
from hdet.round_record import ComparingRecord, GuardRecord

_FILES = ("config.json", "environment.json", "records.jsonl", "evaluations.jsonl", "result.json")
_MAX_NOTES_PER_FILE = 10
_MOST_BYTES = 2**28
"""A larger file is none of a run that anybody can look at."""
_MOST_BYTES_OF_AN_OBJECT = 2**18
"""The page shows all of it."""


@dataclass(frozen=True)
class Evaluation:
    """The base run, that is the averaged parameters, on held-out data."""

    step: int
    loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that one run left behind."""

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    search: SearchRecord | None = None
    """The search before the run, if there was one."""
    records: list[RoundRecord] = field(default_factory=list)
    """Records of the run itself."""
    evaluations: list[Evaluation] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    """Empty while the run is unfinished."""
    notes: list[str] = field(default_factory=list)
    """Lines and files that could not be read: file, line number, reason."""

    @property
    def final_loss(self) -> float | None:
        """Held-out loss at the end, or at the last evaluation of an unfinished run; a failed one has none."""
        stated = number(self.result.get("final_loss"))
        if stated is not None or self.status == "failed":
            return stated
        return next((e.loss for e in reversed(self.evaluations) if e.loss is not None), None)

    @property
    def final_metrics(self) -> dict[str, float]:
        """Held-out metrics beside the loss, at the end or at the last evaluation."""
        measured = self.evaluations[-1].metrics if self.evaluations else {}
        stated = _numbers_by_name(self.result.get("metrics")) or measured
        return {name: value for name, value in stated.items() if name != "loss"}

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        stated = number(self.result.get("steps")) or 0
        evaluated = self.evaluations[-1].step if self.evaluations else 0
        return int(max(stated, evaluated, self.records[-1].step if self.records else 0))

    @property
    def num_replicas(self) -> int | None:
        """Count the replicas that trained, if that can be told."""
        if self.records:
            return self.records[-1].num_replicas
        stated = number(self.config.get("replicas"))
        return None if stated is None else int(stated)

    @property
    def seconds(self) -> float | None:
        """Give the time that the run took, if it has ended."""
        return number(self.result.get("seconds"))

    @property
    def controllers(self) -> tuple[str, ...]:
        """Names of the controllers that the settings ask for."""
        stated = self.config.get("controllers")
        return tuple(map(str, stated)) if isinstance(stated, list | tuple) else ()

    @property
    def num_brakes(self) -> int:
        """Count how often the guard went back."""
        return self.records[-1].section(GuardRecord).num_brakes if self.records else 0

    @property
    def compares(self) -> bool:
        """Tell whether a controller compared the replicas; the others do not."""
        return any(record.section(ComparingRecord).signal for record in self.records)

    @property
    def excluded_events(self) -> list[tuple[int, int, str]]:
        """Every replica that was left out of a sync: step, replica, reason."""
        return [(record.step, r, why) for record in self.records for r, why in record.excluded.items()]

    @property
    def status(self) -> str:
        """``finished``, ``diverged``, ``stopped``, ``failed`` or ``unfinished``; ``recorded`` if unknown."""
        stated = self.result.get("status")
        if isinstance(stated, str) and stated:
            return stated
        has_ended = not self.config and self.records and self.records[-1].num_averaged_steps
        if self.result or has_ended:
            return "finished"
        return "unfinished" if self.config else "recorded"

    @property
    def loss_unit(self) -> str:
        """Name the unit of the loss; empty if nobody said."""
        unit = self.config.get("loss_unit")
        return unit if isinstance(unit, str) and unit != "loss" else ""

    @property
    def num_planned_steps(self) -> int:
        """Count the steps that the run is to take, or has taken if nobody said."""
        planned = number(self.config.get("steps")) or 0
        return max(self.last_step, int(planned)) if self.status == "unfinished" else self.last_step


def runs_within(path: Path) -> list[Path]:
    """The folders of runs in a folder such as that of a sweep; the folder alone where there are none."""
    within = sorted(folder for folder in path.glob("*") if _is_run(folder))
    return [path] if _is_run(path) or not within else within


def read_run(path: str | Path) -> Run:
    """Read the directory of a run, finished or not; what is missing or broken becomes a note.

    Raises:
        ValueError: the path is no directory, or holds none of the files of a run.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: name the directory that a run wrote")
    if not _is_run(path):
        raise ValueError(f"{path} holds no run: expected at least one of {', '.join(_FILES)}")
    run = Run(path=path, name=path.resolve().name)
    # A script of one's own may write records and nothing else: then nothing is missing.
    is_whole = (path / "config.json").exists() or (path / "result.json").exists()
    run.config = _read(path / "config.json", _object, run.notes, is_expected=is_whole) or {}
    run.environment = _read(path / "environment.json", _object, run.notes, is_expected=is_whole) or {}
    run.result = _read(path / "result.json", _object, run.notes) or {}
    # A run that has not come to its first sync, or failed there, has no records.
    has_synced = is_whole and run.status not in ("unfinished", "failed")
    scans = {"records.jsonl": scan_records, "evaluations.jsonl": _scan_evaluations}
    records, run.evaluations = (
        _entries(path / name, scan, run.notes, is_expected=has_synced) for name, scan in scans.items()
    )
    run.search = next((record.search for record in records if record.search is not None), None)
    run.records = [record for record in records if record.search is None]
    name = run.config.get("name")
    if isinstance(name, str) and name.strip():
        run.name = name
    return run


def loss_title(unit: str) -> str:
    """Name the axis of a loss; a long unit has no room there.

    >>> loss_title("nats per character"), loss_title("cross-entropy (nats)"), loss_title("x" * 50)
    ('loss (nats per character)', 'loss, cross-entropy (nats)', 'loss')
    """
    if not unit or len(unit) > 24:
        return "loss"
    return f"loss, {unit}" if "(" in unit else f"loss ({unit})"


def number(value: object) -> float | None:
    """A finite number, or None for anything else.

    >>> number(3), number("3"), number(float("nan")), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _numbers_by_name(value: object) -> dict[str, float]:
    entries = value.items() if isinstance(value, dict) else ()
    return {str(name): known for name, entry in entries if (known := number(entry)) is not None}


def _read(path: Path, read: Callable[[Path], Any], notes: list[str], *, is_expected: bool = False) -> Any:
    """Read a file; what cannot be read becomes a note, and None."""
    try:
        if (path.exists() and not path.is_file()) or path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it must be a file of at most {_MOST_BYTES >> 20} MiB")
        return read(path)
    except FileNotFoundError:
        notes += [f"{path.name} is missing"] * is_expected
    except json.JSONDecodeError as error:
        notes.append(f"{path.name}, line {error.lineno}: not JSON ({error.msg})")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({_reason(error)})")


def _object(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _MOST_BYTES_OF_AN_OBJECT:
        raise ValueError(f"it must have at most {_MOST_BYTES_OF_AN_OBJECT >> 10} KiB")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it must hold an object, got a {type(content).__name__}")
    if not _is_shallow(content):
        raise RecursionError
    return content


def _is_shallow(value: object, most: int = 20) -> bool:
    """Tell if a value is nested at most so deeply: pages show it level by level."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most > 0 and all(_is_shallow(part, most - 1) for part in parts)


def _entries(path: Path, scan: Callable[[Path], Any], notes: list[str], *, is_expected: bool) -> list[Any]:
    """Read a file of lines by a scan that gives entries, and a note for each line that is none."""
    entries, found = _read(path, scan, notes, is_expected=is_expected) or ([], [])
    notes += found[:_MAX_NOTES_PER_FILE]
    if len(found) > _MAX_NOTES_PER_FILE:
        notes.append(f"{path.name}: {len(found) - _MAX_NOTES_PER_FILE} more lines cannot be read")
    return entries


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _FILES)


def _scan_evaluations(path: Path) -> tuple[list[Evaluation], list[str]]:
    evaluations, notes = list[Evaluation](), list[str]()
    for line_number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            evaluation = _evaluation(json.loads(line))
        except (ValueError, RecursionError) as error:
            if line.strip():
                notes.append(f"{path.name}, line {line_number}: not an evaluation ({_reason(error)})")
            continue
        # A run that was resumed repeats steps: the later evaluation wins, as for records.
        while evaluations and evaluations[-1].step >= evaluation.step:
            evaluations.pop()
        evaluations.append(evaluation)
    return evaluations, notes


def _evaluation(data: Any) -> Evaluation:
    step, loss = (data.get("step"), data.get("loss")) if isinstance(data, dict) else (None, None)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
        raise ValueError("step must be a whole number")
    if not isinstance(loss, int | float | None):
        raise ValueError("loss must be a number")
    return Evaluation(step, number(loss), _numbers_by_name(data.get("metrics")))


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError | RecursionError):
        return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
    return str(error.strerror) if isinstance(error, OSError) else str(error)
