"""The example of Ray Train on two workers, and the card that shows it."""

from __future__ import annotations

import re

import pytest

from tests.helpers.needed import needed
from tests.integrations.cards import snippet
from tests.integrations.launch import ROOT, run_script

pytestmark = pytest.mark.timeout(300)


def test_the_card_of_ray_is_its_example():
    source = (ROOT / "examples/ray_train.py").read_text()
    assert all(line in source for line in snippet("ray").splitlines())


@pytest.mark.parametrize("is_local", [True, False], ids=["local mode", "started by Ray"])
def test_the_example_of_ray_on_two_workers(is_local, tmp_path):
    needed("ray.train")
    script = "tests/integrations/ray_local_run.py" if is_local else "examples/ray_train.py"
    shown = run_script(script, num_ranks=2 if is_local else 1, cwd=tmp_path)
    shown_found = set(re.findall(r"found: (\S+),", shown))
    assert len(shown_found) == 1 and float(shown_found.pop()) > 1e-3
    assert max(map(int, re.findall(r"rounds: (\d+)", shown))) > 20  # those of the first worker
