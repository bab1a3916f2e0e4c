"""Problems of the zoo whose data is generated or in the cache, and with ``--download`` all the others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hdet.errors import HdetError
from hdet.lab.train.runner import evaluate
from hdet.replicas.rows import ModelRows, join
from research.zoo import storage
from research.zoo.catalogue import names, problem_of
from research.zoo.problems import finetuning, games

_CHECKED = [*names("held out"), "verses_hashed", "glosses_skip_gram"]


@pytest.fixture(scope="module", params=_CHECKED)
def problem(request):
    downloads = request.config.getoption("--download")
    with pytest.MonkeyPatch.context() as patch:
        if not downloads:
            patch.setattr(storage.shutil, "which", lambda _: None)
        patch.setattr(finetuning, "_pretrained", lambda: finetuning._BASE.build_model(0))
        try:
            kind = problem_of(request.param)
            kind.probe_batch()
        except (HdetError, ModuleNotFoundError):
            if downloads:
                raise
            pytest.skip("data of the zoo is not here; make test-zoo runs them")
        yield kind


def _tensors(batch):
    return torch.utils._pytree.tree_leaves(batch)


def _are_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(_tensors(one), _tensors(other), strict=True))


def test_held_out_problems_are_of_families_of_their_own():
    families = {split: [problem_of(name).family for name in names(split)] for split in ("dev", "held out")}
    assert not {*families["dev"]} & {*families["held out"]}
    assert len({*families["held out"]}) == len(families["held out"])


def test_batches_follow_from_seed_replica_and_step(problem):
    first = list(itertools.islice(problem.train_batches(seed=0), 3))
    again = list(itertools.islice(problem.train_batches(seed=0), 3))
    assert all(_are_equal(a, b) for a, b in zip(first, again, strict=True))
    assert _are_equal(next(problem.train_batches(seed=0, start=2)), first[2])
    others = [first[1], next(problem.train_batches(seed=1)), next(problem.train_batches(seed=0, replica=1))]
    for other in others:
        assert not _are_equal(first[0], other)
        assert [t.shape for t in _tensors(other)] == [t.shape for t in _tensors(first[0])]
    assert len(_tensors(first[0])[0]) == problem.batch_size
    if problem.num_examples is not None:
        assert problem.num_examples == len(problem.parts()["train"][0])


def test_models_follow_from_the_seed_and_all_weights_are_trained(problem):
    model, same = problem.build_model(0), problem.build_model(0)
    for parameter, equal in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(parameter, equal, rtol=0, atol=0)
    held = [p for group in problem.parameter_groups(model) for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    problem.loss(model, next(problem.train_batches(seed=0))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_evaluation_is_repeatable_and_positive(problem):
    model = problem.build_model(0)
    found = evaluate(problem, model)
    assert found == evaluate(problem, model)
    assert found["loss"] > 0 and math.isfinite(found["loss"])
    assert math.isfinite(problem.loss(model, problem.probe_batch()).item())
    assert not _are_equal(problem.probe_batch(), next(iter(problem.evaluation_batches())))


def test_the_loss_of_joined_batches_is_the_mean(problem):
    model = problem.build_model(0).eval()
    batches = [next(problem.train_batches(seed=0, replica=r)) for r in range(3)]
    joined = problem.loss(model, join(batches)).item()
    assert joined == pytest.approx(sum(problem.loss(model, b).item() for b in batches) / 3, rel=1e-4)


def test_replicas_at_once_have_the_losses_and_gradients_of_each(problem):
    model = problem.build_model(0)
    optimizer = problem.build_optimizer(problem.parameter_groups(model), 0.1)
    batches = [next(problem.train_batches(seed=0, replica=r)) for r in range(2)]
    results = []
    for vectorize in (problem.can_vectorize, False):
        rows = ModelRows(model, optimizer, problem.loss, num_replicas=2, vectorize=vectorize)
        results.append(rows.losses_and_gradients(batches, lambda _: None, 2))
    (losses, gradients), (expected, of_each) = results
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    for found, wanted in zip(gradients, of_each, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-4 * float(wanted.abs().max()))


def test_a_few_steps_lower_the_loss(problem):
    model = problem.build_model(0)
    optimizer = problem.build_optimizer(problem.parameter_groups(model), problem.learning_rate)
    batches = list(itertools.islice(problem.train_batches(seed=0), 10))
    losses = []
    for batch in batches * 4:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.parametrize(
    ("bits", "has_won"),
    [((0, 1, 2, 3), True), ((0, 7, 14, 21), True), ((3, 9, 15, 21), True), ((0, 8, 16, 24), True),
     ((0, 1, 2), False), ((4, 5, 7, 8), False)],
)  # fmt: skip
def test_four_in_a_line_win(bits, has_won):
    assert games._has_won(sum(1 << bit for bit in bits)) == has_won
