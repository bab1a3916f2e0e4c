"""A graph: the categories of WordNet's nouns, from what they and their neighbours mean."""

from __future__ import annotations

import functools
import re
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.method.fan_out import derived_seed
from research.zoo.examples import Classified, Parts, parted
from research.zoo.storage import debian_files, prepared

__all__ = ["SynsetsGraphSage"]

_VOCABULARY = 3000
_NUM_WORDS, _NUM_NEIGHBOURS = 8, 4
_FIRST_CATEGORY, _NUM_CATEGORIES = 3, 26  # the files of WordNet's lexicographers that have nouns


class SynsetsGraphSage(Classified):
    """Which of 26 categories is a noun of WordNet in, such as animal, food, feeling or place?

    Nouns are nodes of a graph, and pointers such as "is a kind of" and "is a part of" are its edges. A node
    has eight words of its explanation at most. Seen are a node, four of its neighbours, and four of theirs
    (Hamilton et al., 2017). Their categories are not. The source is Debian's ``wordnet-base``, which has
    WordNet's own free licence. Nodes are held out at random.
    """

    family = "graph network"
    split = "held out"
    num_replicas = 8
    num_steps = 600
    batch_size = 8
    learning_rate = 1e-2
    weight_decay = 0.01
    loss_unit = "nats per noun"

    @functools.cached_property
    def _nodes(self) -> Parts:
        nodes = torch.arange(1, len(self._graph["categories"]))  # 0 stands for no neighbour
        order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))
        return parted((nodes[order],), num_probed=400, num_evaluated=6000)

    @functools.cached_property
    def _graph(self) -> dict[str, Tensor]:
        return prepared("noun_graph-1", _read_graph)

    def parts(self) -> Parts:
        """Nodes."""
        return self._nodes

    def finished(self, rows: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The words of 21 nodes: it, its neighbours and theirs; and its category."""
        (nodes,) = rows
        near = self._graph["neighbours"][nodes].long()
        far = self._graph["neighbours"][near].long()
        seen = torch.cat([nodes.unsqueeze(-1), near, far.flatten(1)], dim=1)
        return self._graph["words"][seen].long(), self._graph["categories"][nodes].long()

    def build_model(self, seed: int) -> nn.Module:
        """Embedded words and two layers that look at neighbours."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            return _GraphSage(32, 48)


class _GraphSage(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.own1, self.others1 = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.own2, self.others2 = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, _NUM_CATEGORIES)

    def forward(self, words: Tensor) -> Tensor:
        is_word = (words > 0).unsqueeze(-1)
        nodes = (self.embedding(words) * is_word).sum(dim=-2) / is_word.sum(dim=-2).clamp(min=1)
        inner = nodes[..., : 1 + _NUM_NEIGHBOURS, :]
        node, near, far = nodes.split([1, _NUM_NEIGHBOURS, _NUM_NEIGHBOURS**2], dim=-2)
        far = far.unflatten(-2, (_NUM_NEIGHBOURS, _NUM_NEIGHBOURS)).mean(dim=-2)
        others = torch.cat([near.mean(dim=-2, keepdim=True), far], dim=-2)
        inner = F.relu(self.norm1(self.own1(inner) + self.others1(others)))
        node, near = inner[..., 0, :], inner[..., 1:, :].mean(dim=-2)
        return self.head(F.relu(self.norm2(self.own2(node) + self.others2(near))))


def _read_graph() -> dict[str, Tensor]:
    """Of each node the words, four neighbours drawn among all, and the category. Node 0 is none."""
    path = debian_files("wordnet-base") / "usr/share/wordnet/data.noun"
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("  ")]
    numbers = {line.partition(" ")[0]: i for i, line in enumerate(lines, start=1)}
    explained = [re.findall(r"[a-z]+", line.partition(" | ")[2].partition('"')[0].lower()) for line in lines]
    counts = Counter(word for words in explained for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: _VOCABULARY - 1]
    codes = {word: i for i, word in enumerate(ranked, start=1)}

    size = len(lines) + 1
    words = torch.zeros(size, _NUM_WORDS, dtype=torch.int16)
    neighbours = torch.zeros(size, _NUM_NEIGHBOURS, dtype=torch.int32)
    categories = torch.zeros(size, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for i, line in enumerate(lines, start=1):
        known = [codes[word] for word in explained[i - 1] if word in codes][:_NUM_WORDS]
        words[i, : len(known)] = torch.tensor(known, dtype=torch.int16)
        near = [numbers[offset] for offset in re.findall(r" (\d{8}) n \d{4}", line.partition(" | ")[0])]
        if near:
            drawn = torch.randperm(len(near), generator=generator)[:_NUM_NEIGHBOURS].tolist()
            neighbours[i, : len(drawn)] = torch.tensor([near[j] for j in drawn], dtype=torch.int32)
        categories[i] = int(line.split(" ", 2)[1]) - _FIRST_CATEGORY
    return {"words": words, "neighbours": neighbours, "categories": categories}
