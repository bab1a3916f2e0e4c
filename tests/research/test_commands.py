"""The commands of ``python -m research``."""

import pytest
from typer.testing import CliRunner

from research.__main__ import app
from research.claims import STUDIES
from tests.helpers.imports import SLOW_PACKAGES, imported_by


def call(*arguments, expect=0):
    result = CliRunner().invoke(app, arguments, prog_name="python -m research", catch_exceptions=False)
    assert result.exit_code == expect, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("command", ["compare", "ablate", "claims"])
def test_help_teaches(command, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out, _ = call(command, "--help")
    assert f"Usage: python -m research {command}" in out
    assert "\x1b" not in out


def test_help_names_every_study(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, _ = call("claims", "--help")
    line = next(line for line in out.splitlines() if "--study" in line)
    assert all(study in line for study in STUDIES)


@pytest.mark.parametrize("arguments", [[], ["compare"], ["ablate"], ["claims"]])
def test_help_needs_no_torch(arguments):
    imported = imported_by("research", *arguments, "--help")
    assert "research.commands.compare" in imported
    assert not imported & SLOW_PACKAGES


def test_bad_input_is_one_line():
    _, err = call("claims", "--study", "abc", expect=2)
    assert "--study must be one of 'exploration', 'robustness', 'prior', 'mechanism', got 'abc'" in err
