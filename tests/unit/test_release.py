"""A release says one version everywhere, and the smoke test that it is tried with runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts import check_release, smoke

ROOT = Path(__file__).parent.parent.parent


def test_this_tree_agrees():
    assert check_release.disagreements(ROOT) == []


@pytest.fixture
def tree(tmp_path):
    for name in ("src/hdet/__init__.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_what_disagrees_is_named(tree):
    (tree / "src/hdet/__init__.py").write_text('__version__ = "0.2.0"\n')
    (tree / "CITATION.cff").write_text("version: 0.1.0\n")
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n")
    assert check_release.disagreements(tree, "v0.3.0") == [
        "CITATION.cff has version 0.1.0, the package has 0.2.0",
        "CHANGELOG.md must begin with Unreleased or 0.2.0, got ['0.1.0']",
        "the tag must be v0.2.0, got v0.3.0",
        "CHANGELOG.md must begin with 0.2.0 when it is tagged, got ['0.1.0']",
    ]


def test_a_tag_asks_for_a_finished_changelog(tree):
    (tree / "CITATION.cff").write_text("version: 0.2.0\n")
    (tree / "src/hdet/__init__.py").write_text('__version__ = "0.2.0"\n')
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n")
    assert check_release.disagreements(tree, "v0.2.0") == []


def test_the_smoke_test_passes(capsys):
    smoke.main()
    assert "ok" in capsys.readouterr().out
