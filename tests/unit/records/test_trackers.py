"""What trackers show is what the records hold, read back through each library's own reader."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet import HdetError, HdetWarning, Records, RoundRecord
from hdet.records import Tee
from hdet.round_record import ComparingRecord, GuardRecord, ThermostatRecord, WeightDecayRecord, scalars
from hdet.trackers import TensorBoardSink, Tracker, WandbSink


def record(step: int = 10, **more: Any) -> RoundRecord:
    return RoundRecord(round=step // 10 - 1, step=step, num_replicas=2, **more)


def virtual_run(sink: Any) -> list[RoundRecord]:
    """Three rounds of a real run, with a probe and a controller; returns the records that it wrote."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    records = Records()
    ensemble = hdet.VirtualEnsemble(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda m, x: (m(x) - x.sum(dim=-1, keepdim=True)).square().mean(),
        num_replicas=4,
        sync_every=5,
        explore=[hdet.LearningRate(spread=0.5)],
        controllers=[hdet.Controller(form="log")],
        probe=hdet.Probe([torch.ones(2, 3)], lambda m, x: m(x).square().mean()),
        records=Tee(records, sink),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(15):
        ensemble.step(batches=[torch.randn(8, 3, generator=generator) for _ in range(4)])
    return list(records)


EVALUATION = {"evaluation/loss": 0.1 + 0.2, "evaluation/accuracy": 0.75}


def expected_series(records: list[RoundRecord]) -> dict[str, list[tuple[int, float]]]:
    """By name, the steps and values that a tracker must hold."""
    series: dict[str, list[tuple[int, float]]] = {}
    for each in records:
        for name, value in scalars(each).items():
            series.setdefault(name, []).append((each.step, value))
    for name, value in EVALUATION.items():
        series[name] = [(records[-1].step, value)]
    return series


# --- what is shown ---------------------------------------------------------------------------------------


def test_scalars_by_hand() -> None:
    shown = scalars(
        record(
            losses=[1.0, 2.0],
            probes=[0.5, None],
            num_nonfinite_losses=[0, 3],
            excluded={1: "the loss on the probe is not finite"},
            controllers={
                "comparing": ComparingRecord(
                    weights=[0.75, 0.25],
                    temperature=0.1,
                    signal={"lr.head": -0.5},
                    velocity={"lr.head": -0.05},
                ),
                "guard": GuardRecord(num_brakes=1),
                "weight_decay": WeightDecayRecord(held_out_loss=0.7, slope=-0.25, slope_error=0.1),
                "thermostat": ThermostatRecord(
                    averaging_gains=[None, 0.5], time_gains=[None], factors=[1, 2.0]
                ),
            },
            base={"lr.head": 0.1},
            correction={"lr.head": 1.25},
            milliseconds={"converge": 2.5},
        )
    )
    assert shown == {
        "loss/mean": 1.5,
        "loss/replica_0": 1.0,
        "loss/replica_1": 2.0,
        "probe/mean": 0.5,
        "probe/replica_0": 0.5,
        "weight/replica_0": 0.75,
        "weight/replica_1": 0.25,
        "base/lr.head": 0.1,
        "signal/lr.head": -0.5,
        "velocity/lr.head": -0.05,
        "correction/lr.head": 1.25,
        "milliseconds/converge": 2.5,
        "controller/temperature": 0.1,
        "guard/num_brakes": 1.0,
        "held_out/loss": 0.7,
        "slope/weight_decay": -0.25,
        "thermostat/averaging_gains": 0.5,
        "thermostat/factors": 2.0,
        "replicas/excluded": 1.0,
        "nonfinite/total": 3.0,
        "nonfinite/replica_0": 0.0,
        "nonfinite/replica_1": 3.0,
    }
    assert all(type(value) is float for value in shown.values())


def test_scalars_leave_out_what_is_not_finite() -> None:
    shown = scalars(record(losses=[None, None], base={"lr": float("inf")}))
    assert shown == {"replicas/excluded": 0.0}


# --- each library's own reader ---------------------------------------------------------------------------


def test_tensorboard_reads_the_run(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "new" / "events")
    records = virtual_run(sink)
    sink.write_metrics(records[-1].step, EVALUATION)
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "new" / "events"), size_guidance={"scalars": 0})
    reader.Reload()
    expected = expected_series(records)
    assert set(reader.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        single = [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in points]
        assert [(point.step, point.value) for point in reader.Scalars(name)] == single


def test_tensorboard_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(record(losses=[1.0, 2.0]))
    (path,) = tmp_path.iterdir()
    assert b"loss/replica_1" in path.read_bytes()
    sink.close()


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for W&B; nothing is sent, and its process has ended when the test has."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield tmp_path / "here"
    import wandb

    wandb.teardown()
    assert not _processes_named(b"wandb-core")


def _processes_named(name: bytes) -> list[str]:
    """Children of this process whose command line has this name."""

    def is_ours(path: Path) -> bool:
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            return parent == os.getpid() and name in path.joinpath("cmdline").read_bytes()
        except OSError:
            return False  # it ended meanwhile

    return [path.name for path in Path("/proc").glob("[0-9]*") if is_ours(path)]


@pytest.mark.timeout(60)
def test_wandb_reads_the_run(wandb_offline: Path) -> None:
    sink = WandbSink("a-project", name="a-run", config={"lr": 0.1}, folder=wandb_offline)
    records = virtual_run(sink)
    sink.write_metrics(records[-1].step, EVALUATION)
    sink.write(records[0])  # back at a checkpoint: kept too
    sink.close()
    (path,) = wandb_offline.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # on a busy machine W&B's own process writes the file a little later
    while len((scanned := _scan_wandb(path))[1]) < len(records) + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    runs, rows = scanned
    assert [(run.project, run.display_name) for run in runs] == [("a-project", "a-run")]
    assert {item.key: json.loads(item.value_json) for item in runs[0].config.update}["lr"] == 0.1
    expected = [{"step": each.step, **scalars(each)} for each in records]
    expected += [{"step": records[-1].step, **EVALUATION}, {"step": records[0].step, **scalars(records[0])}]
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows] == expected


def _scan_wandb(path: Path) -> tuple[list[Any], list[dict[str, float]]]:
    """The runs and the rows of W&B's file: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    content, position, message = path.read_bytes(), 7, b""
    runs, rows = [], []
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:  # what is left of a block is too short for a header
            position += 2**15 - position % 2**15
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        message += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            entry = wandb_internal_pb2.Record.FromString(message)
            message = b""
            if entry.WhichOneof("record_type") == "run":
                runs.append(entry.run)
            elif entry.WhichOneof("record_type") == "history":
                rows.append({_key(item): json.loads(item.value_json) for item in entry.history.item})
    return runs, rows


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def test_wandb_stays_offline_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert WandbSink().mode == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "not a real one")
    assert WandbSink().mode == "online"
    assert WandbSink(mode="offline").mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert WandbSink().mode == "disabled"
    with pytest.raises(ValueError, match="mode must be one of 'online', 'offline'"):
        WandbSink(mode="on")  # pyright: ignore[reportArgumentType]


# --- what can go wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("library", "make"),
    [("tensorboard", lambda: TensorBoardSink(".")), ("wandb", WandbSink)],
)
def test_a_missing_library_names_the_command(
    library: str, make: Callable[[], Tracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(HdetError, match=rf"pip install .*\[{library}\]'"):
        make()


def test_a_sink_that_is_never_written_to_leaves_nothing(tmp_path: Path) -> None:
    """A sink may be made on every rank; only replica zero's writes."""
    for sink in (
        TensorBoardSink(tmp_path / "events"),
        WandbSink(folder=tmp_path / "wandb"),
    ):
        sink.close()
    assert list(tmp_path.iterdir()) == []


class Failing(Tracker):
    def __init__(self, at_step: int) -> None:
        super().__init__()
        self.at_step, self.seen, self.num_finished = at_step, [], 0

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.seen.append(step)
        if step == self.at_step:
            raise OSError("no space left on device")

    def finish(self) -> None:
        self.num_finished += 1


def test_a_failing_tracker_warns_once_and_is_dropped() -> None:
    failing, healthy, records = Failing(at_step=20), Failing(at_step=-1), Records()
    tee = Tee(failing, records, healthy)
    tee.write(record(10))
    with pytest.warns(HdetWarning, match="Failing failed.*OSError: no space left on device") as caught:
        tee.write(record(20))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tee.write(record(30))
        tee.write_metrics(30, {"loss": 1.0})
        tee.close()
    assert (failing.seen, failing.num_finished) == ([10, 20], 1)
    assert (healthy.seen, healthy.num_finished) == ([10, 20, 30, 30], 1)
    assert [each.step for each in records] == [10, 20, 30]


def test_a_failing_tracker_does_not_end_a_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(HdetWarning, match="TensorBoardSink failed") as caught:
        records = virtual_run(TensorBoardSink(tmp_path / "file"))
    assert len(caught) == 1
    assert [each.step for each in records] == [5, 10, 15]


def test_a_sink_of_ones_own_still_raises() -> None:
    class Own:
        def write(self, record: RoundRecord) -> None:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        Tee(Failing(at_step=-1), Own()).write(record(10))


def test_tee_takes_sinks_only() -> None:
    with pytest.raises(TypeError, match=r"sinks must have a write\(record\) method"):
        Tee(Records(), 3)  # pyright: ignore[reportArgumentType]


def test_imports_wait_for_the_first_record() -> None:
    code = """
import sys
from hdet import TensorBoardSink, WandbSink
WandbSink(), TensorBoardSink("x")
print([name for name in ("wandb", "tensorboard") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
