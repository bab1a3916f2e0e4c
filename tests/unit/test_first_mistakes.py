"""What a newcomer gets wrong is told in a short message, with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import hdet
from tests.helpers.replicas import run_replicas

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
    assert len(text) < 400 and "\n" not in text
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


# --- the first call of the loss -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MSELoss(), lambda batch, model: loss_of(model, batch)]
)
def test_a_loss_that_takes_something_else_is_told_and_nothing_has_changed(loss: Any):
    model, optimizer = parts_of()
    before = model.weight.detach().clone()
    text = error_of(hdet.find_lr, model, optimizer, [(X, Y)], loss, total_steps=100)
    assert text.startswith("loss must be a function loss(model, batch), with the model first, but it failed")
    assert "a value of type tuple and length 2 (" in text and ": write def loss(model, batch)" in text
    assert torch.equal(model.weight, before) and optimizer.param_groups[0]["lr"] == 0.01


def test_an_error_of_torch_keeps_its_type():
    model, optimizer = parts_of()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        hdet.find_lr(model, optimizer, [(X, Y)], loss, total_steps=100)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes") as caught:
        hdet.find_lr(model, optimizer, [(X[:, :2], Y)], loss_of, total_steps=100)
    if hasattr(caught.value, "__notes__"):
        assert "hdet called loss(model, batch), with the model first" in caught.value.__notes__[0]


def test_rows_that_are_taken_for_batches_are_explained():
    model, optimizer = parts_of()
    probe = hdet.Probe((X, Y), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(RuntimeError, match=r"a list of batches, write hdet\.Probe\(\[\(x, y\)\], loss\)"):
        exploring(optimizer, model, probe)


def exploring(optimizer: torch.optim.Optimizer, model: nn.Module, probe: Any, **told: Any) -> hdet.AutoLR:
    explore = [hdet.WeightDecay()]
    return hdet.AutoLR(
        optimizer, **{"total_steps": 100, "model": model, "explore": explore, "probe": probe} | told
    )


def test_a_probe_is_scored_once_when_a_run_is_built():
    model, optimizer = parts_of()
    text = error_of(exploring, optimizer, model, hdet.Probe((X, Y), loss_of))
    assert "failed on the first batch, a value of type Tensor and shape (50, 3) (ValueError: too many" in text
    assert text.endswith(": batches must be a list of batches, write hdet.Probe([(x, y)], loss)")
    text = error_of(exploring, optimizer, model, hdet.Probe([(X, Y)], nn.CrossEntropyLoss()))
    assert text.endswith("write def loss(model, batch): return cross_entropy(model(batch[0]), batch[1])")
    assert optimizer.param_groups[0]["lr"] == 0.01
    exploring(optimizer, model, hdet.Probe([(X, Y)], loss_of)).close()  # nothing is claimed by what failed
    with pytest.raises(TypeError, match="but it failed on the first batch"):
        hdet.VirtualEnsemble(
            model,
            optimizer,
            loss_of,
            num_replicas=2,
            total_steps=100,
            sync_every=5,
            explore=[hdet.WeightDecay(0.0)],
            controller=hdet.WeightDecayController(),
            probe=hdet.Probe([(X, Y)], nn.CrossEntropyLoss()),
        )


class Counting(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        assert not self.training and not torch.is_grad_enabled()
        return self.layers(x + torch.randn_like(x))


def test_scoring_a_probe_once_leaves_everything_as_it_was():
    model = Counting()
    model.layers[2].eval()
    modes = [module.training for module in model.modules()]
    calls = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(len(batch[0]))
        return loss_of(model, batch)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    exploring(torch.optim.AdamW(model.parameters(), lr=0.01), model, hdet.Probe([(X, Y)], loss))
    assert calls == [25]  # of 200 in 8 parts
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes


def _with_a_bad_probe(rank: int, is_sharded: bool) -> str:
    model, _ = parts_of()
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapped = model if is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    is_bad = is_sharded or rank == 1
    probe = hdet.Probe([(X, Y)], nn.CrossEntropyLoss() if is_bad else loss_of)
    text = error_of(exploring, optimizer, wrapped, probe)
    exploring(optimizer, wrapped, hdet.Probe([(X, Y)], loss_of)).close()
    return text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_all_ranks_raise_together_where_a_probe_cannot_be_scored(is_sharded: bool):
    first, second = run_replicas(_with_a_bad_probe, 2, is_sharded)
    assert second.startswith("loss must be a function loss(model, batch)")
    assert first == (second if is_sharded else f"replica 1 could not be built: TypeError: {second}")


# --- a weight decay that cannot move ------------------------------------------------------------------


def run(auto: hdet.AutoLR, optimizer: torch.optim.Optimizer, *losses: float, steps: int = 100) -> None:
    for _ in range(steps):
        optimizer.step()
        auto.step(*losses)


@pytest.mark.filterwarnings("ignore:no loss was given to step.., so the guard")
def test_a_run_without_losses_is_told_that_the_weight_decay_stays():
    model, optimizer = parts_of()
    auto = exploring(optimizer, model, hdet.Probe([(X, Y)], loss_of))
    with pytest.warns(hdet.HdetWarning, match=r"the weight decay cannot be moved: call step\(loss\)") as told:
        run(auto, optimizer)
    assert sum("weight decay" in str(one.message) for one in told) == 1
    assert "weight_decay: 0.01, no look yet at held-out data" in auto.summary()


def test_a_held_out_loss_that_is_not_finite_is_told_once():
    model, optimizer = parts_of()
    spoilt = Y.clone()
    spoilt[150] = torch.nan
    auto = exploring(optimizer, model, hdet.Probe([(X, spoilt)], loss_of))
    with pytest.warns(hdet.HdetWarning) as told:
        run(auto, optimizer, 0.5)
    assert [str(one.message).partition(",")[0] for one in told] == [
        "the loss on the probe is not finite at step 20"
    ]


def test_the_summary_tells_of_a_weight_decay_that_was_kept():
    model, optimizer = parts_of()
    auto = exploring(optimizer, model, hdet.Probe([(X, Y)], lambda m, batch: loss_of(m, batch) * 0 + 1))
    run(auto, optimizer, 0.5)
    assert auto.summary().endswith("\nweight_decay: 0.01, kept in 15 looks at held-out data")


def test_frozen_weights_and_too_short_runs_are_warned_of():
    model, optimizer = parts_of()
    probe = hdet.Probe([(X, Y)], loss_of)
    with pytest.warns(
        hdet.NoEffectWarning, match="total_steps=8 with sync_every=5 leaves 1. Pass sync_every=1"
    ):
        exploring(optimizer, model, probe, total_steps=8).close()
    model.requires_grad_(False)
    with pytest.warns(hdet.NoEffectWarning, match="found only parameters with requires_grad=False"):
        auto = exploring(optimizer, model, probe)
    run(auto, optimizer, 0.5)
    assert auto.base["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"explore": []}, "the probe is not used"),
        ({"explore": [hdet.WeightDecay(0.1)]}, r"For a weight decay of 0\.1 set weight_decay=0\.1 in the"),
        ({"controller": hdet.Controller()}, "a controller is given, so held-out data does not move the"),
    ],
)
def test_what_is_not_used_is_warned_of(told: dict[str, Any], words: str):
    model, optimizer = parts_of()
    with pytest.warns(hdet.HdetWarning, match=words):
        exploring(optimizer, model, hdet.Probe([(X, Y)], loss_of), **told)
