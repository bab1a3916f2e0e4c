"""One self-contained HTML page from the directories of one or several runs."""

from hdet.lab.page.read_runs import Evaluation, Run, read_run, runs_within
from hdet.lab.page.run_report import build_report
from hdet.lab.page.sentences import headline, sentence

__all__ = [
    "Evaluation",
    "Run",
    "build_report",
    "headline",
    "read_run",
    "runs_within",
    "sentence",
]
