"""One self-contained HTML page from the directories of one or several runs."""

from hdet.report.page import build_report
from hdet.report.runs import Evaluation, Run, read_run
from hdet.report.words import headline, sentence

__all__ = ["Evaluation", "Run", "build_report", "headline", "read_run", "sentence"]
