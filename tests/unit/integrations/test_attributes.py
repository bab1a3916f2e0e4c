from collections import deque

import pytest
import torch
from torch import nn

from hdet.integrations.lightning_unseen import attributes_put_back


def test_everything_plain_is_put_back_also_after_an_error():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    inner = model[1]
    inner.mean, inner.last, inner.names = torch.zeros(2), deque([1], maxlen=2), {"a"}
    inner.table, mean = {"a": 1}, inner.mean
    weights = model[0].weight.detach().clone()
    with pytest.raises(KeyError), attributes_put_back(model):
        inner.mean += 1
        inner.mean = inner.mean + 1
        inner.last.append(2)
        inner.names.add("b")
        inner.table["a"] = 2
        inner.eval()
        with torch.no_grad():
            model[0].weight.zero_()
        raise KeyError
    assert inner.mean is mean and mean.tolist() == [0, 0]
    assert inner.last == deque([1]) and inner.names == {"a"} and inner.table == {"a": 1} and inner.training
    assert not torch.equal(model[0].weight, weights)  # parameters are not its business


def test_tensors_of_inference_mode_are_left_alone():
    model = nn.Linear(2, 1)
    with torch.inference_mode():
        model.mean = torch.ones(2)
    with attributes_put_back(model):
        model.mean = model.mean + 1
    assert model.mean.tolist() == [1, 1]
