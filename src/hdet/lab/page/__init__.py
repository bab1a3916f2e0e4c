"""One self-contained HTML page from the directories of one or several runs."""

from hdet.lab.page.live import LivePage, follow
from hdet.lab.page.page import build_report
from hdet.lab.page.runs import Evaluation, Run, read_run, runs_within
from hdet.lab.page.words import headline, sentence

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
