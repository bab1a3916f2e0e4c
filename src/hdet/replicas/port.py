"""The port: all that the method asks of its replicas, for all N of them at once.

The method is written once, above this protocol. An adapter says where replicas live:
:class:`~hdet.replicas.ranks.RankReplicas` has one in every process,
:class:`~hdet.replicas.stacked.StackedReplicas` has all of them in this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from hdet.explore.values import ExploredValues
from hdet.replicas.copies import WeightsCopy
from hdet.replicas.group import ReplicaGroup, Traffic
from hdet.replicas.losses import LossSum
from hdet.replicas.probe import Probe
from hdet.replicas.warm_start import Norm

MomentsRule = Literal["average", "keep", "reset"]
"""Says what an average does with the optimizer's moments."""
Shares = Sequence[float] | None
"""The share of every replica in a mean, zero for those that are excluded; None for equal shares."""
Told = Callable[[], None]
"""Is called when something has happened."""


class Report(NamedTuple):
    """Tells what is known of one replica at a sync."""

    losses: LossSum
    """Its training losses since the last exchange."""
    is_finite: bool
    """Tells whether all its parameters are finite."""
    score: float | None
    """Its loss on the probe, which may be NaN; None if it was not asked for."""
    is_equal: bool = True
    """Tells whether it holds the parameters of the others where all ought to be equal."""

    @property
    def finite_score(self) -> float | None:
        """The score if it can be compared."""
        return self.score if self.score is not None and math.isfinite(self.score) else None


@runtime_checkable
class Replicas(Protocol):
    """N replicas of a model, wherever they live.

    Nothing here assumes that a replica is a process, or that a parameter is whole in this one: norms and
    finiteness of parameters are completed by the adapter.
    """

    count: int
    """The number of them, N."""
    index: int
    """The replica whose values this process shows."""
    is_writer: bool
    """Tells whether this process writes records, warns and logs, for all of them."""
    has_others: bool
    """Tells whether there is more than one that can be compared and averaged."""
    probe: Probe | None
    """They are scored on it."""
    is_sharded: bool
    """Tells whether a process holds a part of a replica. Checkpoints then have the same entries at all steps:
    ``torch.distributed.checkpoint`` loads into those that are there."""
    has_rows: bool
    """Tells whether tensors as of :meth:`weights` have a row for each replica that is computed here."""
    needs_syncs: bool
    """Tells whether syncs are wanted even where nothing is explored or steered."""
    traffic: Traffic
    """Counts the bytes that this process has put into collectives."""

    @property
    def model(self) -> nn.Module | None:
        """The user's, if it is known."""

    @property
    def differ(self) -> bool:
        """Tell whether they may hold different parameters at the end of a round."""
        ...

    # --- beginning and end ---------------------------------------------------------------------------

    def require_same(self, settings: Mapping[str, object]) -> None:
        """Raise on every replica if settings or layouts of parameters differ between them. Collective."""

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any replica. Collective."""
        ...

    def attach(self, values: ExploredValues, *, moments: MomentsRule, step_made: Told) -> bool:
        """Begin to work for an ensemble; tell whether all hold the same parameters. Collective.

        Args:
            values: what is explored.
            moments: what :meth:`average` does with those of the optimizer.
            step_made: called after every optimizer step.
        """
        ...

    def share_gradients(self, is_shared: bool) -> None:
        """Let replicas train with the mean of their gradients, or each with its own, from now on."""

    def detach(self) -> None:
        """Let go of the ensemble, and remove the hooks."""

    # --- values --------------------------------------------------------------------------------------

    def place(self, multipliers: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Give every replica its multipliers, N for each name; returns what the slots here shall hold."""
        ...

    # --- losses, scores, health ----------------------------------------------------------------------

    def add_loss(self, loss: Any) -> None:
        """Take the loss of a batch, without waiting for the device."""

    def clear_losses(self) -> None:
        """Forget the losses since the last exchange."""

    def score(self) -> list[float]:
        """The loss on the probe of the replicas that live here. Not collective."""
        ...

    def report(self, num_steps: int, scores: Sequence[float] | None) -> list[Report]:
        """The one small exchange of a sync. Collective.

        It raises where replicas are not at the same step or do not share the base. Where parameters differ
        that ought to be equal, the report says which, and it raises if nobody can tell.

        Args:
            num_steps: where the ensemble stands.
            scores: what :meth:`score` returned.
        """
        ...

    def losses_at(self, parameters: Sequence[Tensor], scales: Sequence[float]) -> list[list[float]]:
        """Score the shared weights on the probe with these parameters multiplied by each of the scales.

        They are put back bit for bit. A row for each scale has the losses of the parts of the probe. Call it
        when replicas were averaged. Not collective, unless a replica is sharded.
        """
        ...

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return these numbers of every process. Collective."""
        ...

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether tensors laid out as :meth:`weights` are finite, in all of a replica."""
        ...

    # --- weights -------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """All parameters that are here, of all replicas that are here. Changing them changes the replicas."""
        ...

    def weights_written(self) -> None:
        """Called after :meth:`weights` were changed from outside."""

    def weights_and_buffers(self) -> list[Tensor]:
        """Give what a save point is a copy of."""
        ...

    def as_saved(self, tensors: Sequence[Tensor], *, copies: bool = True) -> list[Tensor]:
        """Return what a checkpoint holds of tensors laid out as the first of :meth:`weights_and_buffers`.

        They are copies in host memory.

        Args:
            tensors: what is saved.
            copies: False for tensors in host memory that nobody will change.
        """
        ...

    def average(
        self, excluded: Collection[int], *, like_weights: Sequence[Tensor] = (), weights: Shares = None
    ) -> bool:
        """Give every replica the mean over those that are not excluded, if they differ: tell. Collective.

        Replicas that ought to be equal and are not get the parameters, buffers and moments of the others.

        Args:
            excluded: left out of the mean; they receive it.
            like_weights: tensors laid out as :meth:`weights` that are averaged with them.
            weights: the share of every replica.
        """
        ...

    def average_tensors(
        self, tensors: Sequence[Tensor], excluded: Collection[int], *, weights: Shares = None
    ) -> None:
        """Give every replica the mean of these tensors, laid out as :meth:`weights`. Collective.

        Args:
            tensors: changed in place.
            excluded: left out of the mean; they receive it.
            weights: as in :meth:`average`.
        """

    def copy(self, donor: int, receivers: Collection[int], *, like_weights: Sequence[Tensor] = ()) -> None:
        """Give replicas all that another one holds: parameters, buffers, optimizer state. Collective.

        Args:
            donor: where it comes from.
            receivers: who gets it.
            like_weights: further tensors to copy.
        """

    def perturb(self, noise_scale: float, *, norm: Norm, seed: int) -> None:
        """Add Gaussian noise to the parameters, a different draw for every replica (paper, eq. 10)."""

    def equal_group(self) -> ReplicaGroup:
        """Those who hold the same parameters now, so that each can keep a part of a copy.

        This process alone where they differ, or where all of them live here.
        """
        ...

    def save_point(
        self, *, on_cpu: bool, spare: WeightsCopy | None = None, saved: Sequence[Tensor] | None = None
    ) -> WeightsCopy:
        """Copy the weights and buffers, for :meth:`restore`. Not collective.

        The optimizer's moments are not kept: they are twice the weights with Adam, and those of a learning
        rate that is about to be lowered.

        Args:
            on_cpu: keep the copies in host memory.
            spare: an earlier one, which is not needed any more. Its memory is used where that fits.
            saved: what a checkpoint holds of a save point, to be copied instead.
        """
        ...

    def restore(self, point: WeightsCopy) -> None:
        """Put a save point back on every replica, with an optimizer as before its first step. Collective.

        The save point stays good.
        """
