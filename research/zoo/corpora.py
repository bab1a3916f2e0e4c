"""Texts for the zoo, taken from packages: as numbers of characters or words, parted by document."""

from __future__ import annotations

import functools
import gzip
import itertools
import re
import struct
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from research.peers.base import load_package
from research.zoo.storage import debian_files, prepared

__all__ = [
    "KJV_CHARACTERS",
    "LANGUAGES",
    "MANUAL_CHARACTERS",
    "WORD_CHARACTERS",
    "WORD_LENGTH",
    "bible_verses",
    "frequent_words",
    "german_manuals",
    "king_james_bible",
    "word_glosses",
    "words_of_languages",
]

Part = Literal["train", "probe", "evaluation"]
Symbols = dict[Part, list[str]]

# --- the King James Bible ------------------------------------------------------------------------

KJV_CHARACTERS = 64
"""Size of the vocabulary: every character of the text, and 0 for others."""

# Few of their verses have a double elsewhere, unlike those of Kings and Chronicles or of the gospels.
_EVALUATED_BOOKS = {"Est", "Prv", "Hos", "Acts", "Heb"}
_PROBE_BOOKS = {"Ruth", "Eccl", "Amos", "Jas"}


@functools.lru_cache(maxsize=1)
def king_james_bible() -> dict[str, Tensor]:
    """Characters of the King James Bible, one verse to a line; whole books are held out."""

    def build() -> dict[str, Tensor]:
        parts: Symbols = {"train": [], "probe": [], "evaluation": []}
        for book, verse in bible_verses():
            is_probe, is_evaluated = book in _PROBE_BOOKS, book in _EVALUATED_BOOKS
            part = "probe" if is_probe else "evaluation" if is_evaluated else "train"
            parts[part].extend(verse + "\n")
        return _numbered(parts, KJV_CHARACTERS)

    return prepared("king_james_bible", build)


def bible_verses() -> list[tuple[str, str]]:
    """The verses of the King James Bible in their order, each after the short name of its book."""
    verses = []
    for line in _unpacked_bible().splitlines()[1:]:
        match = re.fullmatch(r"(\d?[A-Za-z]+)\d+:\d+ (.*)", line)
        assert match is not None, line
        verses.append(match.groups())
    return verses


def _unpacked_bible() -> str:
    """The text from the file of the program ``bible``: windows in the format of Unix ``compress``."""
    data = (debian_files("bible-kjv-text") / "usr/lib/bible.data").read_bytes()
    (num_windows,) = struct.unpack_from(">I", data, 0x58)
    bounds = struct.unpack_from(f">{num_windows + 1}I", data, 0x5C)
    windows = []
    for first, last in itertools.pairwise(bounds):
        window = b"\x1f\x9d\x90" + data[first:last]  # the header of a .Z file, which gzip reads
        windows.append(subprocess.run(["gzip", "-dc"], input=window, capture_output=True, check=True).stdout)
    return b"".join(windows).decode("ascii")


# --- WordNet's glosses ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def word_glosses(num_words: int) -> dict[str, Tensor]:
    """Words and punctuation of WordNet's glosses, a line break after each gloss.

    Neighbours in WordNet's files are often alike, so blocks of a hundred entries are held out.

    Args:
        num_words: size of the vocabulary, with 0 for all rarer words.
    """

    def build() -> dict[str, Tensor]:
        folder = debian_files("wordnet-base") / "usr/share/wordnet"
        glosses = [
            line.partition(" | ")[2]
            for kind in ("noun", "verb", "adj", "adv")
            for line in (folder / f"data.{kind}").read_text(encoding="utf-8").splitlines()
            if " | " in line and not line.startswith("  ")  # the licence
        ]
        parts: Symbols = {"train": [], "probe": [], "evaluation": []}
        for i, gloss in enumerate(dict.fromkeys(glosses)):  # a few entries share theirs
            words = re.findall(r"[^\W\d]+|\d+|[^\w\s]", gloss.lower())
            parts[_part_of(i // 100)] += [*words, "\n"]
        return _numbered(parts, num_words)

    return prepared(f"word_glosses_{num_words}", build)


# --- German manual pages -------------------------------------------------------------------------

MANUAL_CHARACTERS = 128
"""Size of the vocabulary: the most frequent characters, and 0 for others."""

_BLOCKS = {"nf": "fi", "EX": "EE", "de": ".", "TS": "TE"}  # listings, definitions and tables
_FONTS = ("B", "I", "R", "SM", "SB", "BI", "BR", "IB", "IR", "RB", "RI")
_ESCAPES = {"-": "-", " ": " ", "~": " ", "0": " ", "e": "\\", "\\": "\\", "(aq": "'", "(rs": "\\"}
_ESCAPE = re.compile(
    r"\\(?:[hvw]'[^']*'|s[-+]?\d|[fmnFM*]\[[^]]*\]|[fmn*]\(..|[fmn*].|\(..|\[[^]]*\]|.)", re.DOTALL
)


@functools.lru_cache(maxsize=1)
def german_manuals() -> dict[str, Tensor]:
    """Characters of the German manual pages, one paragraph to a line.

    Pages whose names begin with the same word go together. Long paragraphs that other pages repeat are kept
    once. Pages in the mdoc language are left out.
    """

    def build() -> dict[str, Tensor]:
        parts: Symbols = {"train": [], "probe": [], "evaluation": []}
        seen: set[str] = set()
        folder = debian_files("manpages-de") / "usr/share/man/de"
        for path in sorted(folder.rglob("*.gz")):
            if path.is_symlink():
                continue
            family = re.split(r"[-._\d]", path.name)[0]
            part = parts[_part_of(zlib.crc32(family.encode()))]
            for paragraph in _prose_of(path):
                if paragraph not in seen:
                    part.extend(paragraph + "\n")
                if len(paragraph) >= 40:
                    seen.add(paragraph)
        return _numbered(parts, MANUAL_CHARACTERS)

    return prepared("german_manuals", build)


def _prose_of(path: Path) -> list[str]:
    """The paragraphs of a manual page, without markup, listings, and the translators' note at its end."""
    page = gzip.decompress(path.read_bytes()).decode("utf-8")
    _, _, page = page.partition("\n.TH")  # what comes before it defines macros
    page, _, _ = page.partition("\n.SH ÜBERSETZUNG")
    paragraphs: list[list[str]] = [[]]
    block_end = None
    for line in page.splitlines()[1:]:
        words = line[1:].split()
        macro = words[0] if words and line[0] in ".'" else None
        if block_end is not None:
            block_end = None if macro == block_end else block_end
        elif macro in _BLOCKS:
            block_end = _BLOCKS[macro]
        elif line[:1] not in (".", "'"):
            paragraphs[-1].append(line)
        elif macro in _FONTS:
            paragraphs[-1].append(" ".join(words[1:]).replace('"', ""))
        elif macro in ("SH", "SS"):
            paragraphs += [[" ".join(words[1:]).replace('"', "")], []]
        elif not line[1:].startswith('\\"'):  # a comment does not end a paragraph
            paragraphs.append([])
    texts = (_ESCAPE.sub(lambda m: _ESCAPES.get(m[0][1:], ""), " ".join(lines)) for lines in paragraphs)
    return [" ".join(text.split()) for text in texts if text.strip()]


# --- words of twenty languages -------------------------------------------------------------------

LANGUAGES = (
    "ca", "cs", "da", "de", "en", "es", "fi", "fr", "hu", "id",
    "is", "it", "lt", "lv", "nl", "pl", "pt", "ro", "sv", "tr",
)  # fmt: skip
WORD_LENGTH = 16
WORD_CHARACTERS = 96
"""Size of the vocabulary: 0 is the end of a word."""


@functools.lru_cache(maxsize=1)
def words_of_languages() -> dict[str, Tensor]:
    """The 2500 most frequent words of each language in the Latin alphabet, as ``words`` and ``labels``.

    A word of several languages belongs to that in which it is most frequent. The order is random.
    """

    def build() -> dict[str, Tensor]:
        best = frequent_words()
        alphabet = {letter: i + 1 for i, letter in enumerate(sorted(set("".join(best))))}
        assert len(alphabet) < WORD_CHARACTERS, len(alphabet)
        words = torch.zeros(len(best), WORD_LENGTH, dtype=torch.uint8)
        for row, word in zip(words, sorted(best), strict=True):
            row[: len(word)] = torch.tensor([alphabet[letter] for letter in word], dtype=torch.uint8)
        labels = torch.tensor([best[word] for word in sorted(best)], dtype=torch.uint8)
        order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0))
        return {"words": words[order], "labels": labels[order]}

    return prepared("words_of_languages", build)


def frequent_words() -> dict[str, int]:
    """The 2500 most frequent words of each of :data:`LANGUAGES`, each with the number of its language."""
    wordfreq = load_package("wordfreq", "zoo")
    best: dict[str, tuple[float, int]] = {}
    for label, language in enumerate(LANGUAGES):
        frequencies = wordfreq.get_frequency_dict(language, wordlist="small")
        known = [word for word in frequencies if word.isalpha() and 3 <= len(word) <= WORD_LENGTH]
        for word in sorted(known, key=lambda word: (-frequencies[word], word))[:2500]:
            if frequencies[word] > best.get(word, (0.0, 0))[0]:
                best[word] = (frequencies[word], label)
    return {word: label for word, (_, label) in best.items()}


# --- common to all -------------------------------------------------------------------------------


def _part_of(number: int) -> Part:
    """One document in twenty is evaluated on, and one is in the probe."""
    return "evaluation" if number % 20 == 0 else "probe" if number % 20 == 10 else "train"


def _numbered(parts: dict[Part, list[str]], size: int) -> dict[str, Tensor]:
    """Symbols as numbers, by how frequent they are in the training part; 0 is what it seldom or never has."""
    ranked = _by_frequency(parts["train"])[: size - 1]
    numbers = {symbol: i + 1 for i, symbol in enumerate(ranked)}
    dtype = torch.uint8 if size <= 256 else torch.int16
    return {name: _encoded(symbols, numbers, dtype) for name, symbols in parts.items()}


def _by_frequency(symbols: Iterable[str]) -> list[str]:
    counts = Counter(symbols)
    return sorted(counts, key=lambda symbol: (-counts[symbol], symbol))


def _encoded(symbols: Sequence[str], numbers: dict[str, int], dtype: torch.dtype) -> Tensor:
    return torch.tensor([numbers.get(symbol, 0) for symbol in symbols], dtype=dtype)
