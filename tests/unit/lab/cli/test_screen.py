"""What the command line shows."""

from __future__ import annotations

import warnings

import pytest
import torch

import hdet
from hdet.errors import HdetWarning
from hdet.lab.cli.screen import show_warnings_plainly


def test_a_warning_of_hdet_is_one_line_and_others_are_as_python_shows_them(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back after the test
    show_warnings_plainly()
    said = [warnings.formatwarning(kind("rows"), kind, "a.py", 3) for kind in (HdetWarning, UserWarning)]
    assert said[0] == "hdet: warning: rows\n" and said[1].startswith("a.py:3: UserWarning: rows")


def test_a_warning_has_a_remedy_that_the_command_has(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    show_warnings_plainly()
    model = torch.nn.Linear(1, 1)
    decayed = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    probe = hdet.Probe([torch.zeros(2, 1)], lambda model, batch: model(batch).mean())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.warns(HdetWarning) as caught:
        hdet.AutoLR(
            decayed, total_steps=100, model=model, controllers=[hdet.HeldOutWeightDecay()], probe=probe
        )
        hdet.Ensemble(optimizer, explore=[hdet.WeightDecay(0.5)], sync_every=2)
    few, none = (warnings.formatwarning(one.message, one.category, "a.py", 3) for one in caught[:2])
    assert few.endswith("leave held_out_weight_decay out, or use a task with a larger probe_batch()\n")
    assert none.endswith("so it does nothing: pass --weight-decay 0.03\n")
