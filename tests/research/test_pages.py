"""What pages show of saved runs is what the commands print that they name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from research.__main__ import app

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "research").glob("*/*.md")]
MARK = r"<!-- (?:table|rows of): python -m research ((?:ablate|explore|recipe|zoo) .*) -->\n\n?((?:\|.*\n)+)"


def shown() -> dict[str, list[str]]:
    """The rows of all pages by the command that prints them."""
    rows: dict[str, list[str]] = {}
    for page in PAGES:
        for command, table in re.findall(MARK, page.read_text()):
            rows.setdefault(command, []).extend(table.splitlines())
    return rows


def command_of(text: str) -> object:
    """A parameter; the zoo takes ten seconds."""
    return pytest.param(text, marks=pytest.mark.large if text.startswith("zoo") else ())


@pytest.mark.parametrize("command", [command_of(text) for text in sorted(shown())])
def test_the_tables_of_pages_are_those_of_the_records(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True, check=True)
    done = CliRunner().invoke(app, words.stdout.split())
    assert done.exit_code == 0, done.output
    printed = done.output.splitlines()
    assert not [row for row in shown()[command] if row not in printed]


def test_every_study_with_a_table_is_here():
    assert {command.split()[0] for command in shown()} == {"ablate", "explore", "recipe", "zoo"}
