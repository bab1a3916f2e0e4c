"""Fine-tune a tiny language model on other text, with all weights and with LoRA, against a sweep.

    python -m research.finetuning --out research/finetuning/records/finetuning.json
    python -m research.finetuning --table research/finetuning/records/finetuning.json

A byte-level GPT-2 is trained on the source text of Python's standard library, and fine-tuned on the man pages
of this machine. The sweep has a factor of 2 between learning rates, with the Trainer's default schedule
(linear, no warm-up) and as many steps. HdetCallback starts from 5e-5, which is the Trainer's default, and
from two others. Its search comes on top of the steps. Runs that are in the file already are not made again.
Man pages differ from machine to machine, so that all runs of a seed have to come from one.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

LENGTH, BATCH, BASE_STEPS, STEPS = 64, 16, 1000, 200
GRID = [5e-5 * 2**k for k in range(11)]
STARTS = [5e-5, 5e-4, 5e-3]
KINDS = ("all weights", "LoRA")


def rows_of(texts: Iterable[bytes], most: int) -> list[dict[str, torch.Tensor]]:
    """Bytes in rows, shuffled, always in the same order."""
    codes = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()
    rows = codes[: len(codes) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most]]
    return [{"input_ids": row, "labels": row} for row in rows]


def stdlib_rows() -> list[dict[str, torch.Tensor]]:
    """What the base model reads."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return rows_of((file.read_bytes() for file in files), 40_000)


def man_rows() -> list[dict[str, torch.Tensor]]:
    """What it is fine-tuned on."""
    pages = sorted(Path("/usr/share/man/man1").glob("*.1.gz"))
    if not pages:
        raise SystemExit("no man pages in /usr/share/man/man1: install some, such as Debian's manpages")
    return rows_of((gzip.decompress(page.read_bytes()) for page in pages), 20_000)


def fingerprint(rows: list[dict[str, torch.Tensor]]) -> str:
    """A short name of a text."""
    return hashlib.sha256(torch.stack([row["input_ids"] for row in rows]).numpy().tobytes()).hexdigest()[:12]


def base_model() -> Any:
    """A GPT-2 with 0.1 M parameters and random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )


def train(
    model: Any, rows: Any, held_out: Any, *, lr: float, steps: int, seed: int, callbacks: Any = ()
) -> float:
    """Train through the Trainer; the held-out loss."""
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, per_device_eval_batch_size=64,
            learning_rate=lr, seed=seed, save_strategy="no", logging_strategy="no", report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=rows, eval_dataset=held_out, callbacks=list(callbacks))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return loss if math.isfinite(loss) else math.inf


def fine_tuned(weights: dict[str, torch.Tensor], kind: str, seed: int) -> Any:
    """The base model, ready for fine-tuning."""
    model = base_model()
    model.load_state_dict(weights)
    torch.manual_seed(seed)
    if kind == "LoRA":
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]

        config = LoraConfig(
            r=8, lora_alpha=16, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, config)
    return model


def measure(out: Path, num_seeds: int) -> None:
    """Make all runs that the file does not have."""
    from hdet.integrations.transformers import HdetCallback

    record: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"runs": []}
    record["command"] = f"python -m research.finetuning --seeds {num_seeds} --out {out}"
    record["steps"], done = STEPS, {tuple(run["key"]) for run in record["runs"]}
    model, text, other = base_model(), stdlib_rows(), man_rows()
    base_loss = train(model, text[256:], text[:256], lr=2e-3, steps=BASE_STEPS, seed=0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record["base_loss"], text_mark = base_loss, fingerprint(other)
    plan = [
        (kind, method, lr, seed)
        for seed in range(num_seeds)
        for kind in KINDS
        for method, rates in (("hdet", STARTS), ("sweep", GRID))
        for lr in rates
    ]
    for kind, method, lr, seed in plan:
        if (kind, method, lr, seed) in done:
            continue
        if {run.get("text") for run in record["runs"] if run["key"][3] == seed} - {text_mark}:
            raise SystemExit(f"seed {seed} was begun with other man pages: give another file as --out")
        callbacks = [HdetCallback()] if method == "hdet" else []
        loss = train(
            fine_tuned(weights, kind, seed), other[256:], other[:256], lr=lr, steps=STEPS, seed=seed,
            callbacks=callbacks,
        )  # fmt: skip
        found = callbacks[0].found if callbacks else None
        run = {"key": [kind, method, lr, seed], "loss": round(loss, 5), "text": text_mark}
        if found is not None:
            run |= {"found": found.lr[0], "search_steps": found.num_steps, "reason": found.reason}
        record["runs"].append(run)
        out.write_text(json.dumps(record, indent=1) + "\n")
        print(run, flush=True)


def table(path: Path) -> str:
    """Mean over the seeds whose sweep is whole: losses over that of the best learning rate of the sweep."""
    runs = json.loads(path.read_text())["runs"]
    lines = ["| | start | learning rate | loss / best of the sweep |", "| --- | ---: | ---: | ---: |"]
    for kind in KINDS:
        sweeps: dict[int, list[tuple[float, float]]] = {}
        for run in runs:
            of, method, lr, seed = run["key"]
            if (of, method) == (kind, "sweep"):
                sweeps.setdefault(seed, []).append((run["loss"], lr))
        best = {seed: min(points) for seed, points in sweeps.items() if len(points) == len(GRID)}
        rates = ", ".join(f"{lr:.2g}" for _, lr in best.values())
        lines.append(f"| {kind}: best of the sweep | | {rates} | 1.000 |")
        for method, start in [("hdet", start) for start in STARTS] + [("sweep", STARTS[0])]:
            here = [run for run in runs if run["key"][:3] == [kind, method, start] and run["key"][3] in best]
            if here:
                ratios = [run["loss"] / best[run["key"][3]][0] for run in here]
                rates = ", ".join(f"{run.get('found', start):.2g}" for run in here)
                name = "HdetCallback" if method == "hdet" else "no search"
                shown = f"{fmean(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})"
                lines.append(f"| {kind}: {name} | {start:.0e} | {rates} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning.json"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", type=Path, help="print the table of a record, and do nothing else")
    args = parser.parse_args()
    if args.table is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        measure(args.out, args.seeds)
    print(table(args.table or args.out))


if __name__ == "__main__":
    main()
