"""RowValues: what each row uses of what is explored, where all replicas live in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from hdet.replicas.port import Values


class RowValues:
    """The multipliers of all rows. The optimizer and the model hold the shared values.

    Args:
        values: what is explored.
    """

    def __init__(self, values: Values) -> None:
        self._values, self.explores = values, values.explores
        self._multipliers: dict[str, Sequence[float]] = {}

    def place(self, multipliers: Mapping[str, Sequence[float]]) -> None:
        """Give every row its multipliers, one for each row and name."""
        self._multipliers |= multipliers

    def in_group(self, group_index: int, *, num_rows: int) -> dict[str, list[float]]:
        """The explored values of a parameter group, for the first rows."""
        rows = {name: row[:num_rows] for name, row in self._multipliers.items()}
        return self._values.in_group(group_index, rows)

    @contextmanager
    def one_by_one(self) -> Iterator[Callable[[int], None]]:
        """Yields what puts a row's values where the model reads them; afterwards it reads the shared ones."""
        try:
            yield lambda row: self._use({name: rhos[row] for name, rhos in self._multipliers.items()})
        finally:
            self._use(dict.fromkeys(self._multipliers, 1.0))

    def _use(self, multipliers: Mapping[str, float]) -> None:
        self._values.use_static(multipliers)
