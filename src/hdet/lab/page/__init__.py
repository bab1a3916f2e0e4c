"""One self-contained HTML page from the directories of one or several runs."""

from hdet.lab.page.read_runs import Evaluation, Run, read_run, runs_within
from hdet.lab.page.run_report import LivePage, build_report, follow
from hdet.lab.page.sentences import headline, sentence
from hdet.lab.page.what_replicas_said import what_replicas_said

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
    "what_replicas_said",
]
