"""What a run leaves behind: one record per round, and where records go."""

from hdet.telemetry.record import RoundRecord, ScoutDecision, ScoutRecord
from hdet.telemetry.sinks import JsonlSink, Records, RecordSink, read_records, scan_records

__all__ = [
    "JsonlSink",
    "RecordSink",
    "Records",
    "RoundRecord",
    "ScoutDecision",
    "ScoutRecord",
    "read_records",
    "scan_records",
]
