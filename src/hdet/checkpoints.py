"""Checkpoints of a training: written whole or not at all, checked before anything of them is used."""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet.checks import require_count, require_kind, require_path
from hdet.errors import CheckpointError, bad_argument, warn
from hdet.records import replacing
from hdet.replicas.exchange import exchange
from hdet.replicas.group import ReplicaGroup

_KIND = "hdet checkpoint"
_SOUND = 0x2144DF1C
"""The CRC-32 of whatever ends with its own CRC-32."""
_CHUNK = 2**20


@dataclass(frozen=True)
class Checkpoint:
    """Holds what :func:`load_checkpoint` has loaded."""

    step: int
    """Optimizer steps that the run had made."""
    values: dict[str, Any]
    """The plain values that were saved."""
    path: Path
    """The file."""
    skipped: list[str] = field(default_factory=list)
    """The newer files that are broken, each with the reason."""
    states: dict[str, Any] = field(default_factory=dict, repr=False)
    """The parts have saved these, by name."""
    checksum: int = field(default=0, repr=False)

    def load_into(self, **parts: Any) -> None:
        """Load the parts: first modules, then optimizers, then the rest in the order given.

        Before that, what does not fit is refused.
        """
        for name, part in parts.items():
            is_loaded = callable(getattr(part, "load_state_dict", None))
            remedy = "plain values are returned, leave it out here"
            require_kind(f"{name} must have load_state_dict", part, is_loaded, remedy)
            if name not in self.states:
                raise CheckpointError(
                    f"{self.path} must hold a part {name!r}, got {sorted(self.states)}: load the parts that "
                    "were saved, under the same names"
                )

        def is_later(name: str) -> tuple[bool, bool]:
            return not isinstance(parts[name], nn.Module), not isinstance(parts[name], Optimizer)

        name = ""
        try:
            for act in (_require_fit, lambda part, state: part.load_state_dict(state)):
                for name in sorted(parts, key=is_later):
                    act(_inner(parts[name]), self.states[name])
        except Exception as error:
            raise CheckpointError(f"{name} cannot be loaded from {self.path}: {_words(error)}") from error


def save_checkpoint(path: str | Path, /, *, step: int, keep: int = 3, **parts: Any) -> Path:
    """Save parts of a training in a folder, and keep the last few checkpoints.

    The file is ``step-000100.pt`` for step 100. It is written under another name, and renamed once it is on
    disk, so that a crash or a full disk leaves the ones before as they are. It ends with its CRC-32, and
    ``torch.load(file, weights_only=True)`` reads it.

    Call it on every rank, after ``converge()``. Rank zero writes, and the others return at once.

    Args:
        path: the folder, of one run.
        step: optimizer steps so far.
        keep: how many checkpoints stay. Older ones are deleted.
        **parts: objects with ``state_dict`` and ``load_state_dict`` (a model, an optimizer, an
            :class:`hdet.AutoLR`, a gradient scaler), and plain values: numbers, texts, tensors, and lists and
            dictionaries of them.

    Returns:
        The file.

    >>> import tempfile
    >>> model = nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_checkpoint(folder, step=100, model=model, best_loss=0.5)
    ...     found = load_checkpoint(folder, model=model)
    >>> file.name, found.step, found.values
    ('step-000100.pt', 100, {'best_loss': 0.5})
    """
    require_count("step", step, at_least=0)
    require_count("keep", keep)
    if not parts:
        remedy = "pass model=model, optimizer=optimizer"
        raise bad_argument("parts", "must hold something to save", "none", remedy)
    folder = require_path("path", path)
    if folder.exists() and not folder.is_dir():
        got = f"{str(path)!r}, which is a file"
        raise bad_argument("path", "must be a folder", got, "give another one")
    target = folder / f"step-{step:06d}.pt"
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return target
    states = {name: _inner(part).state_dict() for name, part in parts.items() if _is_stateful(part)}
    values = {name: part for name, part in parts.items() if not _is_stateful(part)}
    folder.mkdir(parents=True, exist_ok=True)
    _require_none_later(folder, step)
    _write(target, {"kind": _KIND, "step": step, "states": states, "values": values})
    for _, file in _files(folder)[:-keep]:
        file.unlink()
    for file in folder.glob("step-*.pt*.tmp"):  # of a process that was killed
        file.unlink()
    return target


def load_checkpoint(path: str | Path, /, **parts: Any) -> Checkpoint | None:
    """Load the newest sound checkpoint of a folder, or the one in a file.

    The file is read and checked before anything is loaded into a part. A file that is broken is skipped with
    a warning, and the one before it is used. Tensors come to the CPU, from where parts take them. Call it on
    every rank: all must find the same file.

    Args:
        path: the folder that :func:`save_checkpoint` was given, or a file that it has returned.
        **parts: what to load, under the names that they were saved with. Parts of the file that are not named
            are left out.

    Returns:
        The step, and the plain values; None if the folder has no checkpoint, or is not there.

    Raises:
        CheckpointError: there are checkpoints and all are broken, a part is missing or refuses its state, or
            ranks find different files.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint is None:
        return None
    for reason in checkpoint.skipped:
        warn(f"{reason}: {checkpoint.path.name} is used")
    checkpoint.load_into(**parts)
    return checkpoint


def open_checkpoint(path: str | Path) -> Checkpoint | None:
    """Read and check the newest sound checkpoint, without loading it anywhere; None if there is none."""
    broken: list[str] = []
    found = None
    for _, file in reversed(_files(require_path("path", path))):
        try:
            found = _read(file, broken)
            break
        except (CheckpointError, OSError) as error:
            broken.append(f"{file} is broken ({_words(error)})")
    _require_same_file(found, has_broken=bool(broken))
    if found is None and broken:
        raise CheckpointError(
            f"{'; '.join(broken)}. There is no sound checkpoint in {str(path)!r}: begin the run again in "
            "another folder"
        )
    return found


def _require_same_file(found: Checkpoint | None, *, has_broken: bool) -> None:
    """Raise on every rank alike if they have found different files."""
    mine = [found.step, float(found.checksum)] if found is not None else [-1.0 - has_broken, 0.0]
    seen = exchange(ReplicaGroup.of(None), mine, "load_checkpoint")
    if any(row != seen[0] for row in seen):
        words = {-1: "none", -2: "broken ones only"}
        each = ", ".join(f"rank {r}: {words.get(int(s), f'step {s:.0f}')}" for r, (s, _) in enumerate(seen))
        raise CheckpointError(
            f"every rank must find the same checkpoint, got {each}: give a folder that all ranks share"
        )


# --- one file --------------------------------------------------------------------------------------------


def _write(target: Path, content: dict[str, Any]) -> None:
    """Write the file whole, or leave things as they were."""
    try:
        with replacing(target) as file:
            summed = _Summed(file)
            with _naming_the_part(content):
                torch.save(content, summed)  # pyright: ignore[reportArgumentType]
            summed.write(summed.checksum.to_bytes(4, "little"))  # readers of a zip archive pass over it
            if summed.error is not None:
                raise summed.error
            file.flush()
            os.fsync(file.fileno())
            with _naming_the_part(content):
                torch.load(Path(file.name), map_location="cpu", weights_only=True, mmap=True)
        _sync_folder(target.parent)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the checkpoint cannot be written ({error.strerror}), and those before it are as they were: "
            "free some space, or give another folder",
            str(target),
        ) from error


class _Summed:
    """A file that torch writes to. It sums up what is written, and keeps an error until torch is done."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.checksum = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:  # torch would turn it into an error without a cause
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Torch asks for it."""


def _read(file: Path, skipped: list[str]) -> Checkpoint:
    with file.open("rb") as opened:
        checksum = _verify(opened)
        opened.seek(0)
        try:
            content = torch.load(opened, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"torch cannot load it: {_words(error)}") from error
    if not isinstance(content, Mapping) or content.get("kind") != _KIND:
        raise CheckpointError("hdet.save_checkpoint has not written it")
    return Checkpoint(content["step"], content["values"], file, list(skipped), content["states"], checksum)


def _verify(file: BinaryIO) -> int:
    """Raise unless the file is as it was written; return the checksum that it ends with."""
    found = 0
    while chunk := file.read(_CHUNK):
        found = zlib.crc32(chunk, found)
    if found != _SOUND:
        raise CheckpointError(
            "its checksum is wrong: it was cut short or changed, or hdet.save_checkpoint did not write it"
        )
    file.seek(-4, os.SEEK_END)
    return int.from_bytes(file.read(), "little")


@contextmanager
def _naming_the_part(content: dict[str, Any]) -> Iterator[None]:
    """Name the part that cannot be written, or not be loaded again."""
    try:
        yield
    except Exception as error:
        for name, part in {**content["states"], **content["values"]}.items():
            if not _is_plain(part):
                raise TypeError(
                    f"{name} must hold tensors, numbers, texts, and lists and dictionaries of them, got "
                    f"{_words(error)}"
                ) from error
        raise


def _is_plain(value: Any) -> bool:
    memory = io.BytesIO()
    try:
        torch.save(value, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except Exception:
        return False
    return True


# --- the folder ------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[tuple[int, Path]]:
    """List the steps of a folder's checkpoints and their files, by step. A file is its own."""
    if folder.is_file():
        return [(0, folder)]
    found = [(re.fullmatch(r"step-(\d+)\.pt", file.name), file) for file in folder.glob("step-*.pt")]
    return sorted((int(match[1]), file) for match, file in found if match)


def _require_none_later(folder: Path, step: int) -> None:
    """Raise where the folder has got further. Such checkpoints would be loaded in place of this one."""
    for file_step, file in _files(folder):
        if file_step > step:
            try:
                with file.open("rb") as opened:
                    _verify(opened)
            except CheckpointError:
                file.unlink()  # a run has gone back, because this one is broken
            else:
                raise CheckpointError(
                    f"path must be a folder without checkpoints later than step {step}, got {file}: load it "
                    "and go on, delete it, or give each run a folder of its own"
                )


def _sync_folder(folder: Path) -> None:
    """Put the folder on disk, and the new name with it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- parts -----------------------------------------------------------------------------------------------


def _is_stateful(part: Any) -> bool:
    has_both = all(callable(getattr(part, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_both and not isinstance(part, type)


def _require_fit(part: Any, state: Any) -> None:
    """Raise where a part would refuse its state, as far as that can be told before any part is loaded."""
    if hasattr(part, "check_state_dict"):
        part.check_state_dict(state)
    elif isinstance(part, Optimizer):
        ours, theirs = (
            [len(g["params"]) for g in groups] for groups in (part.param_groups, state["param_groups"])
        )
        if ours != theirs:
            raise ValueError(
                f"the optimizer must have groups of {theirs} parameters as in the file, got {ours}"
            )
    elif isinstance(part, nn.Module):
        # A module with hooks may change what it is given before it takes it.
        if any(module._load_state_dict_pre_hooks for module in part.modules()):  # noqa: SLF001
            return
        ours, theirs = _shapes(part.state_dict()), _shapes(state)
        differ = [
            f"{name} ({theirs.get(name, 'nothing')} in the file, {ours.get(name, 'nothing')} in the model)"
            for name in {**theirs, **ours}
            if theirs.get(name) != ours.get(name)
        ]
        if differ:
            raise ValueError(
                f"the model must be the one that was saved, but these differ: {', '.join(differ[:5])}"
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(getattr(value, "shape", ())) for name, value in state.items()}


def _inner(part: Any) -> Any:
    """Take the model itself, so that the file fits one process and many."""
    return part.module if isinstance(part, DistributedDataParallel) else part


def _words(error: BaseException) -> str:
    """Tell an error in one line; its kind where it says nothing."""
    return " ".join(str(error).split())[:400] or type(error).__name__
