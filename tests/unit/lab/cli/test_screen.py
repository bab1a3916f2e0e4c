"""What the command line shows."""

from __future__ import annotations

import warnings

from hdet.errors import HdetWarning
from hdet.lab.cli.screen import show_warnings_plainly


def test_a_warning_of_hdet_is_one_line_and_others_are_as_python_shows_them(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    show_warnings_plainly()
    said = [warnings.formatwarning("rows", kind, "a.py", 3) for kind in (HdetWarning, UserWarning)]
    assert said[0] == "hdet: warning: rows\n" and said[1].startswith("a.py:3: UserWarning: rows")
