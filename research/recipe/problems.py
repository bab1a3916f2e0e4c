"""What the recipe is judged on: problems to choose constants on, and problems that are judged once.

Problems, splits and the grids in ``sweep.py`` were fixed before the first run. Every problem has its data in
three parts: what is trained on, what the run may look at, and what only the table sees.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from research.explore import data as older
from research.explore import problems as explored
from research.explore.data import Parts
from research.explore.models import RecurrentLM, mlp
from research.explore.problem import Problem
from research.recipe import data, models
from research.zoo.problem import Split
from research.zoo.problems.extra import Denoiser
from research.zoo.problems.tables import RatingFactors, movie_ratings

__all__ = ["PROBLEMS", "ZOO", "names"]


def _ratings_model(_: Parts) -> nn.Module:
    sizes = movie_ratings()["sizes"].tolist()
    return RatingFactors(*sizes, width=16, mean_rating=torch.zeros(()))


def _machine(parts: Parts) -> nn.Module:
    sizes = torch.cat([part[0] for part in parts]).amax(0) + 1
    return models.FactorizationMachine(sizes.tolist(), 20)


_NEW: dict[str, Problem] = {
    # Constants are chosen on these. Each is of a kind that earlier recipes failed on.
    "vowel_mlp": Problem(
        "dev",
        "MLP, table of 500 rows",
        partial(older.table, "vowel", 500, num_probed=200),
        lambda _: mlp(13, 96, 96, 11),
    ),
    "ratings_from_zero": Problem(
        "dev",
        "recommender, the mean to be found",
        partial(data.ratings, 20_000),
        _ratings_model,
        num_steps=600,
        batch_size=64,
        kind="values",
    ),
    "photos_denoiser": Problem(
        "dev",
        "denoiser, harder images held out",
        partial(data.noisy_patches, 3000),
        lambda _: mlp(144, 96, 144),
        num_steps=600,
        kind="values",
    ),
    "digits_diffusion": Problem(
        "dev",
        "diffusion, a loss that draws random numbers",
        partial(older.digits_themselves, 1000),
        lambda _: Denoiser(64, 96, 64),
        num_steps=600,
        loss_of=models.diffusion_loss,
    ),
    "docs_lstm_clipped": Problem(
        "dev",
        "recurrent, SGD with clipping",
        partial(older.docs_text, 60_000),
        lambda _: RecurrentLM(48, cells=nn.LSTM),
        "plain sgd",
        num_steps=600,
        batch_size=16,
        clip_norm=0.25,
    ),
    # Nothing is chosen on these. They are judged once, when the recipe does not change any more.
    "docstrings_million": Problem(
        "held out",
        "language model of 1.2 million parameters, RMSNorm",
        partial(data.docstrings, 2_400_000),
        lambda parts: models.RotaryDecoder(128, 4, 6, parts.train[0].shape[1]),
        num_steps=400,
        batch_size=8,
        clip_norm=1.0,
    ),
    "symbols_lstm_clipped": Problem(
        "held out",
        "recurrent, names of symbols, SGD with clipping",
        partial(data.symbol_names, 60_000),
        lambda _: RecurrentLM(64, cells=nn.LSTM),
        "plain sgd",
        num_steps=600,
        batch_size=16,
        clip_norm=0.25,
    ),
    "diamonds_flow": Problem(
        "held out",
        "flow matching, a loss that draws random numbers",
        partial(data.diamonds, 3000),
        lambda _: models.ResidualMLP(8, 7),
        num_steps=700,
        batch_size=64,
        loss_of=models.flow_loss,
    ),
    "houses_selu": Problem(
        "held out",
        "self-normalizing network, prices around 180",
        partial(data.houses, 1200),
        lambda parts: models.self_normalizing(parts.train[0].shape[1], 64, 64, 1),
        num_steps=600,
        kind="values",
    ),
    "visits_additive": Problem(
        "held out",
        "additive networks, counts",
        partial(data.visits, 1500),
        lambda parts: models.AdditiveModel(parts.train[0].shape[1]),
        num_steps=500,
        loss_of=models.count_loss,
    ),
    "loans_columns_muon": Problem(
        "held out",
        "transformer of columns, Muon",
        partial(data.loans, 2000),
        lambda parts: models.ColumnsTransformer(parts.train[0].shape[1], 7),
        "muon",
        num_steps=400,
    ),
    "captures_noisy_sgd": Problem(
        "held out",
        "factorization machine, 20 % wrong labels, SGD",
        partial(data.captures, 3000, noise=0.2),
        _machine,
        "sgd",
        num_steps=700,
    ),
    "shapes_unet_batch_norm": Problem(
        "held out",
        "segmentation, BatchNorm",
        partial(data.shapes, 600),
        lambda _: models.SmallUNet(4),
        num_steps=400,
        batch_size=16,
    ),
    "life_group_norm": Problem(
        "held out",
        "cellular automaton, GroupNorm",
        partial(data.cells, 400),
        lambda _: models.group_norm_grid(),
        num_steps=500,
        batch_size=16,
        loss_of=models.cell_loss,
    ),
    "attractor_residual_sgd": Problem(
        "held out",
        "dynamics, residual network with LayerNorm, SGD",
        partial(data.attractor, 3000),
        lambda _: models.ResidualMLP(12, 12),
        "sgd",
        num_steps=700,
        kind="values",
    ),
    "bags_attention": Problem(
        "held out",
        "multiple instances, attention",
        partial(data.bags, 1200),
        lambda _: models.AttentionPool(8, 6),
        num_steps=600,
    ),
}
_EXPLORED = (
    "satimage_mlp",
    "friedman_mlp",
    "mnist_noisy_mlp",
    "mnist_mlp_sgd",
    "mnist_conv",
    "mnist_conv_batch_norm",
    "mnist1d_conv_batch_norm",
    "digits_conv_sgd",
    "digits_rows_lstm",
    "ring_mlp_muon",
    "docs_gpt_muon",
    "source_gpt",
)
PROBLEMS: dict[str, Problem] = {name: explored.PROBLEMS[name] for name in _EXPLORED} | _NEW
"""All that have a sweep here: new ones, and of the weight decay's study some that train in seconds."""
ZOO = (
    "movies_factorization",
    "flights_tables",
    "digits_denoiser",
    "patches_autoencoder",
    "weather_tcn",
    "language_conv",
    "glyphs_conv_sgd",
    "chars_gpt",
    "kjv_gru",
    "glosses_mixer",
)
"""Problems of the zoo, all dev. Their baseline is the zoo's own sweep of learning rates and warm-ups."""


def names(split: Split | None = None) -> list[str]:
    """The problems of a split, or all of them."""
    own = [name for name, problem in PROBLEMS.items() if split in (None, problem.split)]
    return own + list(ZOO) * (split != "held out")
