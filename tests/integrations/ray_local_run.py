"""Started by torchrun: examples/ray_train.py in Ray's local mode: these processes are the workers."""

from __future__ import annotations

import runpy

import ray.train

from tests.integrations.launch import ROOT


def main() -> None:
    scaling = ray.train.ScalingConfig
    ray.train.ScalingConfig = lambda num_workers: scaling(num_workers=0)
    runpy.run_path(str(ROOT / "examples/ray_train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
