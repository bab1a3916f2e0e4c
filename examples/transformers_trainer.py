"""A stock Hugging Face Trainer that finds its learning rate. `callbacks=[HdetCallback()]` is all that is new.

    pip install '.[transformers]'
    python examples/transformers_trainer.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py  # two replicas

A tiny GPT-2 reads the source text of Python's standard library, byte by byte. The learning rate of the
TrainingArguments is only where the search starts.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hdet.integrations.transformers import HdetCallback

LENGTH = 32


def load_data() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    data = [{"input_ids": row, "labels": row} for row in rows]
    return data[256:], data[:256]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    train, held_out = load_data()
    callback = HdetCallback()
    args = TrainingArguments(
        "runs/transformers", max_steps=200, per_device_train_batch_size=16, learning_rate=1e-5,
        logging_steps=50, save_steps=100, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out, callbacks=[callback])
    trainer.train()  # resume_from_checkpoint=True goes on from the last checkpoint, without a search
    result = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"found: {callback.found}\nheld-out loss: {result['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
