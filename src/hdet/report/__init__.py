"""One self-contained HTML page from the directories of one or several runs."""

from hdet.report.live import LivePage, follow
from hdet.report.page import build_report
from hdet.report.runs import Evaluation, Run, read_run, runs_within
from hdet.report.words import headline, sentence

__all__ = [
    "Evaluation",
    "LivePage",
    "Run",
    "build_report",
    "follow",
    "headline",
    "read_run",
    "runs_within",
    "sentence",
]
