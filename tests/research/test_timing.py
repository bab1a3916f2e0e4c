"""Methods in turn: who runs when, what is counted, how it ends."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from hdet.errors import HdetError
from hdet.lab.tasks.quadratic import Quadratic
from research.compare import timing
from research.compare.timing import seconds_in_turn
from research.peers.base import Diverged, Job, Method, Trained

JOB = Job(task=Quadratic(size=2), start_lr=0.1, steps=40, seed=0, num_replicas=2, optimizer_kind="sgd")


@pytest.fixture
def clock(monkeypatch):
    """Goes on by what is added to it, and not by itself."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def method(name, log, *, num_steps=40, on_step=lambda: None, error=None):
    def run(job):
        batches = job.batches()
        for step in range(num_steps):
            next(batches)
            log.append((name, step))
            on_step()
        if error is not None:
            raise error
        return Trained({"loss": 1.0})

    return Method(name=name, description="", run=run)


def turns(log):
    """Steps per turn, in order."""
    found = []
    for name, _ in log:
        if found and found[-1][0] == name:
            found[-1][1] += 1
        else:
            found.append([name, 1])
    return found


def test_ten_steps_of_each_in_turn():
    log = []
    seconds_in_turn([method("a", log), method("b", log, num_steps=25)], JOB)
    # A turn ends as the tenth batch is taken, before its step.
    assert turns(log) == [["a", 9], ["b", 9], ["a", 10], ["b", 10], ["a", 10], ["b", 6], ["a", 11]]


def test_each_is_charged_its_own_time(clock):
    def takes(seconds):
        clock[0] += seconds

    slow = method("slow", [], on_step=lambda: takes(4))
    fast = method("fast", [], num_steps=25, on_step=lambda: takes(1))
    assert seconds_in_turn([slow, fast], JOB) == [40 * 4, 25]
    assert clock == [40 * 4 + 25]


def test_what_diverged_has_no_time_and_an_error_is_named():
    ours, plain = seconds_in_turn([method("a", [], num_steps=3, error=Diverged()), method("b", [])], JOB)
    assert ours is None
    assert plain is not None
    with pytest.raises(HdetError, match="method 'a' cannot run: no such thing"):
        seconds_in_turn([method("a", [], error=ValueError("no such thing")), method("b", [])], JOB)


def test_it_leaves_torchs_generator_and_the_task_as_they_were():
    def draw(job):
        torch.rand(3)
        next(job.batches())
        return Trained({})

    state = torch.get_rng_state()
    seconds_in_turn([Method(name="draws", description="", run=draw)], JOB)
    assert torch.equal(torch.get_rng_state(), state)
    assert "train_batches" not in vars(JOB.task)


def test_ctrl_c_ends_all_of_them():
    def interrupting(job):
        batches = job.batches()
        try:
            for step in range(10**6):
                next(batches)
                time.sleep(0.002)
                if step == 15:
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            time.sleep(0.1)
            ended.append("a")

    ended = []
    before = threading.active_count()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            seconds_in_turn([Method(name="a", description="", run=interrupting), method("b", [])], JOB)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == ["a"]  # its thread has ended, and not only been given up
    assert threading.active_count() == before
