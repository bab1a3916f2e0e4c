"""DistributedDataParallel against local gradients over a slow link: `make bench-network`, as root on Linux.

Two ranks in two network namespaces are joined by a veth pair that `tc` limits. Both train the same
transformer in turn, a few times: with shared gradients, and with `hdet.presets.diloco` and `local_sgd`. The
namespaces are removed at the end. Writes benchmarks/network.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SYNC_EVERY = 100
NUM_SHARED = 10
"""Steps of a segment with shared gradients; one with local gradients is a whole round."""


def main() -> int:
    """Build the link, run both ranks, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=100.0, help="speed of the link in Mbit/s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "network.json")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measured = work(options.rank, options.repeats)
        if options.rank == 0:
            print(json.dumps(measured))
        return 0
    if os.geteuid() != 0:
        print("root is needed to build network namespaces: run it with sudo", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    measured = over_link(options.mbit, options.repeats)
    record = {
        "command": "make bench-network",
        "link": f"{options.mbit:g} Mbit/s, two network namespaces, a veth pair and tc tbf in both directions",
        "machine": {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
        **summary(measured),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        print(f"{row['method']}: {row['seconds_per_step']:.4f} s per step, {row['times_faster']:.1f}x")
    print(f"written: {options.out}")
    return 0


def over_link(mbit: float, repeats: int) -> dict[str, Any]:
    """What rank zero measures. The namespaces are removed, whatever happens."""
    names = [f"hdet{os.getpid()}r{rank}" for rank in range(2)]
    links = [f"hv{os.getpid() % 10**8}{rank}" for rank in "ab"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)

    workers: list[subprocess.Popen[str]] = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            links[1],
            "netns",
            names[1],
        )
        for rank, (name, link) in enumerate(zip(names, links, strict=True)):
            run("ip", "-n", name, "addr", "add", f"10.83.0.{rank + 1}/24", "dev", link)
            for device in ("lo", link):
                run("ip", "-n", name, "link", "set", device, "up")
            shaped = ["rate", f"{mbit:g}mbit", "burst", "128kb", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *shaped)
        for rank, (name, link) in enumerate(zip(names, links, strict=True)):
            command = [sys.executable, "-m", "benchmarks.network", f"--rank={rank}", f"--repeats={repeats}"]
            environment = {
                "MASTER_ADDR": "10.83.0.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": link,
                "OMP_NUM_THREADS": "1",
            }
            workers.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        out, _ = workers[0].communicate(timeout=1800)
        workers[1].communicate(timeout=60)
        if any(worker.returncode for worker in workers):
            raise SystemExit("a rank has failed: see above")
        return json.loads(out.splitlines()[-1])
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def work(rank: int, repeats: int) -> dict[str, Any]:
    """Train in turn with each method, and time every segment between two barriers."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import hdet
    from hdet import presets

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    width = 256
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(96, width), nn.TransformerEncoder(layer, 4), nn.Linear(width, 96))
    ddp, bytes_of_ddp = DistributedDataParallel(model), [0]

    def counting_hook(state, bucket):  # DistributedDataParallel refuses postponed annotations
        bytes_of_ddp[0] += bucket.buffer().numel() * bucket.buffer().element_size()
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, counting_hook)
    generator = torch.Generator().manual_seed(rank)

    def train(num_steps: int, optimizer: torch.optim.Optimizer, ensemble: Any = None) -> float:
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            tokens = torch.randint(96, (1, 17), generator=generator)
            loss = nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if ensemble is not None:
                ensemble.step(loss)
        dist.barrier()
        busy_seconds.append((time.process_time() - busy) / num_steps)
        return (time.perf_counter() - start) / num_steps

    chosen = {"diloco": presets.diloco, "local_sgd": presets.local_sgd}
    seconds: dict[str, list[float]] = {"ddp": [], **{name: [] for name in chosen}}
    num_bytes: dict[str, float] = {}
    busy_seconds: list[float] = []
    train(2, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(repeats):
        bytes_of_ddp[0] = 0
        seconds["ddp"].append(train(NUM_SHARED, torch.optim.AdamW(model.parameters(), lr=1e-4)))
        num_bytes["ddp"] = bytes_of_ddp[0] / NUM_SHARED
        for name, preset in chosen.items():
            optimizer, records = torch.optim.AdamW(model.parameters(), lr=1e-4), hdet.Records()
            ensemble = hdet.Ensemble(optimizer, model=ddp, records=records, **preset(sync_every=SYNC_EVERY))
            seconds[name].append(train(SYNC_EVERY, optimizer, ensemble))
            num_bytes[name] = sum(record.bytes_sent for record in records) / SYNC_EVERY
            ensemble.close()
    parameters = sum(p.numel() for p in model.parameters())
    dist.destroy_process_group()
    return {
        "parameters": parameters,
        "seconds": seconds,
        "bytes": num_bytes,
        "busy": busy_seconds,
        "torch": torch.__version__,
    }


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians, and how much faster than DistributedDataParallel in the same repeat."""
    shared = measured["seconds"]["ddp"]
    rows = [
        {
            "method": name,
            "seconds_per_step": statistics.median(times),
            "times_faster": statistics.median([a / b for a, b in zip(shared, times, strict=True)]),
            "bytes_per_step": measured["bytes"][name],
            "share_of_ddp_bytes": measured["bytes"][name] / measured["bytes"]["ddp"],
            "repeats": times,
        }
        for name, times in measured["seconds"].items()
    ]
    about = {
        "parameters": measured["parameters"],
        "sync_every": SYNC_EVERY,
        "torch": measured["torch"],
        "cpu_seconds_per_step": statistics.median(measured["busy"]),
    }
    return {**about, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
