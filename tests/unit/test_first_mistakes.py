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


def error_of(function: Any, *given: Any, **told: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*given, **told)
    text = str(caught.value)
    assert len(text) < 320 and "\n" not in text
    return text


# --- data, and arguments that are swapped -------------------------------------------------------------


def test_what_is_no_probe_is_shown_by_its_type_and_shape():
    model, optimizer = parts_of()

    def auto_of(**told: Any) -> hdet.AutoLR:
        return hdet.AutoLR(optimizer, **{"total_steps": 100, "model": model} | told)

    write = r": write hdet.Probe([(x, y)], loss)"
    assert error_of(auto_of, probe=X).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(hdet.Probe, X, loss_of).endswith(f"type Tensor and shape (200, 3){write}")
    assert error_of(hdet.Probe, {"x": X}, loss_of).endswith(write)
    assert error_of(hdet.Probe, loss_of, [(X, Y)]).endswith(write)
    assert error_of(hdet.Probe, [(X, Y)], X).endswith(write)
    assert error_of(auto_of, model=optimizer) == (
        "model must be a torch.nn.Module or None, got a value of type AdamW: "
        "pass the model that the optimizer trains"
    )
    assert "got a value of type list and length 2" in error_of(lambda: hdet.AutoLR([X, X], total_steps=9))


def test_a_data_set_is_to_be_wrapped_and_an_iterator_may_be_used_up():
    model, optimizer = parts_of()
    data = TensorDataset(X, Y)
    wrap = "wrap it in a DataLoader"
    assert error_of(hdet.Probe, data, loss_of).endswith(wrap)
    assert error_of(hdet.find_lr, model, optimizer, data, loss_of, total_steps=100).endswith(wrap)
    used = iter([(X, Y)])
    next(used)
    assert "not iter(loader) or a generator" in error_of(hdet.Probe, used, loss_of)


# --- what is explored ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "explore", [hdet.WeightDecay(), hdet.WeightDecay, [hdet.WeightDecay], "weight_decay", ["weight_decay"]]
)
def test_what_is_explored_is_a_list_of_objects(explore: Any):
    model, optimizer = parts_of()
    for build in (hdet.AutoLR, hdet.Ensemble):
        text = error_of(build, optimizer, total_steps=100, model=model, explore=explore)
        assert text.startswith("explore must") and text.endswith(": write [hdet.WeightDecay()]")
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_remedy_names_what_needs_arguments_as_such():
    model, optimizer = parts_of()
    for given, write in ((hdet.Dropout, "[hdet.Dropout(...)]"), (3, "[hdet.LearningRate()]")):
        assert error_of(hdet.Ensemble, optimizer, model=model, explore=[given]).endswith(f"write {write}")


def test_a_weight_decay_is_set_in_the_optimizer_and_auto_is_a_start():
    assert error_of(hdet.WeightDecay, start=0.1) == (
        "start must be 'auto' or None, got 0.1: set weight_decay=0.1 in the optimizer"
    )
    assert "got 'Auto': write start='auto'" in error_of(hdet.WeightDecay, start="Auto")
    assert error_of(hdet.WeightDecay, "auto").endswith("got 'auto': write start='auto'")
    assert hdet.WeightDecay(start="auto").start == "auto"


def test_a_weight_decay_of_zero_is_told_with_what_to_set():
    _, optimizer = parts_of(weight_decay=0.0)
    with pytest.warns(hdet.NoEffectWarning, match=r"explored\. Set weight_decay=0\.01 in the optimizer$"):
        assert hdet.WeightDecay().tunables(optimizer) == []
    with pytest.warns(hdet.NoEffectWarning, match="nothing is explored$"):  # it has none to set
        assert hdet.WeightDecay().tunables(torch.optim.Rprop([nn.Parameter(X)])) == []
