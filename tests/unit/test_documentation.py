"""What the documentation shows runs, and what it names exists."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import hdet
from hdet.search.decisions import lengths, num_parts
from tests.helpers.replicas import run_replicas

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LOGS = sorted([*(ROOT / "research").glob("**/*.md"), *(ROOT / "benchmarks").glob("*.md")])


def snippets(mark: str) -> list[Any]:
    """The Python snippets that stand behind this mark, of all pages."""
    pattern = rf"<!-- {mark} -->\n```python\n(.*?)```"
    return [
        pytest.param(snippet, id=f"{page.name}-{i}")
        for page in PAGES
        for i, snippet in enumerate(re.findall(pattern, page.read_text(), re.DOTALL))
    ]


@pytest.mark.parametrize("snippet", snippets("run this"))
def test_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {})


def test_every_snippet_is_python() -> None:
    for page in PAGES:
        for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            compile(snippet, str(page), "exec")


@pytest.mark.parametrize("snippet", snippets("run on two ranks"))
def test_snippets_run_on_two_ranks(snippet: str) -> None:
    run_replicas(run_on_rank, 2, snippet, timeout_seconds=110)


def run_on_rank(rank: int, snippet: str) -> None:
    """Run a snippet in a process that has joined the others already."""
    with patch.object(dist, "init_process_group"):
        exec(compile(snippet, "snippet", "exec"), {})


def test_code_beside_an_equation_is_the_code_that_runs() -> None:
    pattern = r"<!-- code of (\S+) -->\n```python\n(.*?)```"
    for page in PAGES:
        for name, shown in re.findall(pattern, page.read_text(), re.DOTALL):
            assert shown == without_docstring(pkgutil.resolve_name(name)), f"{page.name} shows {name}"


def without_docstring(function: Any) -> str:
    """The source of a function, with its comments and without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    docstring = definition.body[0]
    lines = source.splitlines(keepends=True)
    return "".join(lines[: docstring.lineno - 1] + lines[docstring.end_lineno :])


def test_named_tests_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in [*PAGES, *LOGS]:
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in sources, f"{page.name} names {name}"


def test_named_parts_of_the_library_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`?(hdet(?:\.[A-Za-z_]\w*)+)", page.read_text()):
            if name.endswith((".py", ".md", ".git")):
                continue
            if name.startswith("hdet.jax") and not (find_spec("jax") and find_spec("optax")):
                continue
            pkgutil.resolve_name(name)


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *LOGS]:
        for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_cost_of_a_search_is_what_the_pages_say() -> None:
    page = (ROOT / "docs" / "finders.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) to (\d+) \| (\d+) to (\d+) % \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        steps, least, most, low, high = map(int, row)
        for num_replicas in (1, 2, 8):
            sizes = lengths(steps, num_replicas * num_parts(num_replicas, 32))
            assert (sizes.ramp + sizes.trial, sizes.most_ramp_steps + sizes.trial) == (least, most)
        assert abs(100 * least / steps - low) < 0.5 and abs(100 * most / steps - high) < 0.6
        if steps >= 1000:
            assert f"run of {steps} | {least} to {most} |" in (ROOT / "README.md").read_text()


def test_every_public_name_is_documented() -> None:
    for name in hdet.__all__:
        if name != "__version__":
            assert (getattr(hdet, name).__doc__ or "").strip(), name


def test_the_map_names_everything_public() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [name for name in hdet.__all__ if name != "__version__" and f"hdet.{name}`" not in page]
    assert not missing
