import random
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from hdet.method.fan_out import derived_seed, permutation


@given(st.integers(1, 200), st.integers(0, 2**62), st.integers(0, 10**9), st.text(max_size=20))
def test_it_is_a_permutation_and_a_pure_function(n: int, seed: int, round_index: int, name: str) -> None:
    first = permutation(n, seed, round_index, name)
    assert sorted(first) == list(range(n))
    assert first == permutation(n, seed, round_index, name)


def test_every_order_is_equally_likely() -> None:
    counts = Counter(tuple(permutation(3, 0, k, "lr")) for k in range(6000))
    assert len(counts) == 6
    # 1000 expected each, standard deviation 29; five of them.
    assert all(abs(count - 1000) < 145 for count in counts.values())


def test_names_are_independent() -> None:
    """Correlation between the assignments of two hyperparameters, over rounds and replicas."""
    n, rounds = 8, 500
    products = [
        (a - 3.5) * (b - 3.5)
        for k in range(rounds)
        for a, b in zip(permutation(n, 0, k, "lr.0"), permutation(n, 0, k, "lr.1"), strict=True)
    ]
    assert abs(sum(products) / len(products) / 5.25) < 0.08  # five standard deviations of 1/sqrt(4000)


def test_no_global_generator_is_touched() -> None:
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    permutation(64, 1, 2, "lr")
    derived_seed(1, "x")
    assert random.getstate() == python_state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_parts_of_a_seed_do_not_run_together() -> None:
    assert derived_seed(0, "ab", "c") != derived_seed(0, "a", "bc")
    assert derived_seed(0, 1) != derived_seed(0, "1")
    assert 0 <= derived_seed(0, "x") < 2**63
