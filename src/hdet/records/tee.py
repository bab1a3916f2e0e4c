"""Tee: one record to several sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hdet.records.record import RoundRecord
from hdet.records.sinks import RecordSink


class Tee:
    """One record to several sinks, in their order.

    A :class:`Tracker` that fails warns once and is left out. :class:`hdet.Records` warns and tries again. A
    failure of a sink of your own is raised.

    Args:
        *sinks: anything with ``write(record)``.

    >>> from hdet.records import Records
    >>> records = Records()
    >>> tee = Tee(records)
    >>> tee.write(RoundRecord(round=0, step=10, num_replicas=2))
    >>> len(records)
    1
    """

    def __init__(self, *sinks: RecordSink) -> None:
        for sink in sinks:
            if not isinstance(sink, RecordSink):
                raise TypeError(
                    f"sinks must have a write(record) method, such as hdet.Records(), got {sink!r} of type "
                    f"{type(sink).__name__}"
                )
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
