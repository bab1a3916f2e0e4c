"""Ranker: causal attention over items, whose values carry the actions that followed them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.lab.tasks.feed_world import TARGETS, Events

# A row of the user or item table sees few events of a batch. The factor on what is looked up makes its steps
# larger, so that one learning rate suits the tables and the rest.
TABLE_SCALE = 16.0


class Ranker(nn.Module):
    r"""Log-odds of the three actions for each event, in the manner of AttnMVP (Cheng, 2026).

    The stream :math:`x_t` starts from the item, the user, their product and the place in the session. In each
    block queries and keys come from it, and values mix it with the action embedding :math:`e`:

    .. math::
        v_j = W_v x_j + W_a\, e(\mathrm{action}_j), \qquad
        x_t \leftarrow x_t + W_o \sum_{j < t} \mathrm{softmax}_j(q_t \cdot k_j / \sqrt{d})\, v_j

    The sum is over :math:`j < t` and one more place whose key and value are zero, which is all that the first
    event has. So :math:`x_t` knows items up to :math:`t` and actions before :math:`t`, in every block.

    Args:
        num_users: rows of the user table.
        num_items: rows of the item table.
        length: events in a sequence.
        width: size of the stream.
        num_layers: number of blocks.
        num_heads: attention heads in a block.
        dropout: share of each block's contribution that is dropped in training.

    >>> ranker = Ranker(num_users=5, num_items=7, length=4, width=8, num_layers=1, num_heads=2)
    >>> row = torch.zeros(2, 4, dtype=torch.long)
    >>> ranker(Events(user=row[:, 0], item=row, position=row, actions=torch.zeros(2, 4, 3),
    ...               mask=torch.ones(2, 4))).shape
    torch.Size([2, 4, 3])
    """

    def __init__(
        self,
        *,
        num_users: int,
        num_items: int,
        length: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.user = nn.Embedding(num_users, width)
        self.item = nn.Embedding(num_items, width)
        self.action = nn.Embedding(2 ** len(TARGETS), width)
        self.position = nn.Embedding(length, width)
        self.order = nn.Embedding(length, width)
        self.mix = nn.Linear(3 * width, width)
        self.blocks = nn.ModuleList(
            _Block(width=width, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(TARGETS))
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3 / TABLE_SCALE)
        for table in (self.action, self.position, self.order):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.zeros_(self.head.bias)

    def forward(self, events: Events) -> Tensor:
        """Log-odds of the actions, (B, L, 3)."""
        item = TABLE_SCALE * self.item(events["item"])
        user = TABLE_SCALE * self.user(events["user"]).unsqueeze(-2).expand_as(item)
        x = self.mix(torch.cat([item, user, item * user], dim=-1))
        x = x + self.position(events["position"]) + self.order.weight
        contribution, like, dwell = events["actions"].unbind(-1)
        action = self.action((contribution + 2 * like + 4 * dwell).long())
        length = x.shape[-2]
        # Column 0 is the place that is always there; column j + 1 is event j, seen from t > j on.
        is_past = torch.ones(length, length + 1, dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            x = block(x, action, is_past)
        return self.head(self.norm(x))


class _Block(nn.Module):
    """Attention with mixed values, then a dense layer; both add to the stream."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.action_value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width)
        self.dense_norm = nn.LayerNorm(width)
        self.dense_in = nn.Linear(width, 2 * width)
        self.dense_out = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x: Tensor, action: Tensor, is_past: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        value = value + self.action_value(action)
        key, value = (F.pad(t, (0, 0, 1, 0)) for t in (key, value))
        query, key, value = (
            t.unflatten(-1, (self._num_heads, -1)).transpose(-3, -2) for t in (query, key, value)
        )
        pooled = F.scaled_dot_product_attention(query, key, value, attn_mask=is_past)
        x = x + self.dropout(self.output(pooled.transpose(-3, -2).flatten(-2)))
        hidden = F.gelu(self.dense_in(self.dense_norm(x)))
        return x + self.dropout(self.dense_out(hidden))
