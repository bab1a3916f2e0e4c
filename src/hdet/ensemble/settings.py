"""Settings of an ensemble: built, checked, and compared between ranks in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypedDict

from torch import nn
from torch.optim import Optimizer

from hdet.checks import require_choice, require_count, require_kind, require_number
from hdet.explore import ExploredValues, Hyperparameter, LearningRate, WeightDecay
from hdet.explore.values import hyperparameters_of
from hdet.method.controller import num_fixed_rounds
from hdet.method.fan_out import DESIGNS
from hdet.method.merges import MeanMerge, Merge
from hdet.records import RecordSink
from hdet.replicas.probe import Probe, probe_of
from hdet.replicas.tensors import has_coupled_decay
from hdet.steering.needs import AnyController, Facts, comparing, controllers_of, require_needs

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from hdet.replicas import ReplicaGroup, Replicas


class Options(TypedDict, total=False):
    """What :class:`hdet.Ensemble` takes besides the schedule, and every door to it passes on."""

    model: nn.Module | None
    replicas: dist.ProcessGroup | DeviceMesh | ReplicaGroup | Replicas | None
    controllers: Sequence[AnyController]
    probe: Probe | None
    records: RecordSink | None
    seed: int
    average_tail: float
    assignment: Literal["random", "paper", "latin", "factorial"]
    gradients: Literal["shared", "local"]
    merge: Merge | None
    moments: Literal["auto", "average", "keep", "reset"]
    bucket_mib: float
    patience: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds what an ensemble is told, checked when it is built. :class:`hdet.Ensemble` explains each."""

    explore: Sequence[Hyperparameter]
    sync_every: int
    controllers: Sequence[AnyController]
    total_steps: int | None
    seed: int
    bucket_mib: float
    assignment: Literal["random", "paper", "latin", "factorial"]
    gradients: Literal["shared", "local"]
    merge: Merge | None
    moments: Literal["auto", "average", "keep", "reset"]
    probe: Probe | None
    average_tail: float
    records: RecordSink | None

    def __post_init__(self) -> None:
        explore = [LearningRate()] if self.explore is None else hyperparameters_of(self.explore)
        object.__setattr__(self, "explore", explore)
        require_count("sync_every", self.sync_every)
        object.__setattr__(self, "controllers", controllers_of(self.controllers))
        records = self.records
        if self.total_steps is not None:
            require_count("total_steps", self.total_steps)
        require_count("seed", self.seed, at_least=0)
        is_sink = records is None or isinstance(records, RecordSink)
        require_kind("records must have a write(record) method, such as hdet.Records()", records, is_sink)
        require_number("bucket_mib", self.bucket_mib, above=0)
        require_choice("assignment", self.assignment, DESIGNS)
        require_choice("gradients", self.gradients, ("shared", "local"))
        require_choice("moments", self.moments, ("auto", "average", "keep", "reset"))
        self._check_merge()
        probe_of(self.probe)
        has_tail = require_number("average_tail", self.average_tail, at_least=0, below=1) > 0
        if has_tail and self.total_steps is None:
            raise ValueError(
                "total_steps must be given to average the tail of the run, got None: pass it, or leave out "
                "average_tail"
            )
        require_needs(self.controllers, self.facts)

    def _check_merge(self) -> None:
        rule, name = self.rule, type(self.rule).__name__
        is_rule = isinstance(rule, Merge)
        require_kind("merge must be a merge rule such as hdet.OuterMerge(), or None", rule, is_rule)
        if self.gradients != "local" and rule != MeanMerge():
            raise ValueError(
                f"gradients must be 'local' for {name}, got {self.gradients!r}: replicas that share a "
                "gradient hardly differ. Pass gradients='local', or leave merge out"
            )
        if rule.stays_apart and self.moments not in ("auto", "keep"):
            raise ValueError(
                f"moments must be 'auto' or 'keep' with {name}, got {self.moments!r}: replicas stay apart at "
                "a sync, and each has its own. Leave moments out"
            )

    @property
    def facts(self) -> Facts:
        """Tell what controllers find here."""
        return Facts(
            total_steps=self.total_steps,
            sync_every=self.sync_every,
            gradients=self.gradients,
            has_probe=self.probe is not None,
            merge=self.rule,
            explores=any(
                max(getattr(one, "group_spreads", None) or [one.spread]) > 0 for one in self.explore
            ),
            has_learning_rate=any(getattr(one, "is_scheduled", False) for one in self.explore),
            differs_in_decay=any(isinstance(one, WeightDecay) for one in self.explore),
        )

    @property
    def is_local(self) -> bool:
        """Tell if each replica trains with its own gradients."""
        return self.gradients == "local"

    @cached_property
    def num_fixed_rounds(self) -> float:
        """Count the rounds before replicas are compared, in which ``assignment="paper"`` keeps places."""
        return num_fixed_rounds(comparing(self.controllers), self.sync_every)

    @property
    def rule(self) -> Merge:
        """Give the rule by which replicas take from each other."""
        return MeanMerge() if self.merge is None else self.merge

    def moments_for(
        self, optimizer: Optimizer, values: ExploredValues
    ) -> Literal["average", "keep", "reset"]:
        """Tell what a sync does with the moments. If not asked, they are averaged where they differ."""
        if self.moments != "auto":
            return self.moments
        changes = any(tunable.changes_moments for tunable in values.tunables)
        differ = self.is_local or has_coupled_decay(optimizer) or changes
        return "average" if differ and not self.rule.stays_apart else "keep"

    def compared(self) -> dict[str, object]:
        """List what must be the same on every replica. Records may be given to replica zero alone."""
        compared = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "records"}
        return compared | {"merge": self.rule, "probe": self.probe is not None}
