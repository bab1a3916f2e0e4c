"""RecordWriter: completes a record and hands it on."""

from __future__ import annotations

import logging

from hdet.explore import ExploredValues
from hdet.records import RecordSink, RoundRecord

_log = logging.getLogger(__name__)


class RecordWriter:
    """Writes the records of one process.

    Args:
        values: whose bases a record tells.
        sink: where records go; None for nowhere.
        is_writer: whether this process writes and logs, for all replicas.
    """

    def __init__(self, values: ExploredValues, sink: RecordSink | None, *, is_writer: bool) -> None:
        self._values, self._sink, self._is_writer = values, sink, is_writer
        self.keeps_trace = sink is not None and is_writer
        """Whether records tell the base of every step."""

    def write(self, record: RoundRecord) -> None:
        """Add the bases as they are now, and write."""
        for tunable in self._values.tunables:
            record.base[tunable.name] = tunable.base
            scheduled = tunable.slots[0].scheduled
            record.correction[tunable.name] = tunable.base / scheduled if scheduled else 1.0
            if tunable.control is not None:
                record.velocity[tunable.name] = tunable.control.velocity
        if self._is_writer:
            if self._sink is not None:
                self._sink.write(record)
            for replica, why in record.excluded.items():
                _log.warning("step %d: replica %d left out: %s", record.step, replica, why)
            _log.info("step %d: losses %s, base %s", record.step, record.losses, record.base)
