"""Learns from earlier runs: exports and replays their base schedule, and starts the next run from a prior."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import is_list, require_kind, require_number
from hdet.explore import ExploredValues, Hyperparameter, LearningRate
from hdet.explore.values import hyperparameters_of
from hdet.records import RoundRecord, read_records
from hdet.replicas.optimizers import plain_optimizer, require_resumable
from hdet.round_record import is_learning_rate
from hdet.weak_hook import Closing, WeakHook

_WIDEST = 2.0
"""A group's spread is at most this times the common one, and at least the common one over this."""

_MOST = 0.95
"""A spread of one and more would reach zero."""
_LOWEST = 1 / (25 * 1e4)
"""OneCycleLR's floor over its peak; a schedule may end at zero, a decay cannot."""


def export_schedule(records: Iterable[RoundRecord]) -> dict[str, list[float]]:
    """Export the base of every step, per explored hyperparameter, from the records of a run.

    The result is plain JSON. Entry t is the base of optimizer step t + 1; the last entry is what the
    schedule had moved to after the last step.

    >>> record = RoundRecord(round=0, step=2, num_replicas=2, losses=[1.0, 1.0], num_steps=2,
    ...                      base_trace={"lr": [0.1, 0.2]}, base={"lr": 0.3})
    >>> export_schedule([record])
    {'lr': [0.1, 0.2, 0.3]}
    """
    is_path = isinstance(records, (str, Path))
    remedy = f"pass hdet.read_records({str(records)!r})" if is_path else "pass an hdet.Records"
    is_right = isinstance(records, Iterable) and not (is_path or hasattr(records, "shape"))
    require_kind("records must be the records of a run", records, is_right, remedy)
    schedule: dict[str, list[float]] = {}
    step, last = 0, None
    for record in records:
        remedy = "pass an hdet.Records, or what hdet.read_records returns"
        require_kind("records must hold hdet.RoundRecord", record, isinstance(record, RoundRecord), remedy)
        if record.search is not None:  # before the run
            continue
        if record.step - record.num_steps != step:
            raise ValueError(
                f"records must follow each other from step 0, got one for steps "
                f"{record.step - record.num_steps + 1} to {record.step} after step {step}: "
                "pass all records of the run, those before a resume included"
            )
        for name, trace in record.base_trace.items():
            full = list(trace) * record.num_steps if len(trace) == 1 else list(trace)
            schedule.setdefault(name, []).extend(full)
        step, last = record.step, record
    if last is None:
        raise ValueError(
            "records must hold at least one record of a round, got none: train to the first sync, and export "
            "on replica zero, which alone writes records"
        )
    for name, values in schedule.items():
        values.append(last.base.get(name, values[-1]))
    return schedule


class ReplayLR(LRScheduler, Closing):
    """Replays an exported schedule, exactly, on one device or many.

    Args:
        optimizer: has the parameter groups that the schedule was learned for.
        schedule: from :func:`export_schedule`; entries named ``lr`` or ``lr.GROUP`` are the learning rates.
        last_epoch: index of the last step, when resuming.
        explore: other hyperparameters of the schedule that are to be replayed, built as for the ensemble.

    After its end the last value is kept.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Mapping[str, Sequence[float]],
        last_epoch: int = -1,
        *,
        explore: Sequence[Hyperparameter] = (),
    ) -> None:
        optimizer = plain_optimizer(optimizer)
        require_resumable(optimizer, last_epoch)
        schedule = _checked(schedule)
        # In the order of the groups: lr.GROUP each on its own, or lr, lr[1], ... on one tunable.
        lrs = [values for name, values in schedule.items() if is_learning_rate(name)]
        num_groups = len(optimizer.param_groups)
        if len(lrs) not in (1, num_groups) or not all(lrs):
            raise ValueError(
                "schedule must hold one learning rate or one per parameter group, got "
                f"{sorted(schedule)} for {num_groups} groups: build the groups that were trained"
            )
        self.lrs = lrs * num_groups if len(lrs) == 1 else lrs
        self._values = ExploredValues(hyperparameters_of(explore, may_be_empty=True), optimizer)
        names = [tunable.name for tunable in self._values.tunables]
        missing = [name for name in names if name not in schedule]
        if missing:
            raise ValueError(
                f"explore must name what the schedule holds, got {missing} beside {sorted(schedule)}"
            )
        self._others = {name: schedule[name] for name in names}
        optimizer.register_load_state_dict_post_hook(WeakHook(self._find_slots_again))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Give the learned base of every group."""
        return [_at(values, self.last_epoch) for values in self.lrs]

    def step(self, epoch: int | None = None) -> None:
        """Put the next values in place."""
        super().step(epoch)
        self._put_others()

    def close(self) -> None:
        """Let go of the optimizer, which keeps the values that it has."""
        self._values = ExploredValues([], self.optimizer)  # the hook then finds nothing to write

    def _find_slots_again(self, _: Optimizer) -> None:
        for slot in self._values.slots:
            slot.bind()
        self._put_others()

    def _put_others(self) -> None:
        with self._values.rewriting():
            for tunable in self._values.tunables:
                tunable.hold(_at(self._others[tunable.name], self.last_epoch))
                tunable.set_slots(multiplier=1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another replay of the same schedule stood."""
        super().load_state_dict(state_dict)
        self._put_others()

    def state_dict(self) -> dict[str, Any]:
        """Save where the replay stands; the schedule itself comes from the constructor."""
        return {k: v for k, v in super().state_dict().items() if k not in ("lrs", "_others", "_values")}


def _checked(schedule: Any) -> dict[str, list[float]]:
    must = "schedule must be what hdet.export_schedule returned, such as {'lr': [...]}"
    require_kind(must, schedule, isinstance(schedule, Mapping))
    checked: dict[str, list[float]] = {}
    for name, values in schedule.items():
        must = f"schedule[{name!r}] must be a list of numbers, one for each step"
        require_kind(must, values, is_list(values))
        lowest = 0.0 if is_learning_rate(name) else -math.inf
        checked[name] = [
            require_number(f"schedule[{name!r}][{i}]", value, at_least=lowest)
            for i, value in enumerate(values)
        ]
    return checked


def _at(values: Sequence[float], step: int) -> float:
    return values[min(step, len(values) - 1)]


# --- a start for the next run ----------------------------------------------------------------------


@dataclass(frozen=True)
class Prior:
    """A start for each parameter group, in the order of the groups."""

    groups: tuple[str, ...]
    """Their names in the records."""
    spreads: tuple[float, ...]
    """Wider where earlier runs parted the group from the others, narrower where they did not."""
    drops: tuple[float, ...]
    """The learning rate at the end of the run over its peak."""

    def learning_rate(self, max_lr: float, **settings: Any) -> LearningRate:
        """Give what ``explore`` takes; with ``Controller(form="paper", end="floor")`` groups decay apart.

        Args:
            max_lr: the peak of the new run.
            settings: further arguments of :class:`hdet.LearningRate`.
        """
        require_number("max_lr", max_lr, above=0)
        floors = [max_lr * drop for drop in self.drops]
        return LearningRate(group_spreads=self.spreads, floor=floors, **settings)


def prior_from(runs: Iterable[str | Path | Sequence[RoundRecord]], *, spread: float = 1 / 9) -> Prior:
    r"""Learn a start for each parameter group from the records of earlier runs.

    A group's drop is the geometric mean over runs of its last learning rate over its highest, at least
    OneCycleLR's. Its spread is

    .. math:: \alpha_g = \alpha \cdot \mathrm{clip}(d_g / \bar d,\ 1/2,\ 2)

    with :math:`d_g` the root mean square over runs of how far, on average over the steps, the log learning
    rate of the group is from the mean of all groups.

    Args:
        runs: of each its records, or the path of their file or of the folder that holds ``records.jsonl``.
        spread: the common one.

    >>> def record(lrs):
    ...     return RoundRecord(round=0, step=2, num_replicas=2, num_steps=2, base=lrs,
    ...                        base_trace={name: [0.1, lr] for name, lr in lrs.items()})
    >>> prior = prior_from([[record({"lr.a": 0.05, "lr.b": 0.0125, "lr.c": 0.025})]], spread=0.1)
    >>> [round(drop, 9) for drop in prior.drops]
    [0.5, 0.125, 0.25]
    >>> [round(spread, 3) for spread in prior.spreads]
    [0.15, 0.15, 0.05]
    """
    require_number("spread", spread, above=0, below=1)
    require_kind("runs must be a list of runs", runs, is_list(runs))
    for run in runs:
        is_run = isinstance(run, (str, Path, Iterable))
        require_kind("runs must hold paths, or the records of each run", run, is_run)
    schedules = [_learning_rates(run) for run in runs]
    if not schedules:
        raise ValueError("runs must hold at least one run, got none")
    groups = tuple(schedules[0])
    for i, schedule in enumerate(schedules):
        if tuple(schedule) != groups:
            raise ValueError(
                f"runs must have the same parameter groups, got {list(groups)} and, in run {i}, "
                f"{list(schedule)}: pass runs of one model"
            )
    if len(groups) < 2:
        raise ValueError(
            f"runs must have trained parameter groups with learning rates of their own, got {list(groups)}: "
            "train with several groups and LearningRate(per_group=True)"
        )
    for name in groups:
        if any(max(schedule[name]) <= 0 for schedule in schedules):
            raise ValueError(
                "runs must train every parameter group, got a learning rate of zero throughout for "
                f"{name!r}: leave the group out"
            )
    logs = [[_mean_log(schedule[name]) for name in groups] for schedule in schedules]
    apart = [[value - statistics.fmean(row) for value in row] for row in logs]
    distances = [math.sqrt(statistics.fmean(row[i] ** 2 for row in apart)) for i in range(len(groups))]
    mean = statistics.fmean(distances)
    shares = [min(_WIDEST, max(1 / _WIDEST, d / mean)) if mean > 0 else 1.0 for d in distances]
    drops = [
        math.exp(statistics.fmean(math.log(max(_LOWEST, s[name][-1] / max(s[name]))) for s in schedules))
        for name in groups
    ]
    return Prior(groups, tuple(min(_MOST, spread * share) for share in shares), tuple(drops))


def _learning_rates(run: str | Path | Sequence[RoundRecord]) -> dict[str, list[float]]:
    if isinstance(run, (str, Path)):
        path = Path(run)
        run = list(read_records(path / "records.jsonl" if path.is_dir() else path))
    schedule = export_schedule(run)
    # lr[1], lr[2] are not groups of their own: they follow lr.
    return {n: values for n, values in schedule.items() if is_learning_rate(n) and not n.startswith("lr[")}


def _mean_log(values: Sequence[float]) -> float:
    return statistics.fmean(math.log(max(value, 1e-300)) for value in values)
