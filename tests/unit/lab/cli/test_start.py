"""Commands that compute nothing start without the packages that are slow to import."""

import pytest

from tests.helpers.imports import SLOW_PACKAGES, imported_by

PLAN = ["plan", "--parameters", "1B", "--replicas", "8", "--step-seconds", "0.5", "--bandwidth", "25"]
HELP = [[name, "--help"] for name in ("run", "resume", "sweep", "report")]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], PLAN, *HELP], ids=lambda words: words[0])
def test_it_starts_without_torch(arguments):
    imported = imported_by("hdet", *arguments)
    assert "hdet.lab.cli.app" in imported
    assert not imported & SLOW_PACKAGES
