"""What a newcomer gets wrong is told in a short message, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hdet

X, Y = torch.randn(200, 3), torch.randn(200, 1)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def parts_of(**told: Any) -> tuple[nn.Linear, torch.optim.AdamW]:
    model = nn.Linear(3, 1)
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 0.01} | told)


def error_of(function: Any, kind: type[Exception] = TypeError) -> str:
    with pytest.raises(kind) as caught:
        function()
    text = str(caught.value)
    assert len(text) < 320 and "\n" not in text
    return text


# --- data, and arguments that are swapped -------------------------------------------------------------


def test_what_is_no_probe_is_shown_by_its_type_and_shape():
    model, optimizer = parts_of()

    def auto_of(**told: Any) -> hdet.AutoLR:
        return hdet.AutoLR(optimizer, **{"total_steps": 100, "model": model} | told)

    write = r": write hdet.Probe([(x, y)], loss)"
    assert error_of(lambda: auto_of(probe=X)).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(lambda: hdet.Probe(X, loss_of)).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(lambda: hdet.Probe({"x": X}, loss_of)).endswith(write)  # pyright: ignore[reportArgumentType]
    assert error_of(lambda: hdet.Probe(loss_of, [(X, Y)])).endswith(write)  # pyright: ignore[reportArgumentType]
    assert error_of(lambda: hdet.Probe([(X, Y)], X)).endswith(write)  # pyright: ignore[reportArgumentType]
    assert error_of(lambda: auto_of(model=optimizer)) == (
        "model must be a torch.nn.Module or None, got a value of type AdamW: "
        "pass the model that the optimizer trains"
    )
    assert "got a value of type list and length 2" in error_of(lambda: hdet.AutoLR([X, X], total_steps=9))  # pyright: ignore[reportArgumentType]


def test_a_data_set_is_to_be_wrapped_and_an_iterator_may_be_used_up():
    model, optimizer = parts_of()
    data = TensorDataset(X, Y)
    for function in (
        lambda: hdet.Probe(data, loss_of),  # pyright: ignore[reportArgumentType]
        lambda: hdet.find_lr(model, optimizer, data, loss_of, total_steps=100),  # pyright: ignore[reportArgumentType]
    ):
        assert error_of(function).endswith("wrap it in a DataLoader")
    used = iter([(X, Y)])
    next(used)
    assert "not iter(loader) or a generator" in error_of(lambda: hdet.Probe(used, loss_of), ValueError)
