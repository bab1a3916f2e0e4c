"""What a run leaves behind: one record per round, and where records go."""

from hdet.records.record import RoundRecord, SearchRecord
from hdet.records.sinks import JsonlSink, Records, RecordSink, read_records, scan_records

__all__ = [
    "JsonlSink",
    "RecordSink",
    "Records",
    "RoundRecord",
    "SearchRecord",
    "read_records",
    "scan_records",
]
