"""Where the zoo keeps what it prepares: data taken from packages, and checkpoints to fine-tune from."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hdet.errors import HdetError

__all__ = ["cache_folder", "debian_files", "prepared"]


def cache_folder() -> Path:
    """The folder of the zoo: ``HDET_ZOO_CACHE``, or ``hdet-zoo`` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hdet-zoo"
    folder = Path(os.environ.get("HDET_ZOO_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepared(name: str, build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors that take long to make: built once, then read from the cache.

    Args:
        name: of the file; give it a new one when ``build`` changes.
        build: makes them, the same ones on every machine that has the same packages.
    """
    path = cache_folder() / f"{name}.pt"
    if not path.exists():
        tensors = build()
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            torch.save(tensors, file)
        Path(file.name).replace(path)  # whole or not at all
    return torch.load(path, weights_only=True)


def debian_files(package: str) -> Path:
    """The files of a Debian package, unpacked in the cache; nothing is installed."""
    folder = cache_folder() / "debian" / package
    if folder.exists():
        return folder
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise HdetError(
            f"the zoo takes data from Debian's package {package!r}, which needs apt-get and dpkg-deb: run "
            "it on Debian or Ubuntu"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = ["apt-get", "download", package]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        archives = list(Path(scratch).glob("*.deb"))
        if done.returncode or not archives:
            raise HdetError(
                f"Debian's package {package!r} cannot be had: {done.stderr.strip()}. Try: apt-get update"
            )
        unpacked = Path(scratch) / "files"
        subprocess.run(["dpkg-deb", "-x", str(archives[0]), str(unpacked)], check=True)
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder
