"""Started with KERAS_BACKEND=torch: the card of Keras, on a model of Keras."""

from __future__ import annotations

import keras
import torch

from tests.integrations.cards import plain_loop, task

torch.set_default_device("cpu")  # it takes a build for CUDA to mean that there is a GPU


def main() -> None:
    names = task()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(1)]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    everything = names["loader"].dataset.tensors
    before = names["loss_of"](model, everything).item()
    found = plain_loop(names | {"model": model, "optimizer": optimizer})
    after = names["loss_of"](model, everything).item()
    print(found)
    assert found.lr[0] > 1e-3 and after < 0.5 * before, (before, after)


if __name__ == "__main__":
    main()
