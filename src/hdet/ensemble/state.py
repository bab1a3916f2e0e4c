"""Saves an ensemble, checks a state before anything changes, and loads it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.lr_scheduler import LRScheduler

from hdet.checks import (
    check_counts,
    check_keys,
    check_list,
    check_numbers,
    named,
    require_flag,
    require_kind,
    require_number,
)
from hdet.errors import NotConvergedWarning, NotFiniteError, warn
from hdet.explore import Tunable
from hdet.replicas.tensors import parameters_of

if TYPE_CHECKING:
    from hdet.ensemble.ensemble import Ensemble

_log = logging.getLogger(__name__)

_RESUMED = "resumed"
"""Names the factor of a learning rate that was changed for a resume."""
VERSION = 6
"""Of the state that an ensemble saves."""

_STATE = (
    "version",
    "num_steps",
    "peaks",
    "starts",
    "optimizer_steps_are_seen",
    "losses",
    "tunables",
    "scheduler",
    "controllers",
    "tail",
)
"""It holds at least these."""


def require_fit_to_save(run: Ensemble, *, is_apart: bool, is_new: bool) -> None:
    """Raise where weights are not finite, and warn where one replica's state is not everybody's."""
    replicas = run.replicas
    if is_apart and ((replicas.differ and replicas.has_others) or replicas.needs_syncs):
        warn(
            "the replicas' parameters differ or are not in the model yet, so a checkpoint would keep others "
            "and drop this round's losses: call converge() on every replica before saving",
            NotConvergedWarning,
        )
    parts = ["the mean of the tail"] if run.tail.is_in_parts else []
    parts += [f"the copies of the {one.name}" for one in run.controllers if one.is_in_parts and not is_new]
    if parts:
        warn(
            f"every replica holds a part of {' and of '.join(parts)}, so a checkpoint would not hold it and "
            "a resumed run would go on without it: call converge() on every replica before saving",
            NotConvergedWarning,
        )
    if not replicas.all_finite(replicas.weights()):
        raise NotFiniteError(
            f"at step {run.num_steps} the parameters are not finite, so nothing is saved: resume from the "
            "last checkpoint with a lower learning rate"
        )


def save_parts(run: Ensemble) -> dict[str, Any]:
    """Save the parts of an ensemble. For one more thing: add it here, check it and load it below."""
    return {
        "version": VERSION,
        "total_steps": run.settings.total_steps,
        "sync_every": run.sync_every,
        "num_elements": _num_elements(run),
        "losses": [list(row) for row in run.rounds.losses.rows],
        "tunables": {tunable.name: tunable.state() for tunable in run.explored.tunables},
        "scheduler": getattr(run.scheduler, "state_dict", lambda: None)(),
        "controllers": run.controllers.state_dict(),
        "tail": run.tail.state_dict(),
        "merge": run.rounds.merging.state_dict(),
    }


def _num_elements(run: Ensemble) -> int:
    return sum(p.numel() for p in parameters_of(run.optimizer))


def check_state(state: dict[str, Any], run: Ensemble) -> None:
    """Raise if this is not the state of an ensemble with such run. Nothing is changed."""
    check_version(state)
    check_keys("state_dict", state, _STATE)
    has_length = state.get("total_steps") is not None
    check_counts("state_dict", state, ("num_steps", "total_steps") if has_length else ("num_steps",))
    here = _num_elements(run)
    if (saved := state.get("num_elements", here)) != here:
        raise ValueError(
            f"state_dict must be of a run that trains {here} parameters, got one of {saved}: build the "
            "model that it was saved with"
        )
    check_tunables(state["tunables"], run.explored.tunables)
    learning_rates = run.explored.learning_rates
    for name in ("peaks", "starts"):
        check_list(f"state_dict {name}", state[name], len(learning_rates), "lists")
        for rates, tunable in zip(state[name], learning_rates, strict=True):
            check_numbers(f"state_dict {name}", rates, len(tunable.slots))
    list(_changed_rates(state, run))  # raises
    require_flag("state_dict optimizer_steps_are_seen", state["optimizer_steps_are_seen"])
    losses = state["losses"]  # of any number of replicas
    require_kind("state_dict losses must be a list", losses, isinstance(losses, (list, tuple)))
    for row in losses:
        check_numbers("state_dict losses", row, 3)
    check_schedule(run.scheduler, state["scheduler"])
    run.controllers.check_state(state["controllers"])
    run.tail.check_state("state_dict tail", state["tail"])
    run.rounds.merging.check_state(state.get("merge"))


def load_plan(state: dict[str, Any], run: Ensemble) -> None:
    """Load what is planned: the schedule, and what is known of each hyperparameter."""
    if run.scheduler is not None and state["scheduler"] is not None:
        run.scheduler.load_state_dict(state["scheduler"])
    for tunable in run.explored.tunables:
        tunable.load(state["tunables"][tunable.name])
    for tunable, factor in _changed_rates(state, run):
        tunable.set_factor(_RESUMED, tunable.factors.get(_RESUMED, 1.0) * factor)
        run.warn(
            "another learning rate",
            "this optimizer was built with another learning rate than the run began with. So the run goes on "
            f"with x{factor:.3g} of what the checkpoint has, now {tunable.base:.3g}: build the optimizer as "
            "before to leave it as it was",
        )


def _changed_rates(state: dict[str, Any], run: Ensemble) -> Iterator[tuple[Tunable, float]]:
    """Find the learning rates that are others than the run began with, and by what factor."""
    saved = zip(state["starts"], state["peaks"], strict=True)
    for tunable, here, (start, peak) in zip(run.explored.learning_rates, run.starts, saved, strict=True):
        # An optimizer that was loaded before the ensemble was built has the rates of the checkpoint.
        if any(
            _are_close(here, rates) for rates in (start, peak, state["tunables"][tunable.name]["scheduled"])
        ):
            continue
        factors = [a / b if b else 1.0 for a, b in zip(here, start, strict=True)]
        if factors[0] <= 0 or not _are_close(factors, factors[:1] * len(factors)):
            raise ValueError(
                f"optimizer's learning rates must be {start}, as when the run began, or all of them times "
                f"one factor, got {here}: build the optimizer so"
            )
        yield tunable, factors[0]


def _are_close(rates: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(rates, others, strict=True))


def load_progress(state: dict[str, Any], run: Ensemble) -> None:
    """Load what the run has seen, once the ensemble stands at the step that was saved."""
    run.controllers.load_state_dict(state["controllers"])
    run.tail.load_state_dict(state["tail"])
    run.rounds.merging.load_state_dict(state.get("merge"))
    run.rounds.losses.clear(state["losses"])
    planned, total_steps = state.get("total_steps"), run.settings.total_steps
    sync_every, num_replicas = run.settings.sync_every, len(state["losses"])
    for saved, here, text in (
        (
            planned if total_steps is not None else None,
            total_steps,
            "the checkpoint is of a run of %d steps, and this one has %d. A schedule that depends on the "
            "length jumps, or ends at the old length",
        ),
        (
            state.get("sync_every"),
            sync_every,
            "the checkpoint is of rounds of %d steps, and these have %d. Multipliers are drawn anew",
        ),
        (
            num_replicas,
            run.replicas.count,
            "a checkpoint of %d replicas is loaded into %d, so multipliers are spread anew and losses of the "
            "round that was saved are dropped",
        ),
    ):
        if saved is not None and saved != here and run.replicas.is_writer:
            _log.warning(f"step %d: {text}", state["num_steps"], saved, here)


def check_version(state: Any) -> None:
    """Raise if this is not a state of this version."""
    require_kind("state_dict must be what state_dict() returned", state, isinstance(state, Mapping))
    if "version" in state and state["version"] != VERSION:
        raise ValueError(
            f"state_dict must be of version {VERSION}, got version {state['version']!r}: load it with the "
            "release of hdet that wrote it"
        )


def check_tunables(state: Any, tunables: Sequence[Tunable]) -> None:
    """Raise unless these are the states of these hyperparameters."""
    check_keys("state_dict tunables", state, ())
    names = [tunable.name for tunable in tunables]
    if set(state) != set(names):
        raise ValueError(
            f"state_dict must hold the hyperparameters {sorted(names)}, got {sorted(map(str, state))}: "
            "build the ensemble with the parameter groups and explore= that it was saved with"
        )
    for tunable in tunables:
        name, saved = f"state_dict {tunable.name}", state[tunable.name]
        check_keys(name, saved, ("scheduled", "held", "factors", "share"))
        check_numbers(f"{name} scheduled", saved["scheduled"], len(tunable.slots))
        if saved["held"] is not None:
            check_numbers(f"{name} held", saved["held"], len(tunable.slots))
        for factor in named(f"{name} factors", saved["factors"]).values():
            require_number(f"{name} factors", factor, above=0)
        require_number(f"{name} share", saved["share"], at_least=0, at_most=1)


# --- the schedule ------------------------------------------------------------------------------------


class Schedule(Protocol):
    """Has what the ensemble asks of a schedule, as every torch LRScheduler."""

    def step(self) -> Any:
        """Write the values of the next step into the optimizer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Save what a checkpoint keeps."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a checkpoint."""
        ...


def check_schedule(schedule: Schedule | None, state: Any) -> None:
    """Raise if the schedule does not take this. It is as before in any case."""
    if schedule is None or state is None:
        return
    why = _difference(schedule, state) or _refusal(schedule, state)
    if why:
        raise ValueError(
            f"state_dict scheduler must be a state of {type(schedule).__name__}, but {why}: build the "
            "ensemble with the scheduler that it was saved with"
        )


def _difference(schedule: Schedule, state: Any) -> str:
    """Tell how a state differs from those of a scheduler of torch, which takes any; empty if not."""
    if not isinstance(state, Mapping):
        return f"it is {state!r}"
    if not isinstance(schedule, LRScheduler):
        return ""
    own = schedule.state_dict()
    # Releases of torch differ in private names, and earlier ones had "verbose".
    names, saved = ({n for n in keys if n[:1] != "_"} - {"verbose"} for keys in (own, state))
    if names != saved:
        return f"it has {', '.join(sorted(saved - names)) or 'nothing else'} and lacks " + (
            ", ".join(sorted(names - saved)) or "nothing"
        )
    here, there = len(own.get("base_lrs", ())), len(state.get("base_lrs", ()))
    return "" if here == there else f"it has {there} base_lrs and not {here}"


def _refusal(schedule: Schedule, state: Mapping[str, Any]) -> str:
    """Tell why a schedule cannot load a state, by a trial that is taken back; empty if it can."""
    own, names = dict(schedule.state_dict()), set(vars(schedule))
    try:
        schedule.load_state_dict(dict(state))
    except Exception as error:
        return f"it cannot be loaded ({type(error).__name__}: {error})"
    finally:
        schedule.load_state_dict(own)
        for name in set(vars(schedule)) - names:
            delattr(schedule, name)
    return ""
