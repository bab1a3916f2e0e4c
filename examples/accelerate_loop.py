"""A loop with Hugging Face Accelerate that finds its learning rate, with accumulation and checkpoints.

    pip install '.[accelerate]'
    python examples/accelerate_loop.py                                    # one process
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py  # two replicas

The task is to add eight numbers.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hdet
from hdet.integrations.accelerate import undisturbed

EPOCHS, ACCUMULATED = 4, 2


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(dim=1, keepdim=True)).square().mean()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # any guess
    loader = DataLoader(torch.randn(8192, 8), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    total_steps = EPOCHS * len(loader) // ACCUMULATED
    with undisturbed(loader):
        found = hdet.find_lr(model, optimizer, loader, loss_of, total_steps=total_steps)
    auto = hdet.AutoLR(optimizer, total_steps=total_steps, model=model, found=found)
    accelerator.register_for_checkpointing(auto)

    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                auto.observe(loss)
                if accelerator.sync_gradients:
                    auto.step()
        auto.converge()
        accelerator.save_state("runs/accelerate")  # accelerator.load_state goes on from here
    accelerator.print(auto.summary(), f"\nlast loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
