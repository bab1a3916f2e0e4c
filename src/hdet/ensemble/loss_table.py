"""LossTable: the losses of all replicas in a round."""

from __future__ import annotations

from collections.abc import Sequence

from hdet.replicas.losses import LossSum


class LossTable:
    """What every replica has seen in this round, the same in every process.

    >>> table = LossTable(2)
    >>> table.add([LossSum(3.0, 2.0, 0.0), LossSum(0.0, 0.0, 1.0)])
    >>> table.means
    [1.5, None]
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self.recent = LossSum()
        """Of all replicas together, since :meth:`take_recent` was called last."""
        self.clear()

    def clear(self, rows: Sequence[Sequence[float]] = ()) -> None:
        """Begin a round, or continue one from a saved table.

        The table belongs to the replicas that filled it: for another number of them it is dropped.
        """
        self.rows = [LossSum()] * self._num_replicas
        if len(rows) == self._num_replicas:
            self.rows = [LossSum(*row) for row in rows]

    def add(self, losses: Sequence[LossSum]) -> None:
        """Add the losses of every replica since the last exchange."""
        self.rows = [row.plus(loss) for row, loss in zip(self.rows, losses, strict=True)]
        for loss in losses:
            self.recent = self.recent.plus(loss)

    def forget(self, replica: int) -> None:
        """Drop what a replica has seen in this round: it was of parameters that are gone."""
        self.rows[replica] = LossSum()

    def take_recent(self) -> float | None:
        """The mean loss of all replicas since the last call; None if there was none."""
        mean, self.recent = self.recent.mean, LossSum()
        return mean

    @property
    def means(self) -> list[float | None]:
        """Mean loss of every replica; None where it saw no finite one."""
        return [row.mean for row in self.rows]
