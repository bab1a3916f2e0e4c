"""The processes that ``--engine torchrun`` starts."""

import subprocess

from hdet.lab.cli import launch


def test_ranks_do_not_share_the_store_of_torchrun(monkeypatch):
    seen = {}

    class Process:
        def __init__(self, command, env, **_):
            seen.update(env)

        def wait(self, timeout):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert launch.launch(["resume", "here"], 2) == (0, False)
    assert seen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
