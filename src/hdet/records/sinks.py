"""Where records go: memory, or a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, overload, runtime_checkable

from hdet.errors import warn
from hdet.records.record import RoundRecord


@runtime_checkable
class RecordSink(Protocol):
    """Anything that takes records. Only replica zero's process writes."""

    def write(self, record: RoundRecord) -> None:
        """Take one record."""
        ...


class Records(Sequence[RoundRecord]):
    """Records in memory, in order; with a path, each is appended to a file of JSON lines as well.

    >>> records = Records()
    >>> records.write(RoundRecord(round=0, step=10, num_replicas=2, losses=[0.5, 0.4]))
    >>> records[-1].step
    10
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._records: list[RoundRecord] = []
        self._file = None if path is None else JsonlSink(path)

    def write(self, record: RoundRecord) -> None:
        """Take one record; a run that went back to a checkpoint replaces the rounds that it repeats."""
        _append(self._records, record)
        if self._file is not None:
            self._file.write(record)

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RoundRecord]: ...
    def __getitem__(self, index: int | slice) -> RoundRecord | Sequence[RoundRecord]:
        return self._records[index]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RoundRecord]:
        return iter(self._records)


class JsonlSink:
    """Appends one JSON line per record; each line is complete on disk before ``write`` returns.

    A run that goes on from a checkpoint goes on with the file. A run that begins at its first step begins a
    new file, and the one that was there is kept beside it, with ``.old`` at the end of its name.

    A record that cannot be written, because the disk is full or gone, does not end the run. It is warned of,
    kept in memory, and written with the next one that can be.

    Args:
        path: of the file. It raises here if nothing can be written there; nothing is created yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _require_writable(self.path)
        self._waiting: list[RoundRecord] = []
        self._is_open = self._has_begun = self._has_warned = False

    def write(self, record: RoundRecord) -> None:
        """Take one record."""
        self._waiting.append(record)
        try:
            while self._waiting:
                self._write(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            self._is_open = False  # there may be half a line
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"records cannot be written to {str(self.path)!r} ({error}). The run goes on. They are "
                    "kept in memory, and written when that works again: make room, or put the folder back"
                )

    def _write(self, record: RoundRecord) -> None:
        if not self._is_open:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._has_begun and _begins_anew(self.path, record):
                self.path.replace(f"{self.path}.old")
            self._has_begun = True
            _cut_unfinished_line(self.path)
            self._is_open = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())


def _require_writable(path: Path) -> None:
    """Raise where a file cannot be written, before a run that would lose its records there."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if there == path:
        problem = "it is a folder" if path.is_dir() else ""
    else:
        problem = "" if there.is_dir() else f"{there} is not a folder"
    if not problem and not os.access(there, os.W_OK):
        problem = f"{there} cannot be written to"
    if problem:
        raise OSError(f"path must be a file that can be written, got {str(path)!r}: {problem}")


def _begins_anew(path: Path, record: RoundRecord) -> bool:
    """Whether the first record of a sink begins a run, where the file holds another."""
    if record.step > record.num_steps or not path.is_file():
        return False
    earlier, _ = scan_records(path)
    # What a search has found stands before the first step, in a record of its own.
    return bool(earlier) and (record.search is not None or earlier[-1].step > 0)


def _cut_unfinished_line(path: Path) -> None:
    """Remove what a process left that ended while it was writing; a new line would run on with it."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def read_records(path: str | Path) -> list[RoundRecord]:
    """The records of a file of JSON lines; an unfinished last line is left out.

    A run that was resumed writes again the rounds that it repeats: the later record of a step wins.
    """
    records: list[RoundRecord] = []
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        is_cut = number == len(lines)  # whole lines end with a line break
        if not line:
            continue
        try:
            record = RoundRecord.from_json(line.decode("utf-8"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if is_cut and (records or b'{"round":'.startswith(line[:9])):
                break  # the process ended while writing it
            raise ValueError(
                f"{path}, line {number}: not a round record ({_reason(error)}), got {_start_of(line)}: pass "
                "a file that hdet.Records or hdet.JsonlSink has written"
            ) from error
        _append(records, record)
    return records


def _start_of(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace")
    return repr(text if len(text) <= 40 else text[:40] + "...")


def scan_records(path: str | Path) -> tuple[list[RoundRecord], list[str]]:
    """What can be read of a file of JSON lines, and a note for each line that cannot.

    Content never raises, whatever it is; a file that cannot be opened does. As in :func:`read_records`, the
    later record of a step wins.
    """
    records: list[RoundRecord] = []
    notes: list[str] = []
    content = Path(path).read_bytes()
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = RoundRecord.from_json(line.decode("utf-8"))
            problem = _problem_of(record)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            is_cut = number == len(lines)  # whole lines end with a line break
            record, problem = None, "the line is cut off" if is_cut else _reason(error)
        if record is None or problem:
            notes.append(f"{Path(path).name}, line {number}: not a round record ({problem})")
        else:
            _append(records, record)
    return records, notes


def _append(records: list[RoundRecord], record: RoundRecord) -> None:
    """Add a record; a run that went back, or began again, replaces the rounds that it repeats."""
    start = record.step - record.num_steps
    while records and (records[-1].step >= record.step or records[-1].step > start):
        records.pop()
    records.append(record)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, AttributeError):
        return "not an object with the fields of a record"
    return str(error).replace("RoundRecord.__init__() ", "").replace(".__init__()", "")


def _problem_of(record: RoundRecord) -> str:
    """The first field that does not hold what it should, in words; empty if all do."""
    problem = _first_problem(record, "", _RECORD_RULES)
    if record.search is not None:
        problem = problem or _first_problem(record.search, "search.", _SEARCH_RULES)
    return problem


def _first_problem(holder: object, prefix: str, rules: Sequence[_Rule]) -> str:
    for names, holds, rule in rules:
        for name in names:
            if not holds(getattr(holder, name)):
                return f"{prefix}{name} must be {rule}"
    return ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_number(value: object) -> bool:
    # An integer may be too large for any float.
    return isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023
    )


def _is_list(value: object, *, has_gaps: bool = False) -> bool:
    return isinstance(value, list) and all(_is_number(v) or (has_gaps and v is None) for v in value)


def _are_pairs(value: object, *, has_gaps: bool = False) -> bool:
    return isinstance(value, list) and all(
        _is_list(pair, has_gaps=has_gaps) and len(pair) == 2 and pair[0] is not None for pair in value
    )


def _is_mapping(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, Mapping) and all(holds(v) for v in value.values())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# What each field may hold: names of fields, a check, and the same in words.
_Rule = tuple[tuple[str, ...], Callable[[object], bool], str]
_GAPS = (lambda value: _is_list(value, has_gaps=True), "a list of numbers or null")
_RECORD_RULES: tuple[_Rule, ...] = (
    (
        ("round", "step", "num_replicas", "num_steps", "num_brakes", "num_averaged_steps"),
        _is_count,
        "a whole number",
    ),
    (("ends_round", "converged"), lambda value: isinstance(value, bool), "true or false"),
    (("temperature",), lambda value: value is None or _is_number(value), "a number or null"),
    (("losses", "probes"), *_GAPS),
    (("weights", "num_nonfinite_losses"), _is_list, "a list of numbers"),
    (
        ("signal", "velocity", "correction", "base", "milliseconds"),
        lambda value: _is_mapping(value, _is_number),
        "numbers by name",
    ),
    (
        ("positions", "multipliers", "values", "base_trace"),
        lambda value: _is_mapping(value, _is_list),
        "lists of numbers by name",
    ),
    (("excluded",), lambda value: _is_mapping(value, _is_text), "reasons"),
)
_SEARCH_RULES: tuple[_Rule, ...] = (
    (("asked", "found", "low", "high"), _is_number, "a number"),
    (("reason",), _is_text, "text"),
    (("num_steps",), _is_count, "a whole number"),
    (("ramp",), _are_pairs, "pairs of numbers"),
    (
        ("trials",),
        lambda value: _are_pairs(value, has_gaps=True),
        "pairs of numbers, the second of them or null",
    ),
)
