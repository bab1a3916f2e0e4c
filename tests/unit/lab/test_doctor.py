"""The doctor on this machine, and on machines where something is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from hdet.errors import install_command
from hdet.lab import doctor, self_test
from hdet.lab.doctor import Check, examine
from hdet.lab.self_test import SelfTestError


def checks_by_name(**settings: object) -> dict[str, Check]:
    return {check.name: check for check in examine(with_self_test=False, **settings)}  # pyright: ignore[reportArgumentType]


# --- the self-test ---------------------------------------------------------------------------------------

# No __main__ guard, and a file in the way that a child must not take for the library.
SCRIPT = """
import dataclasses, json
from hdet.lab.doctor import examine
print(json.dumps([dataclasses.asdict(check) for check in examine("runs")]))
"""


@pytest.mark.timeout(90)
def test_a_script_without_a_guard_examines_this_machine(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "hdet.py").write_text("raise ImportError('not the library')")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=tmp_path / "cwd",
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert [name for name, check in checks.items() if check["status"] == "error"] == []
    assert {"python", "hdet", "torch", "numpy", "cores", "backends", "devices", "folder"} <= set(checks)
    detail = checks["self-test"]["detail"]
    assert "parameters differ before every sync and agree after it" in detail
    for text in ("start ", "all-reduce of 1 float ", "of 1 M floats ", "GB/s", "converge of 1 M parameters "):
        assert text in detail
    assert not (tmp_path / "cwd" / "runs").exists()  # looking leaves nothing


def command(code: str, pids: Path | None = None) -> list[str]:
    note = "" if pids is None else f"import os; open({str(pids)!r} + '/' + str(os.getpid()), 'w').close(); "
    return [sys.executable, "-c", note + code]


def assert_ended(pids: Path) -> None:
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_failing_rank_is_told_with_its_last_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    codes = ["print('one'); raise OSError('no route to host')", "import time; time.sleep(3600)"]
    monkeypatch.setattr(self_test, "_command", lambda rank, *_: command(codes[rank], pids))
    check = doctor._self_test(3600.0)  # the other rank is not waited for
    assert (check.name, check.status) == ("self-test", "error")
    assert "rank 0 ended with code 1" in check.detail
    assert "OSError: no route to host" in check.detail
    assert "rank 1" not in check.detail
    assert "loopback" in check.remedy
    assert_ended(pids)


def test_a_hang_ends_with_the_time_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        self_test,
        "_command",
        lambda *_: command("print('waiting', flush=True); import time; time.sleep(60)", tmp_path),
    )
    with pytest.raises(SelfTestError, match=r"rank 0 did not end within 2\.5 s\n  waiting\nrank 1 did not"):
        self_test.self_test(time_limit_seconds=2.5)
    assert_ended(tmp_path)


def test_what_a_late_rank_was_doing_is_said_in_a_few_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = """
import faulthandler, time
faulthandler.dump_traceback_later(0.1, exit=True)
def waits_here(depth=0):
    time.sleep(60) if depth == 30 else waits_here(depth + 1)
waits_here()
"""
    monkeypatch.setattr(self_test, "_command", lambda *_: command(code, tmp_path))
    with pytest.raises(SelfTestError, match=r"rank 0 did not end within 50 s\n.*waits_here") as caught:
        self_test.self_test(time_limit_seconds=50)
    assert "code 1" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 8


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    """Alone it waits for the other; it ends by itself, though nobody ends it."""
    for time_limit_seconds in (2.0, 10.0, 50.0):  # a busy machine may not even import torch in the first
        done = subprocess.run(
            self_test._command(0, tmp_path, time_limit_seconds),
            env=self_test._environment(),
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert "Timeout" in done.stderr
        if "in _run_rank" in done.stderr:
            assert done.returncode == 1
            return
        # Python's faulthandler may crash at a stack that still moves, as it does in an import.
        assert done.returncode in (1, -signal.SIGSEGV)
    pytest.fail(f"it must say where it hung, but said: {done.stderr}")


def test_what_cannot_start_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_command", lambda *_: ["/nowhere/python"])
    check = doctor._self_test(5.0)
    assert check.status == "error" and "/nowhere/python" in check.detail


def test_without_gloo_the_self_test_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    check = doctor._self_test(5.0)
    assert check.status == "warning" and "no gloo" in check.detail


# --- what is installed -----------------------------------------------------------------------------------


@pytest.fixture
def requirements(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions by name, to be changed; hdet asks for torch, numpy and two extras."""
    versions = {"hdet": importlib.metadata.version("hdet"), "torch": "2.13.0+cpu", "numpy": "2.4.6"}
    lines = [
        "numpy>=1.24",
        "torch>=2.6",
        "wandb>=0.19; extra == 'wandb'",
        'rich>=13.7; extra == "cli"',
        "typer>=0.15; extra == 'cli'",
        "hdet[cli,wandb]; extra == 'dev'",
        "pytest==9.2.0; extra == 'dev'",
        "mlflow>=2.20; extra == 'mlflow'",
        "scipy>=1.11; extra == 'research'",
    ]

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    return versions


def test_extras(requirements: dict[str, str]) -> None:
    requirements |= {"wandb": "0.9.1", "rich": "14.0.0"}
    checks = checks_by_name()
    assert checks["extra wandb"] == Check(
        "extra wandb", "warning", "wandb 0.9.1 is older than 0.19", install_command("wandb")
    )
    assert checks["extra cli"] == Check(
        "extra cli", "ok", "rich 14.0.0, typer not installed", install_command("cli")
    )
    assert "extra dev" not in checks and "extra research" not in checks
    assert checks["other extras"] == Check(
        "other extras", "ok", "not installed: mlflow", f"only if you need one: {install_command('mlflow')}"
    )


def test_requirements(requirements: dict[str, str]) -> None:
    requirements["torch"] = "2.5.1"
    del requirements["numpy"]
    checks = checks_by_name()
    assert (
        checks["torch"].status == "error" and checks["torch"].remedy == "pip install --upgrade 'torch>=2.6'"
    )
    assert checks["numpy"] == Check("numpy", "error", "not installed", "pip install 'numpy>=1.24'")


def test_a_stale_installation(requirements: dict[str, str]) -> None:
    requirements["hdet"] = "0.0.9"
    assert checks_by_name()["hdet"].status == "warning"
    del requirements["hdet"]
    assert "not installed as a package" in checks_by_name()["hdet"].detail


# --- the machine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "status", "text"),
    [
        (None, "ok", "not set"),
        ("1", "ok", "is 1"),
        ("2,1", "ok", "is 2,1"),
        ("64", "warning", "more threads than cores"),
        ("many", "warning", "not a number"),
        ("0", "warning", "not a number"),
    ],
)
def test_cores(setting: str | None, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    check = doctor._cores()
    assert check.status == status and text in check.detail and check.detail.startswith("8 cores")


def test_devices_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_num_cuda_devices", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    check = doctor._backends()
    assert check.status == "warning" and "NCCL" in check.remedy


def test_a_device_that_torch_complains_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain() -> int:
        import warnings

        warnings.warn("the NVIDIA driver on your system is too old", stacklevel=1)
        return 0

    monkeypatch.setattr(doctor, "_num_cuda_devices", complain)
    check = doctor._devices()
    assert check.status == "warning" and "too old" in check.detail


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert checks_by_name(folder=tmp_path / "new" / "runs")["folder"].status == "ok"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    bad = checks_by_name(folder=tmp_path / "file" / "runs")["folder"]
    assert bad.status == "error" and "cannot be written to" in bad.detail
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 2**80)
    assert checks_by_name(folder=tmp_path)["folder"].status == "warning"


def test_what_cannot_be_examined_is_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Check]:
        raise RuntimeError("driver shut down")

    monkeypatch.setattr(doctor, "_devices", fail)
    check = checks_by_name()["devices"]
    assert check.status == "error" and "RuntimeError: driver shut down" in check.detail
