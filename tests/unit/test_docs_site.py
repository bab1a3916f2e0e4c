"""The documentation as a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed; make test runs them")

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: broken links and anchors, pages that the navigation lacks."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_readme_is_the_first_page(site: Path) -> None:
    assert "hdet" in (site / "index.html").read_text()


def test_no_page_asks_the_network_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]* src=\"?(https?:[^\" >]+)", text)
        loaded += re.findall(r"<link [^>]*\brel=\"?(?:stylesheet|preconnect)\b[^>]*https?:[^>]+", text)
        assert not loaded, page.name


def test_equations_are_drawn_without_a_script(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "arithmatex" not in page.read_text(), page.name
    assert "<math" in (site / "theory.html").read_text()


def test_docstrings_are_in_markdown(site: Path) -> None:
    page = (site / "docstrings.html").read_text()
    assert not re.findall(r":(?:class|func|meth|math):|::</p>|code-block::", page)
    assert "hdet.find_lr" in page
