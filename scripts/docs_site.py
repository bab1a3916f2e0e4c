"""Hooks of mkdocs: pages that lie beside docs/, links to them, and equations that need no script.

The README is the first page. Examples, changelog and contributing are pages too. Equations between dollar
signs become MathML, which browsers draw by themselves, so that a page asks nothing of the network. Logs and
records stay in the repository: a page links to them there, or names their path.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md")
ELSEWHERE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)*((?:research|benchmarks|scripts)/[^)#]+)(#[^)]*)?\)")
"""A link to a file of the repository that is no page."""
PUBLIC = re.compile(r"`(hdet(?:\.\w+)*\.[A-Za-z]\w*)`")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(),
        "examples.md": _examples(),
        "docstrings.md": _docstrings(),
    }
    pages |= {name: (ROOT / name).read_text() for name in BESIDE}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for path in (ROOT / "examples").glob("*.ipynb"):  # to download
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    for path in (ROOT / "research").glob("*/records/**/*.png"):  # figures that pages show
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make links work from where the page stands in the site."""
    source = page.file.src_uri
    if source in ("index.md", *BESIDE):
        markdown = markdown.replace("](docs/", "](")
    up = "../" * source.count("/")
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py\)", rf"]({up}examples.md#\1py)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+\.ipynb)\)", rf"]({up}examples/\1)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+README\.md", f"]({up}index.md", markdown)
    markdown = re.sub(rf"\]\((?:\.\./)+({'|'.join(BESIDE)})", rf"]({up}\1", markdown)
    markdown = ELSEWHERE.sub(lambda found: _in_repository(found, config.repo_url), markdown)
    markdown = re.sub(r"\]\((?:\.\./)*research/", f"]({up}research/", markdown)
    if source == "docstrings.md":
        page.meta["search"] = {"boost": 0.3}  # guides come first among the results of a search
    if source == "api.md":
        markdown = _linked_names(markdown)
    return markdown


def _in_repository(link: re.Match[str], repository: str | None) -> str:
    """The link with the repository's address, or text and path where there is no address."""
    text, path, anchor = link[1], link[2], link[3] or ""
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
    return f"{text} (`{path}`)"


def on_page_content(html_text: str, **_: Any) -> str:
    """Turn equations into MathML, and let long names in tables break where a reader would break them."""

    def inline(match: re.Match[str]) -> str:
        return convert(html.unescape(match[1]))

    def block(match: re.Match[str]) -> str:
        return f'<div class="equation">{convert(html.unescape(match[1]), display="block")}</div>'

    def breakable(match: re.Match[str]) -> str:
        return re.sub(r"<code>[^<]{20,}</code>", at_punctuation, match[0])

    def at_punctuation(match: re.Match[str]) -> str:
        return re.sub(r"(?<=[_.(=,])(?=\w)", "<wbr>", match[0])

    html_text = re.sub(r"<td.*?</td>", breakable, html_text, flags=re.DOTALL)
    html_text = re.sub(r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, html_text, flags=re.DOTALL)
    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', block, html_text, flags=re.DOTALL)


def _examples() -> str:
    """A page with every example."""
    scripts = sorted(
        (ROOT / "examples").glob("*.py"), key=lambda path: (path.stem != "one_device", path.stem)
    )
    shown = [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in scripts]
    return "\n".join(["# Examples\n\nEach script is complete and runs as it is.\n", *shown])


def _docstrings() -> str:
    """A page with the docstring of every public name, in the order of the table of public names."""
    names = _public_names((ROOT / "docs" / "api.md").read_text())
    return "# Docstrings\n\nThe docstring of every [public name](api.md).\n\n" + "\n\n".join(
        f"::: {name}" for name in names
    )


def _public_names(page: str) -> list[str]:
    """Names in the table that are objects, not modules."""
    rows = [line for line in page.split("\n## ")[0].splitlines() if line.startswith("| `")]
    names = dict.fromkeys(name for row in rows for name in PUBLIC.findall(row.split("|")[1]))
    return [name for name in names if not _is_module(name)]


def _is_module(name: str) -> bool:
    path = ROOT.joinpath("src", *name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _linked_names(markdown: str) -> str:
    known = set(_public_names(markdown))
    lines = []
    for line in markdown.splitlines():
        if line.startswith("| `"):
            first, rest = line[1:].split("|", 1)
            first = PUBLIC.sub(lambda m: f"[`{m[1]}`][{m[1]}]" if m[1] in known else m[0], first)
            line = f"|{first}|{rest}"
        lines.append(line)
    return "\n".join(lines)
