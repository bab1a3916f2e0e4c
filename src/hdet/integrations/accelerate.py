"""Leave a loader of Hugging Face Accelerate as it was after a search; find_lr and AutoLR do the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Within the block take batches from a loader; after it, the loader is as it was.

    A loader that ``accelerator.prepare`` has made counts its passes over the data, shuffles by that count or
    by a generator of its own, and tells the accelerator that it is being read. A search reads a part of it
    and leaves. So all that is put back, and so are the random numbers of Python and NumPy, which a collator
    may draw. Those of torch are put back by :func:`hdet.find_lr`.

    Args:
        loader: a prepared loader, or any other.

    >>> before = random.getstate()
    >>> with undisturbed([1, 2]):
    ...     _ = random.random()
    >>> random.getstate() == before
    True
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # it is a collator's choice
    epoch = getattr(loader, "iteration", None)
    generator = getattr(loader, "synchronized_generator", None)
    drawn = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if generator is not None:
            generator.set_state(drawn)
        if epoch is not None:
            loader.set_epoch(epoch)
        if hasattr(loader, "gradient_state"):
            loader.end()
