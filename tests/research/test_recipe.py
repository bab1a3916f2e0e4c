"""The study of the whole recipe: its problems, one run of each kind, and its tables."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from research.recipe import data, models
from research.recipe.problems import PROBLEMS, names
from research.zoo.catalogue import names as zoo_names

MADE_HERE = {
    "shapes_unet_batch_norm": partial(data.shapes, 60),
    "life_group_norm": partial(data.cells, 60),
    "attractor_residual_sgd": partial(data.attractor, 60),
    "bags_attention": partial(data.bags, 60),
    "symbols_lstm_clipped": partial(data.symbol_names, 60_000),
}


def test_splits_share_no_problem_and_no_family():
    families = {
        split: {PROBLEMS[n].family for n in names(split) if n in PROBLEMS} for split in ("dev", "held out")
    }
    assert not families["dev"] & families["held out"]
    assert not set(names("dev")) & set(names("held out"))
    assert not set(names("held out")) & set(zoo_names())


def test_the_held_out_problems_have_every_kind_that_was_promised():
    held_out = [PROBLEMS[name] for name in names("held out")]
    kinds = Counter(problem.optimizer for problem in held_out)
    assert len(held_out) >= 10
    assert kinds["sgd"] == 2
    assert kinds["muon"] == kinds["plain sgd"] == 1
    for split in ("dev", "held out"):
        clipped = [
            p for n in names(split) if (p := PROBLEMS.get(n)) and p.optimizer == "plain sgd" and p.clip_norm
        ]
        assert clipped
    assert PROBLEMS["diamonds_flow"].loss_of is models.flow_loss
    assert PROBLEMS["digits_diffusion"].loss_of is models.diffusion_loss


@pytest.mark.parametrize("name", MADE_HERE)
def test_training_probe_and_test_data_are_three_sets(name):
    parts = [{tuple(row.flatten().tolist()) for row in part[0]} for part in MADE_HERE[name]()]
    train, probe, test = parts
    assert not train & test
    assert not train & probe
    assert not probe & test


@pytest.mark.parametrize("name", ["shapes_unet_batch_norm", "life_group_norm", "attractor_residual_sgd"])
def test_a_problem_is_learned_and_judged(name):
    problem = PROBLEMS[name]
    model, parts = problem.model(0), MADE_HERE[name]()
    optimizer = problem.optimizer_of(model, problem.guess, problem.default_decay)
    before = problem.measured(model, parts.test)
    for _ in range(20):
        loss = problem.loss(model, parts.train)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert problem.measured(model, parts.train).loss < before.loss


def test_a_loss_that_draws_random_numbers_is_judged_alike_every_time():
    problem = PROBLEMS["diamonds_flow"]
    model, rows = models.ResidualMLP(8, 7), (torch.randn(40, 7), torch.zeros(40))
    assert problem.loss(model, rows).item() != problem.loss(model, rows).item()
    state = torch.get_rng_state()
    assert problem.measured(model, rows) == problem.measured(model, rows)
    assert torch.equal(torch.get_rng_state(), state)


def test_counts_that_are_foretold_have_no_deviance():
    logs = torch.tensor([0.0, 2.0])
    assert models.count_loss(lambda x: x, (logs, logs.exp())).item() == pytest.approx(0, abs=1e-6)
    half = models.count_loss(lambda x: x, (torch.zeros(1), torch.zeros(1)))
    assert half.item() == 1


def test_a_rotary_decoder_sees_the_past_alone_and_knows_where_it_is():
    torch.manual_seed(0)
    decoder = models.RotaryDecoder(16, 2, 1, 8)
    tokens = torch.randint(128, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 128
    torch.testing.assert_close(decoder(tokens)[:, :5], decoder(changed)[:, :5])
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    assert not torch.allclose(decoder(tokens)[:, -1], decoder(swapped)[:, -1])
