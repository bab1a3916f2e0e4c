"""Reader of real logs: CSV files of events, in three shapes."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hdet.checks import require_choice
from hdet.errors import HdetWarning, warn

MAX_BAD_SHARE = 0.2
NUM_SHOWN = 5

Row = tuple[str, str, float, tuple[bool, bool, bool]]
"""User, item, time in seconds, and whether the user contributed, liked, dwelt long."""


@dataclass(frozen=True)
class Log:
    """Events of a log, in the order of the file."""

    users: np.ndarray
    """Numbers of users, from 0 in order of appearance."""
    items: np.ndarray
    """Numbers of items, likewise."""
    times: np.ndarray
    """Seconds."""
    actions: np.ndarray
    """(num_events, 3) of zeros and ones: contribution, like, long dwell."""
    num_users: int
    """Number of different users."""
    num_items: int
    """Number of different items."""


@dataclass(frozen=True)
class Format:
    """A shape of log: the columns that are read, and how a row's fields in that order become an event."""

    columns: tuple[str, ...]
    parse: Callable[[list[str]], Row]


def _parse_hdet(fields: list[str]) -> Row:
    user, item, time, contribution, like, dwell = fields
    return user, item, _time(time), (_action(contribution), _action(like), _action(dwell))


def _parse_movielens(fields: list[str]) -> Row:
    user, item, text, time = fields
    rating = _number(text, "rating")
    if not 0 < rating <= 5:
        raise ValueError(f"rating {text!r} is not in (0, 5]")
    return user, item, _time(time), (rating >= 5, rating >= 4, rating >= 3)


def _parse_kuairand(fields: list[str]) -> Row:
    user, item, time_ms, *flags = fields
    like, follow, comment, forward, long_view = map(_action, flags)
    return user, item, _time(time_ms) / 1000, (comment or forward or follow, like, long_view)


FORMATS = {
    "hdet": Format(("user", "item", "time", "contribution", "like", "dwell"), _parse_hdet),
    "movielens": Format(("userId", "movieId", "rating", "timestamp"), _parse_movielens),
    "kuairand": Format(
        ("user_id", "video_id", "time_ms", "is_like", "is_follow", "is_comment", "is_forward", "long_view"),
        _parse_kuairand,
    ),
}
"""Known shapes by name; other columns may stand between these, in any order."""


def read_log(path: str | Path, format: str = "auto") -> Log:
    """Read a log row by row; rows that cannot be read are left out and reported.

    - ``"hdet"``: ``user,item,time,contribution,like,dwell``; time in seconds, actions 0 or 1.
    - ``"movielens"``: ``userId,movieId,rating,timestamp`` (``ratings.csv``), or tab-separated without a
      header (``u.data``). A rating of 5 counts as a contribution, from 4 as a like, from 3 as a long dwell.
    - ``"kuairand"``: the columns of KuaiRand's ``log_*.csv``; comment, forward or follow count as a
      contribution, ``long_view`` as a long dwell.

    Args:
        path: the file.
        format: one of these, or ``"auto"`` to tell from the first line.

    Raises:
        ValueError: there is no such file, columns are missing, or more than a fifth of the rows are bad.

    Warns:
        HdetWarning: some rows are bad; it names the first of them by line.
    """
    require_choice("format", format, ("auto", *FORMATS))
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"log must be a file that exists, got {str(path)!r}: there is no such file")
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    columns = array("q"), array("q"), array("d"), array("b")
    num_rows, bad = 0, []
    for line, row in _rows(path, format):
        num_rows += 1
        if isinstance(row, str):
            bad.append((line, row))
            continue
        user, item, time, actions = row
        columns[0].append(users.setdefault(user, len(users)))
        columns[1].append(items.setdefault(item, len(items)))
        columns[2].append(time)
        columns[3].extend(actions)
    _report(path, num_rows, bad)
    kinds = (np.int64, np.int64, np.float64, np.int8)
    u, i, t, a = (np.frombuffer(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True))
    return Log(u, i, t, a.reshape(-1, 3), num_users=len(users), num_items=len(items))


def _rows(path: Path, format: str) -> Iterator[tuple[int, Row | str]]:
    """Line numbers with rows, or with what is wrong with them."""
    # Bytes that are no text make their own row bad, not the file; some tools write a mark at the beginning.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        first = file.readline()
        delimiter = "\t" if "\t" in first else ","
        header = [name.strip(' "\r\n') for name in first.split(delimiter)]
        if format in ("auto", "movielens") and delimiter == "\t" and _is_u_data(header):
            kind, header = FORMATS["movielens"], list(FORMATS["movielens"].columns)
            file.seek(0)
            begins_at = 1
        else:
            kind = _format_of(path, format, header)
            begins_at = 2
        places = [header.index(column) for column in kind.columns]
        # Each line on its own: a quote that is never closed then spoils one row, not all that follow.
        for number, line in enumerate(file, start=begins_at):
            if not line.strip():
                continue
            try:
                fields = _split(line, delimiter)
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields instead of {len(header)}")
                row = kind.parse([fields[place].strip() for place in places])
                if not (row[0] and row[1]):
                    raise ValueError("empty user or item")
                yield number, row
            except (ValueError, csv.Error) as error:
                yield number, str(error)


def _split(line: str, delimiter: str) -> list[str]:
    return next(csv.reader((line,), delimiter=delimiter, strict=True), [])


def _is_u_data(header: list[str]) -> bool:
    known = {column for kind in FORMATS.values() for column in kind.columns}
    return len(header) == 4 and not known & set(header)


def _format_of(path: Path, name: str, header: list[str]) -> Format:
    missing = {
        key: [column for column in kind.columns if column not in header]
        for key, kind in FORMATS.items()
        if name in ("auto", key)
    }
    nearest = min(missing, key=lambda key: len(missing[key]) / len(FORMATS[key].columns))
    if missing[nearest]:
        known = "; ".join(f"{key}: {','.join(kind.columns)}" for key, kind in FORMATS.items())
        raise ValueError(
            f"log {str(path)!r} must have the columns of a known format, got {','.join(header)!r}: "
            f"{', '.join(missing[nearest])} missing for {nearest}. Known formats: {known}"
        )
    return FORMATS[nearest]


def _report(path: Path, num_rows: int, bad: list[tuple[int, str]]) -> None:
    if num_rows and not bad:
        return
    shown = "; ".join(f"line {line}: {reason}" for line, reason in bad[:NUM_SHOWN])
    text = f"{len(bad)} of {num_rows} rows cannot be read" + (f" ({shown}" if bad else "")
    text += (f"; and {len(bad) - NUM_SHOWN} more)" if len(bad) > NUM_SHOWN else ")") if bad else ""
    if not num_rows or len(bad) > MAX_BAD_SHARE * num_rows:
        raise ValueError(
            f"log {str(path)!r} must have rows, at most {MAX_BAD_SHARE:.0%} of them bad, but {text}: "
            "correct the file or name its format"
        )
    warn(f"log {str(path)!r}: {text}; they are left out", HdetWarning)


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{what} {text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{what} {text!r} is not finite")
    return value


def _time(text: str) -> float:
    value = _number(text, "time")
    if value < 0:
        raise ValueError(f"time {text!r} is negative")
    return value


def _action(text: str) -> bool:
    if text not in ("0", "1", "0.0", "1.0"):
        raise ValueError(f"action {text!r} is not 0 or 1")
    return text in ("1", "1.0")
