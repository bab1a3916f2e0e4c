"""Assignment: which replica holds which multiplier in a round."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from hdet.checks import require_choice
from hdet.method.spread import positions

DESIGNS = ("random", "latin", "factorial")


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


def assign(
    design: str, num_replicas: int, seed: int, round_index: int, names: Sequence[str]
) -> dict[str, list[float]]:
    """The position of every replica in a round, per hyperparameter.

    - ``"random"``: an independent permutation for each (the paper, eq. 9). With few replicas two of them
      are often strongly correlated by chance.
    - ``"latin"``: permutations again, each chosen among several for its small correlation with the others.
    - ``"factorial"``: two levels, -1 and 1, in the columns of a Hadamard matrix: exactly uncorrelated.
      It needs a power of two of replicas, more than there are hyperparameters.

    >>> assign("factorial", 4, 0, 0, ["lr", "weight_decay"])
    {'lr': [1.0, 1.0, -1.0, -1.0], 'weight_decay': [-1.0, 1.0, -1.0, 1.0]}
    """
    require_choice("assignment", design, DESIGNS)
    if num_replicas == 1:
        return {name: [0.0] for name in names}
    if design == "factorial":
        return _factorial(num_replicas, seed, round_index, names)
    places = positions(num_replicas)
    chosen: dict[str, list[float]] = {}
    for name in names:
        candidates = [permutation(num_replicas, seed, round_index, name)]
        if design == "latin" and chosen:
            # With many replicas chance correlations are small anyway, and candidates expensive.
            extra = max(1, min(32, 4096 // num_replicas))
            candidates += [permutation(num_replicas, seed, round_index, f"{name}#{i}") for i in range(extra)]
        columns = [[places[i] for i in order] for order in candidates]
        chosen[name] = min(
            columns, key=lambda column: max((abs(_dot(column, c)) for c in chosen.values()), default=0.0)
        )
    return chosen


def _factorial(
    num_replicas: int, seed: int, round_index: int, names: Sequence[str]
) -> dict[str, list[float]]:
    if num_replicas & (num_replicas - 1) or len(names) >= num_replicas:
        raise ValueError(
            "assignment='factorial' needs a power of two of replicas, more than there are hyperparameters, "
            f"got {num_replicas} replicas for {len(names)} hyperparameters: use assignment='latin'"
        )
    # Column j of the Hadamard matrix has the sign of the parity of i & j; column 0 is constant.
    rows = permutation(num_replicas, seed, round_index, "factorial rows")
    columns = [j + 1 for j in permutation(num_replicas - 1, seed, round_index, "factorial columns")]
    return {
        name: [1.0 - 2.0 * ((i & j).bit_count() % 2) for i in rows]
        for name, j in zip(names, columns, strict=False)
    }


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def derived_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for a private generator that belongs to ``parts``.

    >>> derived_seed(0, "warm_start", 1) != derived_seed(0, "warm_start", 2)
    True
    """
    return int.from_bytes(hashlib.sha256(_text(seed, *parts)).digest()[:8], "big") >> 1


def _text(*parts: int | str) -> bytes:
    # repr keeps 1 and "1", and ("ab", "c") and ("a", "bc"), apart.
    return repr(parts).encode()
