"""Assignment: which replica holds which multiplier in a round."""

from __future__ import annotations

import hashlib

__all__ = ["derived_seed", "permutation"]


def permutation(num_replicas: int, seed: int, round_index: int, name: str) -> list[int]:
    r"""The permutation :math:`\pi` of eq. 9, drawn anew for each round and hyperparameter.

    Replica ``r`` holds multiplier ``permutation(...)[r]``. The result is a pure function of its
    arguments: it needs no stored state, no exchange, and touches no random number generator.

    >>> permutation(4, seed=0, round_index=0, name="lr")
    [2, 1, 3, 0]
    >>> permutation(4, seed=0, round_index=1, name="lr")
    [0, 3, 2, 1]
    """
    # Sorting independent uniform keys gives a uniform permutation; 64-bit keys make ties negligible,
    # and the index breaks them the same way everywhere.
    digest = hashlib.shake_256(_text(seed, round_index, name)).digest(8 * num_replicas)
    keys = [(digest[8 * r : 8 * r + 8], r) for r in range(num_replicas)]
    return [r for _, r in sorted(keys)]


def derived_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for a private generator that belongs to ``parts``.

    >>> derived_seed(0, "warm_start", 1) != derived_seed(0, "warm_start", 2)
    True
    """
    return int.from_bytes(hashlib.sha256(_text(seed, *parts)).digest()[:8], "big") >> 1


def _text(*parts: int | str) -> bytes:
    # repr keeps 1 and "1", and ("ab", "c") and ("a", "bc"), apart.
    return repr(parts).encode()
