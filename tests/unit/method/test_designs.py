import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.designs import correct_signs
from hdet.method.fan_out import assign, positions


def worst_correlation(design: str, num_replicas: int, num_names: int, round_index: int) -> float:
    columns = list(assign(design, num_replicas, 0, round_index, [f"h{i}" for i in range(num_names)]).values())
    worst = 0.0
    for i, a in enumerate(columns):
        for b in columns[:i]:
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            scale = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
            worst = max(worst, abs(dot) / scale)
    return worst


@given(st.sampled_from(["random", "latin"]), st.integers(1, 16), st.integers(1, 5), st.integers(0, 1000))
def test_permutations_use_every_position_once(design: str, num_replicas: int, num_names: int, k: int) -> None:
    names = [f"h{i}" for i in range(num_names)]
    for column in assign(design, num_replicas, 0, k, names).values():
        assert sorted(column) == positions(num_replicas)


@given(st.integers(2, 16), st.integers(1, 4), st.integers(0, 9))
def test_the_papers_assignment_holds_places_and_then_draws_them(num: int, num_names: int, k: int) -> None:
    names = [f"h{i}" for i in range(num_names)]
    placed = assign("paper", num, 0, k, names, 5)
    assert placed == (dict.fromkeys(names, positions(num)) if k < 5 else assign("random", num, 0, k, names))


@given(st.sampled_from([2, 4, 8, 16]), st.integers(0, 1000))
def test_a_factorial_is_balanced_and_uncorrelated(num_replicas: int, k: int) -> None:
    num_names = min(4, num_replicas - 1)
    for column in assign("factorial", num_replicas, 0, k, [f"h{i}" for i in range(num_names)]).values():
        assert sum(column) == 0 and set(column) == {-1.0, 1.0}
    assert worst_correlation("factorial", num_replicas, num_names, k) == 0


def test_a_latin_assignment_is_less_correlated_than_chance() -> None:
    rounds = range(200)
    random = sum(worst_correlation("random", 8, 4, k) for k in rounds) / 200
    latin = sum(worst_correlation("latin", 8, 4, k) for k in rounds) / 200
    assert random > 0.5
    assert latin < 0.25


@pytest.mark.parametrize(("num_replicas", "num_names"), [(6, 2), (4, 4)])
def test_a_factorial_that_does_not_fit_is_refused(num_replicas: int, num_names: int) -> None:
    with pytest.raises(
        ValueError, match=rf"got {num_replicas} replicas for {num_names} .* assignment='latin'"
    ):
        assign("factorial", num_replicas, 0, 0, [f"h{i}" for i in range(num_names)])


def test_joint_estimates_recover_planted_signs() -> None:
    """Eight replicas, four hyperparameters, noise as large as an effect."""
    noise, rounds = 1.0, 1500
    paper = correct_signs("random", "paper", noise, rounds=rounds)
    latin = correct_signs("latin", "joint", noise, rounds=rounds)
    factorial = correct_signs("factorial", "joint", noise, rounds=rounds)
    assert latin > 0.95
    assert factorial > 0.99
    assert paper < 0.92  # three standard errors (0.0042) and more below
    # Without any noise, joint estimates are exact; the paper's are not.
    assert correct_signs("latin", "joint", 0.0, rounds=300) == 1
    assert correct_signs("random", "paper", 0.0, rounds=300) < 0.97
