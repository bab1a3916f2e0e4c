"""Where records go: memory, or a file of JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, overload, runtime_checkable

from hdet.telemetry.record import RoundRecord

__all__ = ["JsonlSink", "RecordSink", "Records", "read_records"]


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
        while self._records and self._records[-1].step >= record.step:
            self._records.pop()
        self._records.append(record)
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
    """Appends one JSON line per record; each line is complete on disk before ``write`` returns."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._is_open = False

    def write(self, record: RoundRecord) -> None:
        """Take one record."""
        if not self._is_open:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_unfinished_line(self.path)
            self._is_open = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())


def _cut_unfinished_line(path: Path) -> None:
    """Remove what a process left that ended while it was writing; a new line would run on with it."""
    if path.exists():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])


def read_records(path: str | Path) -> list[RoundRecord]:
    """The records of a file of JSON lines; an unfinished last line is left out.

    A run that was resumed writes again the rounds that it repeats: the later record of a step wins.
    """
    records: dict[int, RoundRecord] = {}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = RoundRecord.from_json(line)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break  # the process ended while writing it
            raise ValueError(f"{path}, line {number}: not a round record ({error})") from error
        for step in [step for step in records if step >= record.step]:
            del records[step]
        records[record.step] = record
    return list(records.values())
