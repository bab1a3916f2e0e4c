"""Check that version, changelog, citation and tag agree: ``python scripts/check_release.py --tag v0.1.0``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def disagreements(root: Path, tag: str | None = None) -> list[str]:
    """What does not agree with the version of the package, in words. A tag asks for a finished changelog."""
    version = _found(r'^__version__ = "(.+)"$', root / "src/hdet/__init__.py")
    cited = _found(r"^version: (.+)$", root / "CITATION.cff")
    headings = re.findall(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    wrong = []
    if cited != version:
        wrong.append(f"CITATION.cff has version {cited}, the package has {version}")
    if not headings or headings[0] not in ("Unreleased", version):
        wrong.append(f"CHANGELOG.md must begin with Unreleased or {version}, got {headings[:1]}")
    if tag is not None and tag != f"v{version}":
        wrong.append(f"the tag must be v{version}, got {tag}")
    if tag is not None and headings[:1] != [version]:
        wrong.append(f"CHANGELOG.md must begin with {version} when it is tagged, got {headings[:1]}")
    return wrong


def _found(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    if match is None:
        raise SystemExit(f"{path.name} has no line like {pattern}")
    return match[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag that the release gets, such as v0.1.0")
    wrong = disagreements(ROOT, parser.parse_args().tag)
    print("\n".join(wrong) or "version, changelog and citation agree")
    raise SystemExit(bool(wrong))
