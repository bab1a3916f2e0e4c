"""Check whether this machine is ready: versions, cores, backends, devices, extras, disk, and a self-test."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

import hdet
from hdet.errors import install_command
from hdet.lab.self_test import SelfTestError, self_test

LOW_DISK_BYTES = 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str
    """Tells what was found."""
    remedy: str = ""
    """Tells what to do about it, or for more where it is optional."""


def examine(
    folder: str | Path = ".", *, with_self_test: bool = True, time_limit_seconds: float = 120.0
) -> list[Check]:
    """Look at everything that a run depends on. Never raises: what goes wrong is a check too.

    Args:
        folder: where runs are to be written; it need not exist yet.
        with_self_test: train on two real processes, some seconds; see
            :func:`hdet.lab.self_test.self_test`.
        time_limit_seconds: for the self-test.

    >>> [check.name for check in examine(with_self_test=False)][:4]
    ['python', 'hdet', 'torch', 'numpy']
    """
    looks: dict[str, Callable[[], Check | list[Check]]] = {
        "python": _python,
        "hdet": _hdet,
        "torch": lambda: _required("torch"),
        "numpy": lambda: _required("numpy"),
        "cores": _cores,
        "backends": _backends,
        "devices": _devices,
        "extras": _extras,
        "folder": lambda: _folder(Path(folder)),
    }
    if with_self_test:
        looks["self-test"] = lambda: _self_test(time_limit_seconds)
    checks: list[Check] = []
    for name, look in looks.items():
        try:
            found = look()
        except Exception as error:
            found = Check(name, "error", f"could not be examined: {type(error).__name__}: {error}")
        checks += found if isinstance(found, list) else [found]
    return checks


# --- what is installed -----------------------------------------------------------------------------------


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Check("python", "ok", detail)  # one that is too old could not run this


def _hdet() -> Check:
    detail, installed = f"{hdet.__version__} at {Path(hdet.__file__).parent}", _version("hdet")
    if installed is None:
        detail += ", not installed as a package: its requirements cannot be examined"
        return Check("hdet", "warning", detail, "pip install hdet, or pip install -e . in its folder")
    if installed != hdet.__version__:
        detail += f", but {installed} is what pip installed"
        return Check("hdet", "warning", detail, "install it again: pip install --force-reinstall hdet")
    return Check("hdet", "ok", detail)


def _required(name: str) -> Check:
    need = next((need for need in _needs() if (need.name, need.extra) == (name, "")), _Need(name, "", ""))
    if need.version is None:
        return Check(name, "error", "not installed", f"pip install '{name}>={need.least}'")
    if need.is_old:
        detail = f"{need.version}, but hdet needs {need.least} or later"
        return Check(name, "error", detail, f"pip install --upgrade '{name}>={need.least}'")
    return Check(name, "ok", need.version)


_FOR_DEVELOPERS = ("dev", "docs", "examples", "research", "zoo")
"""Extras that a user of the library does not need."""


def _extras() -> list[Check]:
    """Make one check per extra, and one for all that are absent. Nothing is imported."""
    by_extra: dict[str, list[_Need]] = {}
    for need in _needs():
        if need.extra not in ("", *_FOR_DEVELOPERS) and need.name != "hdet":
            by_extra.setdefault(need.extra, []).append(need)
    checks, absent = [], []
    for extra, needs in by_extra.items():
        if not any(need.version for need in needs):
            absent.append(extra)
            continue
        found = [
            f"{need.name} {need.version or 'not installed'}" + f" is older than {need.least}" * need.is_old
            for need in needs
        ]
        is_old = any(need.is_old for need in needs)
        remedy = install_command(extra) if is_old or not all(need.version for need in needs) else ""
        checks.append(Check(f"extra {extra}", "warning" if is_old else "ok", ", ".join(found), remedy))
    if absent:
        remedy = f"only if you need one: {install_command(absent[0])}"
        checks.append(Check("other extras", "ok", f"not installed: {', '.join(absent)}", remedy))
    return checks


class _Need(NamedTuple):
    name: str
    least: str
    extra: str

    @property
    def version(self) -> str | None:
        return _version(self.name)

    @property
    def is_old(self) -> bool:
        return self.version is not None and _numbers(self.version) < _numbers(self.least)


def _needs() -> list[_Need]:
    """Read what hdet's own metadata ask for; the one list of requirements is pyproject.toml."""
    lines = importlib.metadata.requires("hdet") if _version("hdet") else None
    pattern = r"([\w.-]+)[^;>]*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([^'\"]+))?"
    found = [re.match(pattern, line) for line in lines or []]
    return [_Need(*need.groups("")) for need in found if need is not None]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Read the numbers of a release.

    >>> _numbers("2.13.0+cpu"), _numbers("3.0rc1")
    ((2, 13, 0), (3, 0))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


# --- the machine -----------------------------------------------------------------------------------------


def _cores() -> Check:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    shown = f"{num_cores} cores for this process, OMP_NUM_THREADS "
    remedy = "export OMP_NUM_THREADS=1, or cores over replicas where several share this machine"
    if setting is None:
        # torchrun sets it to 1 where it is not set.
        shown += f"not set: processes use {torch.get_num_threads()} threads each unless torchrun starts them"
        return Check("cores", "ok", shown, remedy if num_cores > 1 else "")
    count = re.fullmatch(r"\s*(\d+)(\s*,\s*\d+)*\s*", setting)
    if count is None or int(count[1]) < 1:
        return Check("cores", "warning", shown + f"is {setting!r}, which is not a number of threads", remedy)
    if int(count[1]) > num_cores:
        return Check("cores", "warning", shown + f"is {setting}, more threads than cores", remedy)
    return Check("cores", "ok", shown + f"is {setting}")


def _backends() -> Check:
    if not dist.is_available():
        remedy = "install a torch with torch.distributed; virtual replicas work without it"
        return Check("backends", "error", "this torch has no torch.distributed", remedy)
    available = {name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi")}
    detail = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in available.items())
    if not any(available.values()):
        return Check("backends", "error", detail, "install a torch with gloo or nccl")
    if _num_cuda_devices() and not available["nccl"]:
        remedy = "install a torch with NCCL: without it, CUDA tensors travel by way of the CPU"
        return Check("backends", "warning", detail, remedy)
    return Check("backends", "ok", detail)


def _devices() -> Check:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_cuda = _num_cuda_devices()
        names = sorted({torch.cuda.get_device_name(i) for i in range(num_cuda)})
    cuda = f"cuda {num_cuda}" + (f" ({', '.join(names)})" if names else "")
    detail = f"{cuda}, mps {int(torch.backends.mps.is_available())}, cpu 1"
    if caught:  # such as a driver that is too old
        detail += "; torch says: " + "; ".join(str(warning.message) for warning in caught)
        return Check("devices", "warning", detail, "update the driver, or install the torch that fits it")
    return Check("devices", "ok", detail)


def _num_cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _folder(folder: Path) -> Check:
    shown = folder.absolute()
    # One that does not exist yet is judged by where it would be made.
    folder = next(path for path in (shown, *shown.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"hdet")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        detail = f"{shown} cannot be written to: {error.strerror or error}"
        return Check("folder", "error", detail, "choose another folder, or make this one writable")
    num_free = shutil.disk_usage(folder).free
    detail = f"{shown} can be written to, {num_free / 2**30:.1f} GiB free"
    if num_free < LOW_DISK_BYTES:
        return Check("folder", "warning", detail, "make room: checkpoints and records go here")
    return Check("folder", "ok", detail)


def _self_test(time_limit_seconds: float) -> Check:
    name = "self-test"
    if not (dist.is_available() and dist.is_gloo_available()):
        return Check(name, "warning", "left out: this torch has no gloo", "install a torch with gloo")
    try:
        seen = self_test(time_limit_seconds=time_limit_seconds)
    except (SelfTestError, OSError) as error:
        remedy = (
            "see that processes of this machine may talk over loopback (a firewall, a container), that "
            f"{tempfile.gettempdir()} is on a local disk, and that the machine is not overloaded. "
            "Again, alone: python -m hdet.lab.self_test"
        )
        return Check(name, "error", f"two processes could not train together: {error}", remedy)
    return Check(
        name,
        "ok",
        "two gloo processes: parameters differ before every sync and agree after it; "
        f"start {seen.startup_seconds:.1f} s, "
        f"all-reduce of 1 float {seen.all_reduce_one_milliseconds:.2f} ms, "
        f"of 1 M floats {seen.all_reduce_million_milliseconds:.1f} ms "
        f"({seen.bandwidth_bytes_per_second / 1e9:.2f} GB/s), "
        f"converge of 1 M parameters {seen.converge_milliseconds:.1f} ms; "
        f"a short run raised a learning rate that was too low by x{seen.found_factor:.0f}",
    )
