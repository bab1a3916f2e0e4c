"""TrialMesh: spreads trials over the devices that hold copies of the parameters. Splits batches for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # pyright: ignore[reportMissingImports]


class TrialMesh:
    """Knows the axes of a mesh on which every device has whole parameters, so that trials can differ there.

    Parameters that lie on one device have no such axis. Those that are sharded over one axis of two have the
    other one.

    Args:
        params: the parameters.
    """

    def __init__(self, params: Any) -> None:
        named = [sharding for leaf in jax.tree.leaves(params) if (sharding := _sharding_of(leaf))]
        # The same devices under the same names, with axes that XLA splits along.
        self._mesh = mesh = Mesh(named[0].mesh.devices, named[0].mesh.axis_names) if named else None
        parts = [part for sharding in named for part in sharding.spec]
        taken = {axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))}
        self._axes = () if mesh is None else tuple(n for n in mesh.axis_names if n not in taken)
        self.count = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in self._axes)
        """The number of copies of the parameters."""

    def put(self, tree: Any) -> Any:
        """Keep the same arrays on the same devices. How each step is split is then XLA's to decide.

        Without it a mesh of explicit axes would ask the caller's model for the sharding of every product.
        """
        mesh = self._mesh
        if mesh is None:
            return tree

        def put(leaf: Any) -> Any:
            sharding = _sharding_of(leaf)
            return leaf if sharding is None else jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

        return jax.tree.map(put, tree)

    def repeat(self, params: Any, num_rows: int) -> Any:
        """Repeat the parameters for every trial, as rows that are spread over the devices."""
        mesh, shardings = self._mesh, None
        if mesh is not None:
            shardings = jax.tree.map(
                lambda x: NamedSharding(mesh, self._spec(*getattr(_sharding_of(x), "spec", ()))), params
            )
        return repeat_rows(params, num_rows, shardings)

    def spread(self, tree: Any) -> Any:
        """Spread the first dimension over the devices. For inside of jit."""
        free = PartitionSpec.UNCONSTRAINED
        return self._constrain(tree, lambda x: self._spec(*[free] * (x.ndim - 1)))

    def gather(self, tree: Any) -> Any:
        """Put all of it on every device. For inside of jit."""
        return self._constrain(tree, lambda _: PartitionSpec())

    def _constrain(self, tree: Any, spec_of: Callable[[Any], PartitionSpec]) -> Any:
        mesh = self._mesh
        if mesh is None:
            return tree
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(x))), tree
        )

    def _spec(self, *others: Any) -> PartitionSpec:
        return PartitionSpec(self._axes or None, *others)


def repeat_rows(tree: Any, num_rows: int, shardings: Any) -> Any:
    """Repeat arrays as rows, without making them all on one device. None for no shardings.

    >>> repeat_rows(jnp.arange(2), 3, None).tolist()
    [[0, 1], [0, 1], [0, 1]]
    """

    def repeat(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *jnp.shape(x))), tree)

    return jax.jit(repeat, out_shardings=shardings)(tree)


def _sharding_of(leaf: Any) -> NamedSharding | None:
    """Say how an array lies on the devices of a mesh. None where it lies on one."""
    sharding: Any = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def size_of(batch: Any) -> int:
    """Count the examples of a batch: the first dimension that most of its arrays have, one if none has.

    JAX sorts the keys of a dictionary, so that the first array may be anything.

    >>> size_of({"class_weights": jnp.ones(10), "images": jnp.ones((4, 2)), "labels": jnp.ones(4)})
    4
    """
    counts = Counter(leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf))
    return max(counts, key=lambda size: (counts[size], size), default=1)


def split(batch: Any, num_parts: int, *, least: int = 1) -> tuple[Any, Any]:
    """Make several batches out of one, as rows, and for each array the axis of the rows.

    What has another size than the examples goes to all of them as it is, and has None for an axis. Examples
    that cannot be shared out evenly are left out. Parts that would have fewer than ``least`` are shared by
    neighbours.

    >>> parts, axes = split({"x": jnp.arange(5), "weights": jnp.ones(2)}, 2)
    >>> parts["x"].tolist(), parts["weights"].shape, axes
    ([[0, 1], [2, 3]], (2,), {'weights': None, 'x': 0})
    >>> split(jnp.arange(4), 4, least=2)[0].tolist()
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    size = size_of(batch)
    each = size // num_parts
    leaves, structure = jax.tree.flatten(batch)
    are_split = [jnp.ndim(leaf) > 0 and leaf.shape[0] == size for leaf in leaves]
    starts = [min(i * size // num_parts // least * least, size - least) for i in range(num_parts)]
    shared = np.add.outer(starts, np.arange(least))

    def rows_of(leaf: Any) -> Any:
        if each < least:
            return leaf[shared]
        return leaf[: num_parts * each].reshape(num_parts, each, *leaf.shape[1:])

    parts = [rows_of(leaf) if is_split else leaf for leaf, is_split in zip(leaves, are_split, strict=True)]
    axes = [0 if is_split else None for is_split in are_split]
    return structure.unflatten(parts), structure.unflatten(axes)
