"""What the names of hyperparameters in a record stand for."""

from __future__ import annotations

import re


def is_learning_rate(name: str) -> bool:
    """Whether a name in a record stands for a learning rate, of all parameter groups or of one.

    The first field is ``lr``, one of a group is ``lr.GROUP``, and further fields are ``lr[1]``, ``lr[2]``.

    >>> [is_learning_rate(name) for name in ("lr", "lr.embedding", "lr[1]", "lr.body[1]")]
    [True, True, True, True]
    >>> [is_learning_rate(name) for name in ("lr_floor", "lrs", "lr[x]", "weight_decay.lr")]
    [False, False, False, False]
    """
    return re.fullmatch(r"lr(\..*)?(\[\d+\])?", name, re.DOTALL) is not None
