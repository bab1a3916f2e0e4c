"""Fan-out: how replicas are made to differ. Multipliers (eq. 1), who holds which (eq. 9), noise (eq. 10)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from hdet.checks import require_choice


def multipliers(num_replicas: int, spread: float, scale: str = "linear") -> list[float]:
    r"""Evenly spaced factors with mean one (paper, eq. 1), or even in the logarithm.

    .. math:: \rho_r = 1 + \alpha\,\frac{r - (N-1)/2}{\delta},
              \qquad \delta = \max\left(\tfrac{N-1}{2},\ 0.5\right)

    ``num_replicas`` is :math:`N` and ``spread`` is :math:`\alpha`.

    >>> multipliers(3, 0.5)
    [0.5, 1.0, 1.5]
    >>> multipliers(3, 3.0, scale="log")
    [0.25, 1.0, 4.0]
    >>> multipliers(1, 0.5)
    [1.0]
    """
    return [multiplier_at(position, spread, scale) for position in positions(num_replicas)]


def positions(num_replicas: int) -> list[float]:
    r"""Where the replicas stand in the spread, from -1 to 1: :math:`x_r = (r - (N-1)/2)/\delta`.

    >>> positions(3), positions(1)
    ([-1.0, 0.0, 1.0], [0.0])
    """
    center = (num_replicas - 1) / 2
    return [(r - center) / max(center, 0.5) for r in range(num_replicas)]


def multiplier_at(position: float, spread: float, scale: str = "linear") -> float:
    r"""The factor at a position :math:`x`: :math:`1 + \alpha x` (eq. 1), or :math:`(1 + \alpha)^x`.

    >>> multiplier_at(-1.0, 0.5), multiplier_at(1.0, 0.5, scale="log")
    (0.5, 1.5)
    """
    return 1 + spread * position if scale == "linear" else (1 + spread) ** position


def usable_share(base: float, low: float, high: float, spread: float, scale: str = "linear") -> float:
    """Return the share of the spread that fits between the bounds when it is narrowed on both sides alike.

    Cutting or folding single values at a bound would shift their mean away from the base.

    >>> usable_share(0.4, 0.0, 0.5, spread=0.5)
    0.5
    >>> usable_share(0.5, 0.0, 0.5, spread=0.5)
    0.0
    """
    if spread == 0 or base <= 0:
        return 0.0
    if scale == "linear":
        room = min(high / base - 1, 1 - low / base)
        return max(0.0, min(1.0, room / spread))
    room = min(math.log(high / base), math.log(base / low) if low > 0 else math.inf)
    return max(0.0, min(1.0, room / math.log(1 + spread)))


def factor_limits(
    base: float, low: float, high: float, spread: float, scale: str = "linear"
) -> tuple[float, float]:
    """By which factors the base may move so that a quarter of its spread still fits between the bounds.

    At a bound itself nothing could be explored any more, and the base would stay there for good.

    >>> factor_limits(0.2, 0.0, 0.5, spread=1.0)
    (0.0, 2.0)
    """
    lowest, highest = multiplier_at(-0.25, spread, scale), multiplier_at(0.25, spread, scale)
    return low / lowest / base, high / highest / base


DESIGNS = ("random", "paper", "latin", "factorial")


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
    design: str,
    num_replicas: int,
    seed: int,
    round_index: int,
    names: Sequence[str],
    num_fixed: float = math.inf,
) -> dict[str, list[float]]:
    """The position of every replica in a round, per hyperparameter.

    - ``"random"``: an independent permutation for each (the paper, eq. 9). With few replicas two of them
      are often strongly correlated by chance.
    - ``"paper"``: the same, but replica r holds place r in the first ``num_fixed`` rounds, before the
      controller acts (Algorithm 1, lines 3 and 17).
    - ``"latin"``: permutations again, each chosen among several for its small correlation with the others.
    - ``"factorial"``: two levels, -1 and 1, in the columns of a Hadamard matrix: exactly uncorrelated.
      It needs a power of two of replicas, more than there are hyperparameters.

    >>> assign("factorial", 4, 0, 0, ["lr", "weight_decay"])
    {'lr': [1.0, 1.0, -1.0, -1.0], 'weight_decay': [-1.0, 1.0, -1.0, 1.0]}
    """
    if design not in DESIGNS:
        require_choice("assignment", design, DESIGNS)  # raises
    if num_replicas == 1 or (design == "paper" and round_index < num_fixed):
        return {name: positions(num_replicas) for name in names}
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
            columns, key=lambda column: max((abs(dot(column, c)) for c in chosen.values()), default=0.0)
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


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Add up the products, rounded once.

    >>> dot([1.0, 2.0], [3.0, 4.0])
    11.0
    """
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


def noise_std(noise_scale: float, norm: float, num_elements: int) -> float:
    r"""Standard deviation of the warm-start noise (paper, eq. 10).

    .. math:: \text{std} = \nu\,\frac{\lVert\theta\rVert}{\sqrt d}

    ``noise_scale`` is :math:`\nu`. The norm and the number of elements are one tensor's (the form of
    the reference code) or the whole model's (the form of the paper).

    >>> noise_std(0.01, norm=2.0, num_elements=4)
    0.01
    """
    return noise_scale * norm / math.sqrt(num_elements)
