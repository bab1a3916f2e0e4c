"""What the documentation shows runs, and what it names exists."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

import hdet

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.name}-{i}")
    for page in PAGES
    for i, snippet in enumerate(
        re.findall(r"<!-- run this -->\n```python\n(.*?)```", page.read_text(), re.DOTALL)
    )
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {})


def test_named_tests_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in sources, f"{page.name} names {name}"


def test_named_parts_of_the_library_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`?(hdet(?:\.[A-Za-z_]\w*)+)", page.read_text()):
            if name.endswith((".py", ".md", ".git")):
                continue
            pkgutil.resolve_name(name)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_documented() -> None:
    for name in hdet.__all__:
        if name != "__version__":
            assert (getattr(hdet, name).__doc__ or "").strip(), name


def test_the_map_names_everything_public() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in hdet.__all__ if name != "__version__" and f"hdet.{name}`" not in page]
    assert not missing
