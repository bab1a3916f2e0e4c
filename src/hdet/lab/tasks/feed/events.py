"""Events: the batch that the generator and the log reader make, and that the ranker takes."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

TARGETS = ("contribution", "like", "dwell")
"""What the ranker predicts, in the order of the last dim of ``actions``."""


class Events(TypedDict):
    """Sequences of events, each of one user. All tensors; B sequences of L events."""

    user: Tensor
    """(B,) rows of the user table."""
    item: Tensor
    """(B, L) rows of the item table: what was shown."""
    position: Tensor
    """(B, L) place of the event in its session, from 0; it falls to 0 where a session begins."""
    actions: Tensor
    """(B, L, 3) one where the user contributed, liked, dwelt long; else zero."""
    mask: Tensor
    """(B, L) one for an event, zero for padding at the end."""
