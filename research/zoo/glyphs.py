"""Small grey images of letters, drawn with the fonts of Debian's packages."""

from __future__ import annotations

import functools
import logging
import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hdet.method.fan_out import derived_seed
from research.zoo.storage import debian_files, prepared

__all__ = ["LATIN", "OTHER", "SIZE", "latin_glyphs", "other_glyphs"]

SIZE = 16
"""Pixels per side of an image."""

_CANVAS, _EM, _BASELINE = 64, 56, 47  # drawn four times as large as the image
_MAX_ANGLE, _MAX_SHIFT = 10.0, 3.0  # degrees, pixels of the canvas
_MAX_FACES = 4  # of one family, so that none has more than its share


# Noto Sans comes from Open Sans, so both are in one part.
_LATIN_FONTS = {
    "train": (
        "fonts-dejavu-core fonts-liberation fonts-freefont-ttf fonts-lato "
        "fonts-linuxlibertine:LinLibertine_[DMR]* fonts-cmu fonts-gfs-didot fonts-adf-gillius "
        "fonts-adf-mekanus fonts-adf-romande fonts-cantarell fonts-comfortaa fonts-courier-prime fonts-dosis "
        "fonts-georgewilliams fonts-jura fonts-paratype fonts-play fonts-roboto-unhinted fonts-sil-charis "
        "fonts-tuffy fonts-vollkorn"
    ),
    "probe": "fonts-gfs-neohellenic fonts-jetbrains-mono fonts-manrope fonts-yanone-kaffeesatz",
    "evaluation": (
        "fonts-noto-core:NotoSans-* fonts-noto-core:NotoSerif-* fonts-open-sans fonts-clear-sans "
        "fonts-ebgaramond fonts-comic-neue fonts-fantasque-sans fonts-oldstandard fonts-inter "
        "fonts-yrsa-rasa fonts-adf-tribun fonts-b612 fonts-cabin fonts-anonymous-pro fonts-sil-gentiumplus"
    ),
}
LATIN = string.ascii_letters + string.digits
"""The classes of :func:`latin_glyphs`."""

_OTHER_FONTS = {
    "train": (
        "fonts-dejavu-core fonts-freefont-ttf fonts-liberation fonts-lato "
        "fonts-linuxlibertine:LinLibertine_[DMR]* culmus:[A-L]* culmus:[N-Z]* fonts-bpg-georgian:BPG_[A-M]* "
        "fonts-georgewilliams fonts-cantarell fonts-comfortaa fonts-jura fonts-play fonts-roboto-unhinted "
        "fonts-tuffy fonts-vollkorn fonts-gfs-didot"
    ),
    "probe": (
        "fonts-gfs-neohellenic fonts-jetbrains-mono fonts-manrope fonts-sil-ezra fonts-bpg-georgian:BPG_S*"
    ),
    "evaluation": (
        "fonts-noto-core:NotoSans-* fonts-noto-core:NotoSerif-* fonts-noto-core:*Hebrew-* "
        "fonts-noto-core:*Georgian-* culmus:Miriam* fonts-bpg-georgian:BPG_N* fonts-open-sans "
        "fonts-clear-sans fonts-ebgaramond fonts-fantasque-sans fonts-oldstandard fonts-inter "
        "fonts-anonymous-pro fonts-sil-gentiumplus"
    ),
}
_GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
_CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюяё"
_HEBREW = "אבגדהוזחטיכלמנסעפצקרשת"
_GEORGIAN = "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ"
OTHER = [_GREEK, _CYRILLIC, _HEBREW, _GEORGIAN]
"""The alphabets of :func:`other_glyphs`."""


@functools.lru_cache(maxsize=1)
def latin_glyphs() -> Mapping[str, Tensor]:
    """Letters and digits: ``train``, ``train_classes`` and so on."""
    return prepared("latin_glyphs-1", lambda: _draw(_LATIN_FONTS, [LATIN]))


@functools.lru_cache(maxsize=1)
def other_glyphs() -> Mapping[str, Tensor]:
    """Small letters of four scripts: ``train``, ``train_classes`` and so on."""
    return prepared("other_glyphs-1", lambda: _draw(_OTHER_FONTS, OTHER))


def _draw(fonts: Mapping[str, str], alphabets: list[str]) -> dict[str, Tensor]:
    data: dict[str, Tensor] = {}
    for part, sources in fonts.items():
        images, classes = _images(sources.split(), alphabets)
        order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
        data |= {part: images[order], f"{part}_classes": classes[order]}
    return data


def _images(sources: Iterable[str], alphabets: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Images of all letters in all fonts, and their classes, which count through the alphabets.

    Each image is turned and shifted a little, by amounts that depend on the font's file and the letter
    only. A font draws the alphabets that it has whole.

    Args:
        sources: packages, as ``"fonts-lato"``, or some files of them, as ``"fonts-lato:Lato-B*"``.
        alphabets: the letters.
    """
    from PIL import Image, ImageDraw, ImageFont

    images: list[Tensor] = []
    classes: list[int] = []
    for path in _faces(sources):
        font = ImageFont.truetype(str(path), _EM)
        characters = _characters(path)
        first = 0
        for alphabet in alphabets:
            # some fonts have empty glyphs
            has_all = all(ord(c) in characters and font.getmask(c).getbbox() for c in alphabet)
            for i, letter in enumerate(alphabet if has_all else ""):
                generator = torch.Generator().manual_seed(derived_seed(0, "glyph", path.name, ord(letter)))
                turn, right, down = (2 * torch.rand(3, generator=generator) - 1).tolist()
                canvas = Image.new("L", (_CANVAS, _CANVAS))
                place = (_CANVAS / 2 + _MAX_SHIFT * right, _BASELINE + _MAX_SHIFT * down)
                ImageDraw.Draw(canvas).text(place, letter, fill=255, font=font, anchor="ms")
                canvas = canvas.rotate(_MAX_ANGLE * turn, Image.Resampling.BILINEAR)
                images.append(torch.from_numpy(np.array(canvas.reduce(_CANVAS // SIZE))))
                classes.append(first + i)
            first += len(alphabet)
    return torch.stack(images), torch.tensor(classes)


def _faces(sources: Iterable[str]) -> Iterator[Path]:
    """Font files, evenly chosen where a family has many."""
    from PIL import ImageFont

    for source in sources:
        package, _, pattern = source.partition(":")
        files = {
            path.stem: path  # once, where there is an .otf and a .ttf
            for path in sorted(debian_files(package).rglob(pattern or "*"))
            if path.suffix.lower() in (".otf", ".ttf") and path.is_file() and not path.is_symlink()
        }
        families = {path: ImageFont.truetype(str(path), _EM).getname()[0] for path in files.values()}
        sizes, seen = Counter(families.values()), Counter[str | None]()
        for path, family in families.items():
            rank, stride = seen[family], math.ceil(sizes[family] / _MAX_FACES)
            seen[family] += 1
            if rank % stride == 0:
                yield path


def _characters(path: Path) -> set[int]:
    from fontTools.ttLib import TTFont

    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns about old dates
    with TTFont(path, lazy=True) as font:
        return set(font.getBestCmap() or ())
