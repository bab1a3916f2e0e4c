import math

import pytest
import torch

import hdet
from hdet.replicas.losses import DeviceSum, LossMeter
from tests.helpers.models import linear


def test_losses_of_any_kind_are_summed_and_counted() -> None:
    meter = LossMeter()
    for loss in (1.0, torch.tensor(2.0), torch.tensor([6.0]), torch.tensor(3, dtype=torch.bfloat16)):
        meter.add(loss)
    total = meter.take()
    assert total == (12.0, 4, 0)
    assert meter.take() == (0.0, 0, 0)


def test_nonfinite_losses_are_left_out_and_counted() -> None:
    meter = LossMeter()
    for loss in (math.nan, math.inf, torch.tensor(math.nan), torch.tensor(-math.inf), torch.tensor(4.0)):
        meter.add(loss)
    assert meter.take() == (4.0, 1, 4)


def test_many_losses_keep_their_precision() -> None:
    """More losses than there are slots, so that sums are folded on the device."""
    meter, on_device = LossMeter(), DeviceSum(torch.device("cpu"))
    losses = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5
    for loss in losses:
        meter.add(loss)
        on_device.add(loss)
    expected = pytest.approx(losses.sum().item(), rel=1e-13)
    assert meter.take() == (expected, 1000, 0)
    assert on_device.take() == [expected, 1000, 0]


def test_the_loss_may_change_afterwards_and_keeps_no_graph() -> None:
    meter, loss = LossMeter(), torch.tensor(2.0, requires_grad=True) * 1
    meter.add(loss)
    loss.detach().fill_(100.0)
    assert meter.take() == (2.0, 1, 0)


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (torch.ones(3), ValueError, r"one element, got shape \(3,\): take its mean"),
        ("high", TypeError, "a number, got 'high' of type str"),
        ([1.0], TypeError, "loss must be a tensor"),
        (torch.tensor(1j), TypeError, "loss must be .*got torch.complex64: take its real part"),
        (1j, TypeError, "loss must be a tensor with one element or a number, got 1j of type complex"),
    ],
)
def test_bad_losses(loss: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LossMeter().add(loss)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (torch.tensor(3), "got torch.int64: a loss is no whole number"),
        ((torch.tensor(0.5), torch.tensor(1.0)), "got .* of type tuple"),
        ([torch.tensor(0.5)], "got .* of type list"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss, words: str):
    model, optimizer = linear()
    auto = hdet.AutoLR(optimizer, total_steps=100, model=model)
    with pytest.raises(TypeError, match=words):
        auto.step(loss)
