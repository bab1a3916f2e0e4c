"""Ensemble for JAX: the method of the paper, for replicas that lie along an axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # pyright: ignore[reportMissingImports]

from hdet.checks import require_choice, require_count, require_kind, require_number
from hdet.errors import AllReplicasFailedError, IdenticalLossWarning, bad_argument, warn
from hdet.jax import optax_state
from hdet.jax.optax_state import RATE, EnsembleState, read_values, wide
from hdet.jax.trial_mesh import repeat_rows
from hdet.method import controller as rules
from hdet.method.fan_out import assign, multiplier_at, noise_std
from hdet.round_record import ComparingRecord, RoundRecord


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """Train replicas with different hyperparameters, average them, and steer the shared value (Algorithm 1).

    - :meth:`wrap` makes an optax transformation that uses the replica's own values (fan-out).
    - :meth:`converge` averages the parameters. Call it every ``sync_every`` steps.
    - :meth:`steer` then moves the shared values and draws new multipliers. It alone waits for the devices.

    ``update`` and ``converge`` are written for one replica. They run where the axis has a name: in
    ``jax.shard_map(jax.vmap(step), mesh=mesh, ...)``, one replica to a device, or in
    ``jax.vmap(step, axis_name="replica")``, all on one device. Outside of it, arrays have a row for each.

    Two replicas on the loss x^2 / 2, one a little faster than planned and one a little slower:

    >>> ensemble = Ensemble(num_replicas=2, sync_every=1, spread=0.5)
    >>> tx = ensemble.wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    >>> def step(x, state):
    ...     loss, gradient = jax.value_and_grad(lambda x: x**2 / 2)(x)
    ...     gradient = jax.lax.pmean(gradient, "replica")  # all replicas share it (eq. 2)
    ...     updates, state = tx.update(gradient, state, x, value=loss)
    ...     return optax.apply_updates(x, updates), state
    >>> x, state = ensemble.repeat((jnp.array(1.0), tx.init(jnp.array(1.0))))
    >>> x, state = jax.vmap(step, axis_name="replica")(x, state)
    >>> x.tolist()
    [0.25, 0.75]
    >>> x, state = jax.vmap(ensemble.converge, axis_name="replica")(x, state)
    >>> state, record = ensemble.steer(state)
    >>> x.tolist(), record.multipliers
    ([0.5, 0.5], {'lr': [1.5, 0.5]})
    """

    num_replicas: int
    """Number of replicas, N: the size of the axis."""
    sync_every: int
    """Steps per round, T."""
    spread: float | Mapping[str, float] = 1 / 9
    """Half-width of the multipliers, of the learning rate or by the names of the optimizer's values:
    ``{"learning_rate": 1 / 9, "weight_decay": 0.5}``."""
    schedule: Callable[[Any], Any] | None = None
    """The plan of the learning rate, a function of the steps so far. Its value multiplies the learning rate
    that the optimizer was built with. None for a constant."""
    controllers: Sequence[rules.Controller] = ()
    """What moves the shared values: ``[hdet.Controller(form="paper", ...)]``. Without one they follow the
    plan."""
    total_steps: int | None = None
    """Length of the run, at whose end the controller's decay ends."""
    gradients: Literal["shared", "local"] = "shared"
    """``"shared"`` where you average gradients over the axis, as in the paper. With ``"local"`` ones
    :meth:`converge` averages what the optimizer keeps too."""
    axis_name: str = "replica"
    """Name of the axis that replicas lie along."""
    seed: int = 0
    """Seed of the permutations (eq. 9), which are those of :class:`hdet.Ensemble`."""

    def __post_init__(self) -> None:
        require_count("num_replicas", self.num_replicas)
        require_count("sync_every", self.sync_every)
        require_count("seed", self.seed, at_least=0)
        require_choice("gradients", self.gradients, ("shared", "local"))
        if self.total_steps is not None:
            require_count("total_steps", self.total_steps)
        for name, spread in self._spreads.items():
            require_number(f"spread of {name}", spread, at_least=0, below=1)
        if self.schedule is not None and RATE not in self._spreads:
            raise ValueError(
                f"spread must name the {RATE} where it has a schedule, got {self.spread}: add {RATE!r}: 0.0"
            )
        is_list = isinstance(self.controllers, Sequence) and len(self.controllers) <= 1
        if not is_list or not all(
            isinstance(one, rules.Controller) and one.form == "paper" and one.end != "floor"
            for one in self.controllers
        ):
            raise bad_argument(
                "controllers",
                "must be [hdet.Controller(form='paper')] with a number as end, or empty",
                repr(self.controllers),
            )
        if self.total_steps is None and any(one.end != 1 for one in self.controllers):
            raise bad_argument("total_steps", "must be given for a controller whose decay ends", "None")

    def wrap(self, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Let every replica use its own values: base times multiplier (paper, eqs. 1 and 2).

        ``update`` needs ``value``, the replica's own loss, and hands it on with all else that it is given.

        Args:
            tx: an optimizer whose values are in its state, as :func:`optax.inject_hyperparams` puts them.
        """
        inner = optax_state.require_transformation(tx)

        def init(params: Any) -> EnsembleState:
            inner_state = inner.init(params)
            found = [optax_state.require_values(inner_state, name) for name in self._spreads]
            planned = jnp.array([value.astype(wide(value)) for values in found for value in values])
            zeros = jnp.zeros_like(planned)
            return EnsembleState(
                count=jnp.zeros((), jnp.int32),
                planned=planned,
                held=zeros,
                velocity=zeros,
                multipliers=jnp.array([*self._multipliers(0, inner_state).values()], planned.dtype),
                losses=jnp.zeros(3, planned.dtype),
                reports=jnp.zeros((self.num_replicas, 4), planned.dtype),
                inner_state=inner_state,
            )

        def update(
            updates: Any, state: EnsembleState, params: Any = None, *, value: Any = None, **extra_args: Any
        ) -> tuple[Any, EnsembleState]:
            require_kind("value must be this replica's loss", value, value is not None, "pass value=loss")
            values = iter(self._bases(state, state.count) * state.multipliers[:, self._replica()])
            inner_state = state.inner_state
            for name in self._spreads:
                inner_state = optax_state.write_values(inner_state, values, name)
            updates, inner_state = inner.update(updates, inner_state, params, value=value, **extra_args)
            is_finite = jnp.isfinite(value)
            seen = jnp.stack([jnp.where(is_finite, value, 0), is_finite, ~is_finite])
            losses = state.losses + seen.astype(state.losses.dtype)
            return updates, state._replace(count=state.count + 1, losses=losses, inner_state=inner_state)

        return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]

    def repeat(self, tree: Any, mesh: Mesh | None = None) -> Any:
        """Repeat arrays as rows, one for each replica. With a mesh they lie along its axis."""
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(self.axis_name))
        return repeat_rows(tree, self.num_replicas, sharding)

    def converge(self, params: Any, state: EnsembleState) -> tuple[Any, EnsembleState]:
        """Average over the replicas (paper, eq. 3), and exchange their losses.

        A replica whose parameters are not finite, or that saw no finite loss in the round, is left out of the
        mean and gets it. You can call it within a round too, before an evaluation for instance.
        """
        self._replica()  # raises where the axis has no name
        weights = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
        is_finite = jnp.all(jnp.array([jnp.isfinite(x).all() for x in weights]))
        is_healthy = is_finite & ((state.losses[1] > 0) | (state.losses[2] == 0))
        num_healthy = jax.lax.psum(is_healthy.astype(jnp.float32), self.axis_name)

        def mean(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            total = jax.lax.psum(jnp.where(is_healthy, x, 0).astype(wide(x)), self.axis_name)
            return jnp.where(num_healthy > 0, (total / num_healthy).astype(x.dtype), x)

        reports = jax.lax.all_gather(jnp.append(state.losses, is_finite), self.axis_name)
        inner_state = state.inner_state
        if self.gradients == "local":  # with shared ones it is the same on all replicas
            inner_state = jax.tree.map(mean, inner_state)
        return jax.tree.map(mean, params), state._replace(reports=reports, inner_state=inner_state)

    def steer(self, state: EnsembleState) -> tuple[EnsembleState, RoundRecord]:
        """End a round: let the controller move the bases (eqs. 4 to 7), and draw new multipliers (eq. 9).

        Call it outside of ``jit``, after :meth:`converge`, with the rows of all replicas.

        Returns:
            The state that the next round begins with, and what this round saw and decided. A
            :class:`hdet.JsonlSink` can write it.
        """
        told = EnsembleState._make([*map(_first_row, state[:-1]), state.inner_state])
        step, num_steps = int(told.count), int(told.reports[0, 1:3].sum())
        if num_steps != self.sync_every:
            raise ValueError(
                f"state must be what converge returned after a round of {self.sync_every} steps, got one of "
                f"{num_steps}: call converge, then steer, every sync_every steps"
            )
        round_index = step // self.sync_every
        multipliers = self._multipliers(round_index - 1, told.inner_state)
        bases = dict(zip(multipliers, self._bases(told, step - 1).tolist(), strict=True))
        record = RoundRecord(
            round=round_index - 1,
            step=step,
            num_replicas=self.num_replicas,
            num_steps=num_steps,
            converged=True,
            positions=assign("random", self.num_replicas, self.seed, round_index - 1, list(multipliers)),
            multipliers=multipliers,
            values={name: [base * rho for rho in multipliers[name]] for name, base in bases.items()},
            base=bases,
        )
        _measure(record, told.reports.tolist())
        for controller in self.controllers:
            section = ComparingRecord(velocity=dict(zip(bases, told.velocity.tolist(), strict=True)))
            record.controllers[section.name] = section
            if step >= controller.start:
                _steer(controller, self._decay(controller), record, section)
                held, velocity = (np.array([*x.values()]) for x in (record.base, section.velocity))
                told = told._replace(held=held, velocity=velocity)
        record.base = dict(zip(bases, self._bases(told, step).tolist(), strict=True))
        drawn = [*self._multipliers(round_index, told.inner_state).values()]
        told = told._replace(multipliers=drawn, losses=0, reports=0)
        return EnsembleState._make([*map(_rows, told[:-1], state[:-1]), state.inner_state]), record

    @property
    def _spreads(self) -> Mapping[str, float]:
        return self.spread if isinstance(self.spread, Mapping) else {RATE: self.spread}

    def _decay(self, controller: rules.Controller) -> float:
        """Give the share of the base that the controller takes away each round."""
        if self.total_steps is None:
            return 0.0
        num_rounds = rules.num_controlled_rounds(controller.start, self.sync_every, self.total_steps)
        return rules.decay_to(float(controller.end), max(1, num_rounds))

    def _multipliers(self, round_index: int, inner_state: Any) -> dict[str, list[float]]:
        """Draw the multipliers of all replicas for a round (eq. 9), by the names that records use."""
        spreads: dict[str, float] = {}
        for name, spread in self._spreads.items():
            count, shown = len(read_values(inner_state, name)), "lr" if name == RATE else name
            names = [shown] if count == 1 else [f"{shown}.{i}" for i in range(count)]
            spreads |= dict.fromkeys(names, spread)
        positions = assign("random", self.num_replicas, self.seed, round_index, list(spreads))
        return {name: [multiplier_at(x, spreads[name]) for x in row] for name, row in positions.items()}

    def _bases(self, state: EnsembleState, count: Any) -> jax.Array:
        """Take the shared values after so many steps: what the controller holds, or what is planned."""
        planned = state.planned
        if self.schedule is not None:
            counts = [len(read_values(state.inner_state, name)) for name in self._spreads]
            are_rates = np.repeat([name == RATE for name in self._spreads], counts)
            planned = jnp.where(are_rates, planned * self.schedule(count), planned)
        return jnp.where(state.held > 0, state.held, planned)

    def _replica(self) -> jax.Array:
        size = None
        with suppress(NameError):
            size = jax.lax.axis_size(self.axis_name)
        if size != self.num_replicas:
            raise ValueError(
                f"num_replicas must be the size of the axis {self.axis_name!r}, which is {size} here, got "
                f"{self.num_replicas}: call update and converge in jax.shard_map over a mesh that has the "
                "axis, or in jax.vmap(..., axis_name=...)"
            )
        return jax.lax.axis_index(self.axis_name)


def _first_row(rows: Any) -> np.ndarray:
    """Read a row. What is read is the same in all, and in other processes only some rows are here."""
    return np.asarray(rows.addressable_shards[0].data)[0]


def _rows(row: Any, old: jax.Array) -> jax.Array:
    """Make a row for each replica, on the devices of the old ones."""
    return jax.device_put(np.broadcast_to(np.asarray(row, old.dtype), old.shape), old.sharding)


def _measure(record: RoundRecord, reports: list[list[float]]) -> None:
    """Tell the record what replicas saw, and who is left out; raises if no replica is healthy."""
    for r, (total, num_finite, num_others, is_finite) in enumerate(reports):
        record.losses.append(total / num_finite if num_finite else None)
        record.num_nonfinite_losses.append(int(num_others))
        if not (is_finite and num_finite):
            record.excluded[r] = "no finite loss in this round" if is_finite else "parameters are not finite"
    healthy = [r not in record.excluded for r in range(len(reports))]
    if not any(healthy):
        raise AllReplicasFailedError(
            f"at step {record.step} no replica is healthy: {record.excluded}. Nothing was averaged. Resume "
            "from the last checkpoint with a lower learning rate. If one replica's batch was bad, pmean has "
            "spread its NaN to all"
        )


def _steer(settings: rules.Controller, decay: float, record: RoundRecord, section: ComparingRecord) -> None:
    """Move the bases in the record by what the replicas saw (paper, eqs. 4 to 7)."""
    seen = {r: x for r, x in enumerate(record.losses) if x is not None and r not in record.excluded}
    losses = list(seen.values())
    if len(set(losses)) == 1 < len(losses):
        warn(
            f"all replicas report the same loss ({losses[0]!r}), so the controller cannot compare them: pass "
            "each replica's own loss as value=, not its mean over the axis",
            IdenticalLossWarning,
        )
    chosen = settings.temperature
    section.temperature = rules.auto_temperature(losses) if chosen == "auto" else float(chosen)
    weights = rules.softmax_weights(losses, section.temperature)
    section.weights = [0.0] * record.num_replicas
    for r, weight in zip(seen, weights, strict=True):
        section.weights[r] = weight
    constants = {"momentum": settings.momentum, "step_size": settings.step_size, "decay": decay}
    for name, values in record.values.items():
        signal = section.signal[name] = rules.weighted_deviation(weights, [values[r] for r in seen])
        old = rules.ControllerState(record.base[name], section.velocity[name])
        record.base[name], section.velocity[name] = rules.paper_update(old, signal, **constants)
        if section.velocity[name] == 0 and (signal or old.velocity):
            section.limited[name] = "the base must stay above zero, so it was halved"


def warm_start(params: Any, noise_scale: float = 0.01, *, axis_name: str = "replica", seed: int = 0) -> Any:
    r"""Add Gaussian noise to the parameters of each replica (paper, eq. 10).

    .. math:: \theta_r \leftarrow \bar\theta_0 + \epsilon_r, \qquad
              \epsilon_r \sim \mathcal N\left(0,\ \nu^2 \lVert\bar\theta_0\rVert^2 / d\right)

    Norm and size are those of each array, as with :func:`hdet.warm_start`. Call it once, after loading the
    checkpoint, where the axis has a name.

    Args:
        params: the parameters of one replica.
        noise_scale: :math:`\nu`.
        axis_name: name of the axis that replicas lie along.
        seed: of the noise, the same for every replica.

    >>> rows = jnp.ones((2, 3))
    >>> noisy = jax.vmap(warm_start, axis_name="replica")(rows)
    >>> bool((noisy[0] != noisy[1]).all()), bool(jnp.abs(noisy - rows).max() < 0.05)
    (True, True)
    """
    require_number("noise_scale", noise_scale, at_least=0)
    key = jax.random.fold_in(jax.random.key(seed), jax.lax.axis_index(axis_name))
    leaves, structure = jax.tree.flatten(params)
    for i, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.floating):
            std = noise_std(noise_scale, jnp.linalg.norm(x.astype(wide(x)).ravel()), max(1, x.size))
            noise = std * jax.random.normal(jax.random.fold_in(key, i), x.shape, wide(x))
            leaves[i] = x + noise.astype(x.dtype)
    return structure.unflatten(leaves)
