"""The line of a search: on a terminal, from the fifth second on, and gone in the end."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hdet
from hdet.search import progress, with_torch
from hdet.search.progress import ProgressLine


class Terminal(io.StringIO):
    """Shows what a person sees of a line."""

    def isatty(self):
        return True

    @property
    def shown(self):
        screen = ""
        for part in self.getvalue().split("\r"):
            screen = part + screen[len(part) :]
        return screen.rstrip()


class Clock:
    """Is moved by hand."""

    now = 100.0

    def __call__(self):
        return self.now


def test_the_line_comes_after_five_seconds_changes_in_place_and_goes():
    terminal, clock = Terminal(), Clock()
    with ProgressLine(True, terminal, clock) as line:
        line.begin("ramp", 40)
        clock.now += 4.9
        line.step(4)
        assert terminal.getvalue() == ""
        clock.now += 0.2
        line.step(6)
        assert terminal.shown == "hdet: finding the learning rate, ramp 25 %, 5 s"
        line.step()  # at once: too soon to be read
        assert "27" not in terminal.shown
        line.begin("trials", 320)
        clock.now += 10
        line.step(8)
        assert terminal.shown == "hdet: finding the learning rate, trials 2 %, 15 s"
        clock.now += 1
        line.step(1000)  # trials that were made again
        assert terminal.shown == "hdet: finding the learning rate, trials 99 %, 16 s"
    assert terminal.shown == "" and "\n" not in terminal.getvalue()


def test_the_line_goes_where_a_search_fails():
    terminal, clock = Terminal(), Clock()
    with pytest.raises(RuntimeError), ProgressLine(True, terminal, clock) as line:
        clock.now += 6
        line.begin("ramp", 40)
        line.step()
        raise RuntimeError
    assert terminal.getvalue().endswith("\r") and terminal.shown == ""


@pytest.mark.parametrize("is_wanted, stream", [(False, Terminal()), (True, io.StringIO())])
def test_nothing_is_written_to_what_is_no_terminal_or_where_it_is_not_wanted(is_wanted, stream):
    clock = Clock()
    with ProgressLine(is_wanted, stream, clock) as line:
        line.begin("ramp", 40)
        clock.now += 60
        line.step()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])  # in one pass, and by themselves
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_search_tells_how_far_it_is(kind, is_wanted, monkeypatch):
    terminal, ticks = Terminal(), iter(range(10**6))
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(
        with_torch, "ProgressLine", lambda shown: ProgressLine(shown, clock=lambda: next(ticks))
    )
    model = nn.Linear(4, 1)
    data = [torch.randn(16, 4) for _ in range(20)]
    hdet.find_lr(
        model,
        kind(model.parameters(), lr=0.01),
        data,
        lambda model, x: (model(x) - x.sum(dim=1, keepdim=True)).square().mean(),
        total_steps=200,
        progress=is_wanted,
    )
    assert ("ramp 51 %" in terminal.getvalue()) == is_wanted
    assert ("trials 50 %" in terminal.getvalue()) == is_wanted
    assert terminal.shown == ""


def test_a_wish_that_is_none_is_refused():
    model = nn.Linear(4, 1)
    with pytest.raises(TypeError, match="progress must be True or False, got 'yes'"):
        hdet.find_lr(
            model, torch.optim.SGD(model.parameters()), [], nn.MSELoss(), total_steps=100, progress="yes"
        )
