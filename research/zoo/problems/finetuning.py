"""Fine-tuning of a small GPT: it has learned Python source, and now learns other text, or to classify."""

from __future__ import annotations

import abc
import functools
import gzip
import itertools
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from hdet.lab.tasks.charlm import CharLM
from hdet.lab.tasks.task import mean
from hdet.method.fan_out import derived_seed
from research.zoo.corpora import LANGUAGES, frequent_words
from research.zoo.examples import Classified, Parts, parted
from research.zoo.problem import Problem
from research.zoo.sources import shuffled_epochs
from research.zoo.storage import debian_files, prepared

__all__ = ["FinetuneAll", "FinetuneLora", "FinetuneWords", "LoraLinear"]

_BASE = CharLM(width=64, num_layers=2, num_heads=4, length=64, batch_size=32)
_NUM_TRAIN, _NUM_PROBE, _NUM_EVALUATION = 2048, 256, 768
_GLOSSES_PER_DOCUMENT = 50
_NUM_WORDS, _MAX_LETTERS = 10_000, 9

Batch = tuple[Tensor, Tensor]


class _Finetuning(Problem):
    """What both have in common: the model that they begin with, windows of text, and the loss."""

    num_examples = _NUM_TRAIN
    batch_size = 8
    clip_norm = 1.0
    loss_unit = "nats per character"
    text: ClassVar[str]
    """A Debian package."""

    @abc.abstractmethod
    def documents(self) -> dict[str, str]:
        """The text in documents, each under a name. A document is trained on or held out as a whole."""

    @functools.cached_property
    def _windows(self) -> dict[str, Tensor]:
        return prepared(f"finetuning-{self.text}-1", lambda: _split(self.documents()))

    def train_batches(self, *, seed: int, replica: int = 0, start: int = 0) -> Iterator[Batch]:
        """Shuffled epochs, another order for every replica."""
        windows = self._windows["train"]
        epochs = shuffled_epochs(len(windows), self.batch_size, seed=seed, replica=replica, start=start)
        for chosen in epochs:
            yield _batch(windows[chosen])

    def probe_batch(self) -> Batch:
        """Windows of documents that are neither trained nor evaluated on."""
        return _batch(self._windows["probe"])

    def evaluation_batches(self) -> Iterable[Batch]:
        """Windows of held-out documents."""
        return [_batch(windows) for windows in self._windows["evaluation"].chunk(24)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the next character."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def metrics(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Loss, and the share of characters that are guessed right."""
        losses, hits = [], []
        for tokens, targets in batches:
            logits = model(tokens)
            losses.append(F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item())
            hits.append((logits.argmax(dim=-1) == targets).float().mean().item())
        return {"loss": mean(losses), "accuracy": mean(hits)}


class FinetuneAll(_Finetuning):
    """All weights are fine-tuned on a little English prose: WordNet's explanations of words.

    The source is Debian's ``wordnet-base``. Fifty explanations that follow each other are a document.
    Every seed begins with the same weights.
    """

    family = "fine-tuning, all weights"
    split = "dev"
    num_replicas = 2
    num_steps = 300
    learning_rate = 5e-3
    weight_decay = 0.01
    text = "wordnet-base"

    def build_model(self, seed: int) -> nn.Module:
        """The model that has learned Python."""
        return _pretrained()

    def documents(self) -> dict[str, str]:
        """Fifty explanations each."""
        folder = debian_files(self.text) / "usr/share/wordnet"
        documents = {}
        for kind in ("adj", "adv", "noun", "verb"):
            lines = (folder / f"data.{kind}").read_text(encoding="utf-8").splitlines()
            glosses = [_ascii(line.partition(" | ")[2].strip()) for line in lines if " | " in line]
            for i in range(0, len(glosses), _GLOSSES_PER_DOCUMENT):
                documents[f"{kind}-{i}"] = "\n".join(glosses[i : i + _GLOSSES_PER_DOCUMENT])
        return documents


class FinetuneLora(_Finetuning):
    """Low-rank adapters are trained on French manual pages; all other weights are frozen.

    The source is Debian's ``manpages-fr``, without accents and markup. A page is a document.
    """

    family = "fine-tuning, LoRA"
    split = "dev"
    num_replicas = 1
    num_steps = 400
    learning_rate = 1e-2
    rank: ClassVar[int] = 4
    text = "manpages-fr"

    def build_model(self, seed: int) -> nn.Module:
        """The model that has learned Python, with adapters on every linear layer of its blocks."""
        model = _pretrained().requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            for block in model.get_submodule("blocks").children():
                for name, layer in list(block.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(block, name, LoraLinear(layer, self.rank))
        return model

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The adapters alone."""
        return [{"name": "adapters", "params": [p for p in model.parameters() if p.requires_grad]}]

    def documents(self) -> dict[str, str]:
        """A page each."""
        folder = debian_files(self.text) / "usr/share/man/fr"
        documents = {}
        for file in folder.rglob("*.gz"):
            if file.is_symlink():  # another name of a page
                continue
            page = gzip.decompress(file.read_bytes()).decode("utf-8", errors="replace")
            text = re.sub(r"^\.\\\".*\n|^'\\\".*\n", "", page, flags=re.MULTILINE)  # comments
            text = re.sub(r"^[.'][A-Za-z\\]+[ \t]*", "", text, flags=re.MULTILINE)  # macros, not their text
            text = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\[&%|^:]|\\\((?:lq|rq|aq|dq)|\\[(\[]\w+\]?", "", text)
            text = text.replace("\\ ", " ").replace("\\-", "-").replace("\\e", "\\")
            documents[file.name] = re.sub(r"\n\s*\n+", "\n", _ascii(text))
        return documents


class LoraLinear(nn.Module):
    r"""A linear layer with a low-rank addition (Hu et al. 2021): :math:`y = Wx + b + \frac{\alpha}{r} BAx`.

    ``A`` begins as any linear layer of torch, ``B`` at zero. :math:`\alpha` is twice the rank, as is usual.

    Args:
        layer: :math:`W` and :math:`b`.
        rank: :math:`r`.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.scale = layer, 2.0
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and the addition."""
        return self.layer(x) + self.scale * self.b(self.a(x))


class FinetuneWords(Classified):
    """Which of twenty languages is a word from? All weights are fine-tuned, with a new head for the classes.

    The words are the most frequent ones of each language (package ``wordfreq``, whose data is CC BY-SA 4.0),
    of nine letters at most and without their accents. A word that two languages then share is left out. The
    body begins with the same weights for every seed, the head does not.
    """

    family = "fine-tuning, new head"
    split = "held out"
    num_replicas = 2
    num_steps = 300
    batch_size = 32
    num_examples = _NUM_WORDS
    learning_rate = 2e-3
    clip_norm = 1.0
    weight_decay = 0.01
    num_at_once = 1000
    loss_unit = "nats per word"

    @functools.cached_property
    def _words(self) -> Parts:
        data = prepared("plain_words-2", _read_words)
        columns = (data["words"].long(), data["languages"].long())
        used = tuple(column[: _NUM_WORDS + 6400] for column in columns)
        return parted(used, num_probed=400, num_evaluated=6000)

    def parts(self) -> Parts:
        """Letters after line breaks, and languages."""
        return self._words

    def build_model(self, seed: int) -> nn.Module:
        """The model that has learned Python; what its last position says is the language."""
        model = _pretrained()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed, "model"))
            model.head = nn.Linear(_BASE.width, len(LANGUAGES))
        return _AtTheEnd(model)


class _AtTheEnd(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[..., -1, :]


def _read_words() -> dict[str, Tensor]:
    """ASCII codes of words, with a line break before and after, and their languages; in random order."""
    languages: dict[str, set[int]] = {}
    for word, language in frequent_words().items():
        if 3 <= len(plain := _ascii(word)) <= _MAX_LETTERS:
            languages.setdefault(plain, set()).add(language)
    known = sorted(word for word, found in languages.items() if len(found) == 1)
    rows = [list(f"{word}\n".rjust(_MAX_LETTERS + 2, "\n").encode("ascii")) for word in known]
    labels = [language for word in known for language in languages[word]]
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    return {
        "words": torch.tensor(rows, dtype=torch.uint8)[order],
        "languages": torch.tensor(labels, dtype=torch.uint8)[order],
    }


def _pretrained() -> nn.Module:
    model = _BASE.build_model(0)
    model.load_state_dict(prepared("gpt-python-1", _pretrain))
    return model


def _pretrain(num_steps: int = 4000) -> dict[str, Tensor]:
    """Weights after training on the source text of Python's library, which takes a minute or two."""
    model = _BASE.build_model(0)
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=num_steps, pct_start=0.1, cycle_momentum=False)
    for batch in itertools.islice(_BASE.train_batches(seed=0), num_steps):
        optimizer.zero_grad()
        _BASE.loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def _batch(windows: Tensor) -> Batch:
    return windows[:, :-1].long(), windows[:, 1:].long()


def _split(documents: dict[str, str]) -> dict[str, Tensor]:
    """Windows of text, drawn without overlap; documents are dealt out by the hash of their keys."""
    texts: dict[str, list[str]] = {"train": [], "probe": [], "evaluation": []}
    for key, text in sorted(documents.items()):
        texts[{0: "evaluation", 1: "probe"}.get(zlib.crc32(key.encode()) % 10, "train")].append(text)
    counts = {"train": _NUM_TRAIN, "probe": _NUM_PROBE, "evaluation": _NUM_EVALUATION}
    result = {}
    for part, count in counts.items():
        codes = torch.frombuffer(bytearray("\n".join(texts[part]), "ascii"), dtype=torch.uint8)
        width = _BASE.length + 1
        windows = codes[: len(codes) // width * width].view(-1, width)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        result[part] = windows[order[:count]].clone()
        assert len(result[part]) == count, f"too little text for {part}"
    return result


def _ascii(text: str) -> str:
    """The text with accents taken off and the rest of what is not ASCII left out."""
    return unicodedata.normalize("NFKD", text).encode("ascii", errors="ignore").decode()
