"""Import paths of earlier versions: they still work, and say where things are now."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NOW = {
    "hdet.core.checks": "hdet.checks",
    "hdet.core.lr_search": "hdet.search.decisions",
    "hdet.core.merge": "hdet.method.merges",
    "hdet.core.spread": "hdet.method.fan_out",
    "hdet.core.assign": "hdet.method.fan_out",
    "hdet.core.noise": "hdet.method.fan_out",
    "hdet.core.signal": "hdet.method.controller",
    "hdet.core.decay": "hdet.method.controller",
    "hdet.core.shape": "hdet.method.recipe",
    "hdet.core.tail": "hdet.method.recipe",
    "hdet.core": "hdet.method",
    "hdet.schedules.prior": "hdet.schedules.replay",
    "hdet.telemetry.names": "hdet.round_record",
    "hdet.telemetry.record": "hdet.round_record",
    "hdet.telemetry.sinks": "hdet.records",
    "hdet.telemetry.tee": "hdet.records",
    "hdet.telemetry.tracker": "hdet.trackers",
    "hdet.telemetry.tensorboard": "hdet.trackers",
    "hdet.telemetry.wandb": "hdet.trackers",
    "hdet.telemetry.mlflow": "hdet.trackers",
    "hdet.telemetry": "hdet.records",
    "hdet.find": "hdet.search.with_torch",
    "hdet.found_lr": "hdet.search.found",
    "hdet.cli": "hdet.lab.cli",
    "hdet.report": "hdet.lab.page",
    "hdet.run.doctor": "hdet.lab.doctor",
    "hdet.run.memory_cost": "hdet.lab.plan",
    "hdet.run.pool": "hdet.lab.pool",
    "hdet.run.sweep": "hdet.lab.sweep",
    "hdet.run.sync_cost": "hdet.lab.plan",
    "hdet.run": "hdet.lab.train",
    "hdet.tasks.feed.generator": "hdet.lab.tasks.feed_world",
    "hdet.tasks.feed.ranker": "hdet.lab.tasks.feed_ranker",
    "hdet.tasks": "hdet.lab.tasks",
}
"""Old and new paths, of modules and of packages with all that is in them. The first that fits counts."""


class MovedModules(MetaPathFinder, Loader):
    """Finds a module under its old name, and passes on what is asked of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the old name, if there is a new one for it."""
        for old, new in _NOW.items():
            if fullname == old or fullname.startswith(f"{old}."):
                now = new + fullname.removeprefix(old)
                return ModuleSpec(fullname, self, loader_state=now, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let the old name stand for the new module."""
        from hdet.errors import warn  # with what it imports, only where it is needed

        assert module.__spec__ is not None
        now = module.__spec__.loader_state
        moved = importlib.import_module(now)
        warn(f"{module.__name__} has moved: import {now}", DeprecationWarning)
        vars(module)["__getattr__"] = lambda name: getattr(moved, name)


def find_moved_modules() -> None:
    """Let imports know the old names too."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
