"""Checkpoints: whole or not there, checked before use, the one before where the newest is broken."""

import argparse
import errno
import os
import random
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from torch import nn

import hdet
from hdet.checkpoints import open_checkpoint
from tests.helpers.replicas import run_replicas


def parts(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model)
    return {"auto": auto, "optimizer": optimizer, "model": model}  # as wrong an order as can be


def train(made, num_steps):
    for _ in range(num_steps):
        loss = made["model"](torch.ones(4, 3)).square().mean()
        made["optimizer"].zero_grad()
        loss.backward()
        made["optimizer"].step()
        made["auto"].step(loss)


def save(folder, step, value=None, **settings):
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(step if value is None else value)
    return hdet.save_checkpoint(folder, step=step, model=model, note=f"of {step}", **settings)


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def load(folder):
    """The step and the weight."""
    model = nn.Linear(2, 1)
    found = hdet.load_checkpoint(folder, model=model)
    assert found.values == {"note": f"of {found.step}"}
    return found.step, model.weight[0, 0].item()


def test_a_training_goes_on_bit_for_bit(tmp_path):
    one = parts()
    train(one, 20)
    file = hdet.save_checkpoint(tmp_path, step=20, best=0.5, names=["a"], **one)
    train(one, 10)
    other = parts(seed=1)
    found = hdet.load_checkpoint(tmp_path, **other)
    assert (found.step, found.values, found.path) == (20, {"best": 0.5, "names": ["a"]}, file)
    train(other, 10)
    assert torch.equal(one["model"].weight, other["model"].weight)
    assert str(one["auto"].state_dict()) == str(other["auto"].state_dict())
    assert torch.load(file, weights_only=True)["step"] == 20  # readable without us


def test_the_last_ones_are_kept(tmp_path):
    for step in (5, 100, 1_000_000, 20_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-000100.pt", "step-1000000.pt", "step-20000000.pt"]
    save(tmp_path, 20_000_001, value=20_000_000, keep=1)
    assert names(tmp_path) == ["step-20000001.pt"]
    assert load(tmp_path) == (20_000_001, 20_000_000)


def test_nothing_to_load_is_none(tmp_path):
    assert hdet.load_checkpoint(tmp_path / "nowhere", model=nn.Linear(2, 1)) is None
    (tmp_path / "step-x.pt").touch()
    (tmp_path / "step-000100.pt.tmp").touch()
    assert hdet.load_checkpoint(tmp_path) is None


def test_a_file_is_loaded_or_it_is_an_error(tmp_path):
    file, _ = save(tmp_path, 100), save(tmp_path, 200)
    assert load(file) == (100, 100)
    other = file.rename(tmp_path / "best.pt")
    assert load(other) == (100, 100)
    other.write_bytes(other.read_bytes()[:-1])
    with pytest.raises(hdet.CheckpointError, match=r"best\.pt is broken"):
        load(other)


def test_no_link_at_the_place_of_an_unfinished_file_is_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("kept")
    for name in ("step-000100.pt", "step-000100.pt.tmp"):
        (tmp_path / name).symlink_to(mine)
    save(tmp_path, 100)
    assert mine.read_text() == "kept" and load(tmp_path) == (100, 100)
    (tmp_path / "step-000100.pt.0123456789abcdef.tmp").touch()  # of a process that was killed
    save(tmp_path, 200)
    assert names(tmp_path) == ["mine", "step-000100.pt", "step-000200.pt"]


def damaged(data, kind, generator):
    """The bytes of a file after an accident: one bit, or up to 64 bytes somewhere in it."""
    count = generator.randrange(1, 65)
    at, other = (generator.randrange(len(data) - count) for _ in range(2))
    end = at + count
    if kind == "flipped":
        return data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
    if kind == "swapped":
        changed = bytearray(data)
        changed[at:end], changed[other : other + count] = data[other : other + count], data[at:end]
        return bytes(changed)
    return {
        "cut": data[:at],
        "cut at the end": data[:-count],
        "left out": data[:at] + data[end:],
        "zeroed": data[:at] + bytes(count) + data[end:],
        "inserted": data[:at] + generator.randbytes(count) + data[at:],
        "appended": data + generator.randbytes(count),
        "zeros appended": data + bytes(count),
        "empty": b"",
        "x": b"GIF89a" + bytes(500),
    }[kind]


DAMAGE = ("flipped", "cut", "left out", "zeroed", "swapped", "inserted", "appended", "zeros appended")


@pytest.mark.parametrize("kind", ["flipped", "cut", "cut at the end", "empty", "x"])
def test_a_broken_one_is_skipped_and_named(tmp_path, kind):
    save(tmp_path, 100)
    newest = save(tmp_path, 200)
    newest.write_bytes(damaged(newest.read_bytes(), kind, random.Random(0)))
    with pytest.warns(hdet.HdetWarning, match=r"step-000200.pt is broken \(it.*: step-000100.pt is used"):
        assert load(tmp_path) == (100, 100)
    # The run goes on from 100 and saves before 200: what is broken does not stand in the way.
    save(tmp_path, 150)
    assert names(tmp_path) == ["step-000100.pt", "step-000150.pt"]
    assert load(tmp_path) == (150, 150)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_anywhere_in_the_file_is_noticed(tmp_path, kind):
    """Most of so small a file is headers and padding, which the sums of a zip archive do not cover."""
    file = save(tmp_path, 100)
    data, generator = file.read_bytes(), random.Random(kind)
    num_tried = 0
    while num_tried < 15:
        changed = damaged(data, kind, generator)
        if changed != data:  # what is zero may be zeroed, and what is equal swapped
            num_tried += 1
            file.write_bytes(changed)
            with pytest.raises(hdet.CheckpointError, match="checksum is wrong"):
                open_checkpoint(tmp_path)


def test_other_programs_can_read_it(tmp_path):
    file = save(tmp_path, 100)
    assert zipfile.ZipFile(file).testzip() is None
    assert torch.load(file, weights_only=True, mmap=True)["step"] == 100


def test_a_plain_file_of_torch_is_not_taken_for_a_checkpoint(tmp_path):
    torch.save({"step": 3}, tmp_path / "step-000003.pt")
    with pytest.raises(
        hdet.CheckpointError, match=r"step-000003.pt is broken \(its checksum is wrong.*no sound"
    ):
        hdet.load_checkpoint(tmp_path)


def test_all_broken_is_an_error_that_names_them(tmp_path):
    for step in (1, 2):
        save(tmp_path, step).write_bytes(b"")
    with pytest.raises(hdet.CheckpointError, match=r"step-000002.pt is broken .*step-000001.pt is broken"):
        hdet.load_checkpoint(tmp_path)


def test_a_full_disk_leaves_the_old_ones_and_no_part(tmp_path, monkeypatch):
    before = save(tmp_path, 100).read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot be written \(No space left on device\), and those before"):
        save(tmp_path, 200)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 100, value=7)
    assert names(tmp_path) == ["step-000100.pt"]
    assert (tmp_path / "step-000100.pt").read_bytes() == before


def test_a_limit_of_the_file_size_is_met_while_writing(tmp_path):
    script = """
import resource, sys, torch, hdet
hdet.save_checkpoint(sys.argv[1], step=1, x=torch.zeros(10))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    hdet.save_checkpoint(sys.argv[1], step=2, x=torch.zeros(1_000_000))
except OSError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "cannot be written (File too large)" in done.stdout
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == ["step-000001.pt"]


def test_a_folder_that_has_got_further_is_refused(tmp_path):
    save(tmp_path, 200)
    with pytest.raises(hdet.CheckpointError, match=r"later than step 100, got .*step-000200.pt: load it"):
        save(tmp_path, 100)
    assert names(tmp_path) == ["step-000200.pt"]


def test_what_could_not_be_loaded_again_is_not_written(tmp_path):
    with pytest.raises(TypeError, match=r"args must hold tensors, numbers, .* got .*"):
        hdet.save_checkpoint(tmp_path, step=1, model=nn.Linear(1, 1), args=argparse.Namespace(a=1))
    assert not names(tmp_path)


def test_nothing_is_loaded_where_a_part_is_missing(tmp_path):
    save(tmp_path, 1)
    model = nn.Linear(2, 1)
    before = model.weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hdet.CheckpointError, match=r"must hold a part 'optimizer', got \['model'\]"):
        hdet.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match="note must have load_state_dict, got 3 of type int"):
        hdet.load_checkpoint(tmp_path, model=model, note=3)
    assert torch.equal(model.weight, before)
    with pytest.raises(
        hdet.CheckpointError,
        match=r"model cannot be loaded from .*step-000001.pt: .*weight \(\[1, 2\] in the file, \[1, 5\]",
    ):
        hdet.load_checkpoint(tmp_path, model=nn.Linear(5, 1))


def test_arguments_are_checked(tmp_path):
    for settings, message in (
        ({"step": -1, "x": 1}, "step must be an integer of at least 0, got -1"),
        ({"step": 1, "keep": 0, "x": 1}, "keep must be an integer of at least 1, got 0"),
        ({"step": 1}, "parts must hold something to save, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            hdet.save_checkpoint(tmp_path / "a", **settings)
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"path must be a folder, got .*, which is a file"):
        hdet.save_checkpoint(tmp_path / "file", step=1, x=1)


def _rank(rank, folder, own):
    warnings.simplefilter("ignore")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    if rank == 0:  # the other is not waited for
        hdet.save_checkpoint(folder, step=3, model=model)
    hdet.save_checkpoint(folder, step=4, model=model, rank=rank)
    torch.distributed.barrier()
    found = hdet.load_checkpoint(folder, model=model)
    try:
        open_checkpoint(folder if rank == 0 else own)
    except hdet.CheckpointError as error:
        return found.step, found.values, str(error)
    return None


def test_rank_zero_writes_and_all_find_the_same(tmp_path):
    results = run_replicas(_rank, 2, tmp_path / "a", tmp_path / "b")
    assert results[0] == results[1]
    assert results[0][:2] == (4, {"rank": 0})
    assert "got rank 0: step 4, rank 1: none: give a folder that all ranks share" in results[0][2]
    alone = nn.Linear(1, 1)
    assert hdet.load_checkpoint(tmp_path / "a", model=alone).step == 4


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("model", r"model cannot be loaded .*weight \(\[2, 3\] in the file, \[4, 3\] in the model\)"),
        ("optimizer", r"optimizer cannot be loaded .*groups of \[2\] parameters as in the file, got \[1\]"),
        ("auto", "auto cannot be loaded .*version"),
    ],
)
def test_a_part_that_does_not_fit_leaves_the_others_as_they_are(tmp_path, bad, words):
    saved = parts(seed=1)
    train(saved, 3)
    states = {**saved}
    if bad == "auto":
        state = {**saved["auto"].state_dict(), "version": 0}
        states["auto"] = type("Old", (), {"state_dict": lambda _: state, "load_state_dict": print})()
    hdet.save_checkpoint(tmp_path, step=3, **states)
    made = parts(seed=2)
    given = {**made}
    if bad == "model":
        given["model"] = nn.Linear(3, 4)
    elif bad == "optimizer":
        given["optimizer"] = torch.optim.AdamW([made["model"].weight], lr=0.1)
    before = [p.clone() for p in given["model"].parameters()]
    with pytest.raises(hdet.CheckpointError, match=words):
        hdet.load_checkpoint(tmp_path, **given)
    assert all(torch.equal(a, b) for a, b in zip(before, given["model"].parameters(), strict=True))
    assert not made["optimizer"].state and made["auto"].num_steps == 0
