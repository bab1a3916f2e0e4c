"""Export the base schedule that a run has learned, and replay it as a plain scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import require_kind, require_number
from hdet.explore import ExploredValues, Hyperparameter
from hdet.explore.values import hyperparameters_of
from hdet.records import RoundRecord
from hdet.replicas.optimizers import plain_optimizer
from hdet.round_record import is_learning_rate
from hdet.weak_hook import Closing, weak_hook


def export_schedule(records: Iterable[RoundRecord]) -> dict[str, list[float]]:
    """The base of every step, per explored hyperparameter, from the records of a run.

    The result is plain JSON. Entry t is the base of optimizer step t + 1; the last entry is what the
    schedule had moved to after the last step.

    >>> record = RoundRecord(round=0, step=2, num_replicas=2, losses=[1.0, 1.0], num_steps=2,
    ...                      base_trace={"lr": [0.1, 0.2]}, base={"lr": 0.3})
    >>> export_schedule([record])
    {'lr': [0.1, 0.2, 0.3]}
    """
    if isinstance(records, (str, Path)):
        raise TypeError(
            f"records must be the records of a run, got the path {str(records)!r}: pass "
            f"hdet.read_records({str(records)!r})"
        )
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
        self._values = ExploredValues(hyperparameters_of(explore) if explore else [], optimizer)
        names = [tunable.name for tunable in self._values.tunables]
        missing = [name for name in names if name not in schedule]
        if missing:
            raise ValueError(
                f"explore must name what the schedule holds, got {missing} beside {sorted(schedule)}"
            )
        self._others = {name: schedule[name] for name in names}
        optimizer.register_load_state_dict_post_hook(weak_hook(self._find_slots_again))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learned base of every group."""
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
                tunable.move_to(_at(self._others[tunable.name], self.last_epoch))
                tunable.set_slots(multiplier=1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another replay of the same schedule stood."""
        super().load_state_dict(state_dict)
        self._put_others()

    def state_dict(self) -> dict[str, Any]:
        """Where the replay stands; the schedule itself comes from the constructor."""
        return {k: v for k, v in super().state_dict().items() if k not in ("lrs", "_others", "_values")}


def _checked(schedule: Any) -> dict[str, list[float]]:
    must = "schedule must be what hdet.export_schedule returned, such as {'lr': [...]}"
    require_kind(must, schedule, isinstance(schedule, Mapping))
    checked: dict[str, list[float]] = {}
    for name, values in schedule.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        require_kind(f"schedule[{name!r}] must be a list of numbers, one for each step", values, is_list)
        lowest = 0.0 if is_learning_rate(name) else -math.inf
        checked[name] = [
            require_number(f"schedule[{name!r}][{i}]", value, at_least=lowest)
            for i, value in enumerate(values)
        ]
    return checked


def _at(values: Sequence[float], step: int) -> float:
    return values[min(step, len(values) - 1)]
