"""Events, the batch of the feed task, and World, which draws them from a simulated year."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from hdet.method.fan_out import derived_seed

TARGETS = ("contribution", "like", "dwell")
"""Names of what the ranker predicts, in the order of the last dim of ``actions``."""

BASE_RATES = (0.05, 0.12, 0.35)
"""Mean rates of contribution, like and long dwell over the year."""

NUM_TOPICS = 8
SESSION_LENGTH = 8.0  # mean number of events
STEEPNESS = (1.2, 1.1, 0.9)  # s_k: what one unit of utility adds to the log-odds
FATIGUE = (0.7, 0.5, 0.4)  # f_k: what lower positions lose


class Events(TypedDict):
    """Sequences of events, each of one user. All tensors; B sequences of L events."""

    user: Tensor
    """(B,) rows of the user table."""
    item: Tensor
    """(B, L) rows of the item table: what was shown."""
    position: Tensor
    """(B, L) place of the event in its session, from 0; it falls to 0 where a session begins."""
    actions: Tensor
    """(B, L, 3) one where the user contributed, liked, dwelt long; else zero."""
    mask: Tensor
    """(B, L) one for an event, zero for padding at the end."""


class World:
    r"""Users, items and how they meet; everything in it follows from ``seed``.

    At time :math:`\tau` (a fraction of the year) user :math:`u` meets item :math:`i` at position :math:`p` of
    session :math:`s`, and does action :math:`k` if :math:`\ell_k + \epsilon + \lambda_k > 0`:

    .. math::
        z = \langle a_u(\tau) + h_s, c_i \rangle + q_i + \langle g(\tau), c_i \rangle + m_s, \qquad
        \ell_k = b_k + s_k z + r_{uk} + o_{ik} - f_k \log(1 + p)

    with drifting taste :math:`a_u(\tau) = \cos(\omega_u \tau)\, a_u + \sin(\omega_u \tau)\, a'_u`, topics
    :math:`c_i`, the session's intent :math:`h_s` and mood :math:`m_s`, quality :math:`q_i`, the season
    :math:`g(\tau)`, leanings :math:`r_{uk}` and :math:`o_{ik}`, noise :math:`\epsilon` that the three actions
    share and logistic noise :math:`\lambda_k` of each. The constants :math:`b_k` are set so that the mean
    rates are :data:`BASE_RATES`.

    Args:
        num_users: number of users.
        num_items: number of items.
        seed: which world.

    >>> world = World(num_users=100, num_items=50, seed=0)
    >>> events = world.events(4, 8, times=torch.rand(4), generator=torch.Generator().manual_seed(0))
    >>> events["actions"].shape
    torch.Size([4, 8, 3])
    """

    def __init__(self, *, num_users: int, num_items: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(derived_seed(seed, "feed world"))

        def normal(*shape: int, std: float) -> Tensor:
            return std * torch.randn(*shape, generator=generator)

        self._num_users = num_users
        self._tastes = normal(2, num_users, NUM_TOPICS, std=1.0)
        self._speeds = (math.pi / 2) * torch.rand(num_users, 1, generator=generator)
        self._user_leanings = normal(num_users, 3, std=0.5)
        self._topics = normal(num_items, NUM_TOPICS, std=NUM_TOPICS**-0.5)
        self._item_leanings = normal(num_items, 3, std=0.4)
        self._phases = 2 * math.pi * torch.rand(NUM_TOPICS, generator=generator)
        # Few items are shown often. The rank is random, so that the number of an item says nothing.
        ranks = torch.randperm(num_items, generator=generator)
        self._log_popularity = -0.7 * torch.log1p(ranks.float())
        popularity = self._log_popularity - self._log_popularity.mean()
        popularity = popularity / self._log_popularity.std(correction=0).clamp_min(1e-6)
        self._quality = normal(num_items, std=0.5) + 0.5 * popularity
        self._offsets = torch.zeros(3)
        self._offsets = self._calibrated(generator)

    def taste(self, users: Tensor, times: Tensor) -> Tensor:
        """Give what users like at each time, a vector over topics."""
        angle = self._speeds[users] * times.unsqueeze(-1)
        return angle.cos() * self._tastes[0, users] + angle.sin() * self._tastes[1, users]

    def season(self, times: Tensor) -> Tensor:
        """Give what everybody likes at each time, a vector over topics."""
        return 0.7 * torch.cos(2 * math.pi * times.unsqueeze(-1) + self._phases)

    def events(self, num_sequences: int, length: int, *, times: Tensor, generator: torch.Generator) -> Events:
        """Draw sequences, each of a random user at its time.

        Args:
            num_sequences: number of sequences.
            length: events in each.
            times: when each takes place, as a fraction of the year.
            generator: where all draws come from.
        """
        events, logits = self._draw(num_sequences, length, times, generator)
        shared = 0.5 * torch.randn(num_sequences, length, 1, generator=generator)
        own = torch.rand(num_sequences, length, 3, generator=generator)
        events["actions"] = (own < torch.sigmoid(logits + shared)).float()
        return events

    def _draw(
        self, num_sequences: int, length: int, times: Tensor, generator: torch.Generator
    ) -> tuple[Events, Tensor]:
        """Draw sequences without actions, and the log-odds of these."""
        shape = (num_sequences, length)
        users = torch.randint(self._num_users, (num_sequences,), generator=generator)
        taste = self.taste(users, times)
        # What is shown leans to what is popular and to what the user likes, as a feed does.
        weights = torch.exp(self._log_popularity + 0.5 * taste @ self._topics.T)
        items = torch.multinomial(weights, length, generator=generator)

        index = torch.arange(length).expand(shape)
        begins = torch.rand(shape, generator=generator) < 1 / SESSION_LENGTH
        begins[:, 0] = True
        session = begins.cumsum(1) - 1
        position = index - torch.where(begins, index, 0).cummax(1).values
        intents = 0.7 * torch.randn(*shape, NUM_TOPICS, generator=generator)
        moods = torch.randn(shape, generator=generator)
        intent = intents.gather(1, session.unsqueeze(-1).expand(-1, -1, NUM_TOPICS))

        direction = (taste + self.season(times)).unsqueeze(1) + intent
        utility = (direction * self._topics[items]).sum(-1) + self._quality[items] + moods.gather(1, session)
        logits = (
            self._offsets
            + torch.tensor(STEEPNESS) * utility.unsqueeze(-1)
            + self._user_leanings[users].unsqueeze(1)
            + self._item_leanings[items]
            - torch.tensor(FATIGUE) * torch.log1p(position.float()).unsqueeze(-1)
        )
        events = Events(
            user=users, item=items, position=position, actions=torch.zeros(*shape, 3), mask=torch.ones(shape)
        )
        return events, logits

    def _calibrated(self, generator: torch.Generator) -> Tensor:
        """Find offsets that give the base rates on a sample of the year, by bisection."""
        times = torch.rand(1024, generator=generator)
        _, logits = self._draw(1024, 16, times, generator)
        logits = (logits + 0.5 * torch.randn(1024, 16, 1, generator=generator)).flatten(0, 1).double()
        low, high = torch.full((3,), -20.0).double(), torch.full((3,), 20.0).double()
        rates = torch.tensor(BASE_RATES, dtype=torch.double)
        for _ in range(40):
            middle = (low + high) / 2
            is_above = torch.sigmoid(logits + middle).mean(0) > rates
            low, high = torch.where(is_above, low, middle), torch.where(is_above, middle, high)
        return ((low + high) / 2).float()
