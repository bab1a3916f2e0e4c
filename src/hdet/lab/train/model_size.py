"""How many parameters a model has, from a file with a function that builds it. Nothing is allocated."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from torch import nn


def model_size(name: str) -> tuple[int, int]:
    """The number of parameters, and the bytes of one, of what ``path/to/file.py:function`` returns.

    The function is called without arguments on torch's meta device, which has shapes and no memory.
    """
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(
            f"model must be path/to/file.py:function with a file that exists, got {name!r}: name a function "
            "that builds the model without arguments"
        )
    found = runpy.run_path(path).get(function)
    if not callable(found):
        raise ValueError(f"model must name a function of {path}, got {function!r}: there is none")
    with torch.device("meta"):
        model = found()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must name a function that returns a torch.nn.Module, got {model!r} from {name!r}"
        )
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError(f"model must have parameters, but what {name!r} returns has none")
    count = sum(p.numel() for p in parameters)
    return count, round(sum(p.numel() * p.element_size() for p in parameters) / count)
