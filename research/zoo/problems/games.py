"""Imitation: learn how somebody plays Connect Four."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, RMSprop

from hdet.method.fan_out import derived_seed
from research.zoo.examples import Classified, Parts
from research.zoo.storage import prepared

__all__ = ["ConnectFourCloning"]

_COLUMNS, _ROWS = 7, 6
_STRIDE = _ROWS + 1  # bits per column; the topmost is never set
_LIKING = (1, 3, 9, 27, 9, 3, 1)  # how often a column is taken where nothing forces the player
_SIZES = {"train": 60_000, "probe": 400, "evaluation": 6000}


class ConnectFourCloning(Classified):
    """Which column does a player of Connect Four take? The player is a program that is sometimes careless.

    It wins if it can, and else stops the opponent from winning. Of these chances it overlooks one in ten.
    Otherwise it takes a random column, mostly one in the middle. So nobody can be sure of its moves. The
    games are played here, with a fixed seed. Whole games are held out.
    """

    family = "behaviour cloning"
    split = "held out"
    num_replicas = 2
    num_steps = 2000
    batch_size = 64
    num_examples = _SIZES["train"]
    learning_rate = 1e-3
    num_at_once = 1500
    loss_unit = "nats per move"

    @functools.cached_property
    def _moves(self) -> Parts:
        data = prepared("connect_four-2", _play)
        return {part: (data[part].float(), data[f"{part}_moves"].long()) for part in _SIZES}

    def parts(self) -> Parts:
        """The player's pieces and the opponent's, and the column that is taken."""
        return self._moves

    def build_model(self, seed: int) -> nn.Module:
        """A network with two hidden layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            num_inputs, width = 2 * _COLUMNS * _ROWS, 192
            return nn.Sequential(
                nn.Linear(num_inputs, width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
                nn.Linear(width, _COLUMNS),
            )

    def build_optimizer(self, groups: list[dict[str, Any]], lr: float) -> Optimizer:
        """RMSprop."""
        return RMSprop(groups, lr=lr, weight_decay=self.weight_decay)


def _play() -> dict[str, Tensor]:
    """Positions of each part, in random order, and the moves that follow them."""
    dice, data = random.Random(0), {}
    for part, size in _SIZES.items():
        positions: list[list[int]] = []
        moves: list[int] = []
        while len(moves) < 2 * size:  # more games, and fewer moves of each
            for own, other, move in _game(dice):
                positions.append([board >> bit & 1 for board in (own, other) for bit in _BITS])
                moves.append(move)
        order = torch.randperm(len(moves), generator=torch.Generator().manual_seed(1))[:size]
        data[part] = torch.tensor(positions, dtype=torch.uint8)[order]
        data[f"{part}_moves"] = torch.tensor(moves, dtype=torch.uint8)[order]
    return data


_BITS = [column * _STRIDE + row for column in range(_COLUMNS) for row in range(_ROWS)]


def _game(dice: random.Random) -> list[tuple[int, int, int]]:
    """The player's pieces, the opponent's, and the column, of every move. Boards are bits of a number."""
    own, other, heights, moves = 0, 0, [0] * _COLUMNS, []
    while any(height < _ROWS for height in heights):
        move = _choice(own, other, heights, dice)
        moves.append((own, other, move))
        own |= 1 << (move * _STRIDE + heights[move])
        heights[move] += 1
        if _has_won(own):
            break
        own, other = other, own
    return moves


def _choice(own: int, other: int, heights: list[int], dice: random.Random) -> int:
    open_columns = [column for column in range(_COLUMNS) if heights[column] < _ROWS]
    for pieces in (own, other):  # to win comes first
        for column in open_columns:
            if _has_won(pieces | 1 << (column * _STRIDE + heights[column])) and dice.random() < 0.9:
                return column
    return dice.choices(open_columns, [_LIKING[column] for column in open_columns])[0]


def _has_won(pieces: int) -> bool:
    """Whether four are in a line: upwards, across, or on a diagonal."""
    for shift in (1, _STRIDE, _STRIDE - 1, _STRIDE + 1):
        pairs = pieces & pieces >> shift
        if pairs & pairs >> 2 * shift:
            return True
    return False
