"""Takes records: into memory, a file of JSON lines, or several sinks."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, overload, runtime_checkable

from hdet.checks import require_kind, require_path
from hdet.errors import warn
from hdet.round_record import RoundRecord, problem_of
from hdet.round_record import SearchRecord as SearchRecord


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
        self.path = require_path("path", path)
        _require_writable(self.path)
        self._waiting: list[RoundRecord] = []
        self._is_open = False
        self._has_begun = False
        self._has_warned = False

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
    """Tell if the first record of a sink begins a run, where the file holds another."""
    if record.step > record.num_steps or not path.is_file():
        return False
    earlier, _ = scan_records(path)
    # What a search has found stands before the first step, in a record of its own.
    return bool(earlier) and (record.search is not None or earlier[-1].step > 0)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of this one after the block, or leave all as it was.

    Until then it has a name that nobody can guess, so that it follows no link that was put there.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with unfinished.open("xb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cut_unfinished_line(path: Path) -> None:
    """Remove what a process left that ended while it was writing; a new line would run on with it."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def read_records(path: str | Path) -> list[RoundRecord]:
    """Read the records of a file of JSON lines; an unfinished last line is left out.

    A run that was resumed writes again the rounds that it repeats: the later record of a step wins.
    """
    records: list[RoundRecord] = []
    for number, line, is_last, record in _lines_of(path):
        if isinstance(record, RoundRecord):
            _append(records, record)
        elif is_last and (records or b'{"round":'.startswith(line[:9])):
            break  # the process ended while writing it
        else:
            text = line.decode("utf-8", errors="replace")
            start = text if len(text) <= 40 else text[:40] + "..."
            raise ValueError(
                f"{path}, line {number}: not a round record ({_reason(record)}), got {start!r}: pass a file "
                "that hdet.Records or hdet.JsonlSink has written"
            ) from record
    return records


def scan_records(path: str | Path) -> tuple[list[RoundRecord], list[str]]:
    """Read what can be read of a file of JSON lines, and note each line that cannot.

    Content never raises, whatever it is; a file that cannot be opened does. As in :func:`read_records`, the
    later record of a step wins.
    """
    records: list[RoundRecord] = []
    notes: list[str] = []
    for number, _, is_last, record in _lines_of(path):
        if isinstance(record, RoundRecord):
            problem = problem_of(record)
        else:
            problem = "the line is cut off" if is_last else _reason(record)
        if isinstance(record, RoundRecord) and not problem:
            _append(records, record)
        else:
            notes.append(f"{Path(path).name}, line {number}: not a round record ({problem})")
    return records, notes


def _lines_of(path: str | Path) -> Iterator[tuple[int, bytes, bool, RoundRecord | Exception]]:
    """Read number, text, and the record or what is wrong with it. The last line was cut off, if there is one.

    Whole lines end with a line break.
    """
    lines = require_path("path", path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                record = RoundRecord.from_json(line.decode("utf-8"))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                record = error
            yield number, line, number == len(lines), record


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


class Tee:
    """One record to several sinks, in their order.

    A :class:`hdet.trackers.Tracker` that fails warns once and is left out. :class:`hdet.Records` warns
    and tries again. A failure of a sink of your own is raised.

    Args:
        *sinks: anything with ``write(record)``.

    >>> records = Records()
    >>> tee = Tee(records)
    >>> tee.write(RoundRecord(round=0, step=10, num_replicas=2))
    >>> len(records)
    1
    """

    def __init__(self, *sinks: RecordSink) -> None:
        for sink in sinks:
            must = "sinks must have a write(record) method, such as hdet.Records()"
            require_kind(must, sink, isinstance(sink, RecordSink))
        self.sinks = sinks

    def write(self, record: RoundRecord) -> None:
        """Hand one record to every sink."""
        for sink in self.sinks:
            sink.write(record)

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the results of an evaluation to every sink that takes them."""
        self._call("write_metrics", step, metrics)

    def close(self) -> None:
        """Close every sink that can be closed."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for sink in self.sinks:
            act = getattr(sink, method, None)
            if act is not None:
                act(*arguments)
