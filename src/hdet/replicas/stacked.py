"""StackedReplicas: all replicas in this process, as rows of matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.explore.values import ExploredValues
from hdet.replicas.copies import ALONE, WeightsCopy
from hdet.replicas.group import ReplicaGroup, Traffic
from hdet.replicas.health import Health, rows_are_finite
from hdet.replicas.losses import DeviceSum, LossSum, evaluating
from hdet.replicas.port import MomentsRule, Report, Shares, Told
from hdet.replicas.probe import Probe, batch_statistics, losses_of, scaled
from hdet.replicas.row_optimizers import RowOptimizer
from hdet.replicas.rows import ModelRows, average_rows, join, size_of
from hdet.replicas.warm_start import Norm, add_noise


@dataclass(eq=False, repr=False)
class StackedReplicas:
    """N replicas of a model in this process.

    The model and the optimizer that the user gave are templates. The optimizer holds the shared values, and
    each row has its own. The model is written when replicas are averaged.
    """

    model: nn.Module
    """Is trained; all replicas start from its parameters."""
    optimizer: Optimizer
    """Its groups hold the shared hyperparameters. It is never stepped itself."""
    loss: Callable[[nn.Module, Any], Tensor]
    """``loss(model, batch)``, a scalar tensor."""
    count: int = field(kw_only=True)
    """The number of replicas."""
    vectorize: bool = field(kw_only=True)
    """Compute all replicas at once, or one after the other."""
    joins_equal: bool = field(kw_only=True)
    """Compute replicas that do not differ as one, on all their batches joined."""
    probe: Probe | None = field(kw_only=True)
    """Data that replicas are scored on."""

    index = 0
    is_writer = True
    is_sharded = False
    has_rows = True
    needs_syncs = True  # the user's model is written there

    def __post_init__(self) -> None:
        self.has_others = self.count > 1
        self.traffic = Traffic()
        self.row_optimizer = RowOptimizer(self.optimizer)
        self.rows = ModelRows(
            self.model, self.optimizer, self.loss, num_replicas=self.count, vectorize=self.vectorize
        )
        self._has_local_gradients = False
        self._have_parted = False
        self._explores = True  # until the values are known
        self._losses = DeviceSum(self.rows.matrices[0].device, num_slots=64, shape=(self.count,))
        self.add_loss = self._losses.add
        self.clear_losses = self._losses.clear
        self._multipliers: dict[str, Sequence[float]] = {}  # of all rows, for each explored name

    @property
    def differ(self) -> bool:
        """Tell whether rows may differ from each other."""
        return self._have_parted or self._has_local_gradients or self._explores

    @property
    def num_distinct(self) -> int:
        """Count the rows that are computed: the first one stands for all while they are equal."""
        return 1 if self.joins_equal and not self.differ else self.count

    # --- a training step -----------------------------------------------------------------------------

    def train_step(self, batch: Any, batches: Sequence[Any] | None = None) -> Tensor:
        """Make one optimizer step of every replica, and return their losses.

        Args:
            batch: one batch for all replicas.
            batches: one batch for each replica instead.
        """
        given, num_rows = [batch] if batches is None else list(batches), self.num_distinct
        if num_rows < len(given):
            given = [self._joined(given)]
        with self._static_values() as hold_static_of:
            losses, gradients = self.rows.losses_and_gradients(given, hold_static_of, num_rows)
        if not self._has_local_gradients and num_rows > 1:
            gradients = [gradient.mean(dim=0, keepdim=True) for gradient in gradients]
        self.row_optimizer.step(self.weights(), gradients, self.explored_in)
        # The template is never stepped; this is how torch's schedulers know that a step has been made.
        self.optimizer._opt_called = True  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]
        self._step_made()
        return losses.expand(self.count)

    def _joined(self, batches: list[Any]) -> Any:
        sizes = [size_of(batch) for batch in batches]
        if len(set(sizes)) > 1:  # their mean loss would not be that of all
            raise ValueError(
                "batches must have the same size, one per replica, to be joined, got sizes "
                f"{sizes}: leave out the last batch of an epoch (drop_last=True), or pass join_equal=False"
            )
        return join(batches)

    def explored_in(self, group_index: int) -> dict[str, list[float]]:
        """The explored values of a parameter group, for the rows that are computed."""
        rows = {name: row[: self.num_distinct] for name, row in self._multipliers.items()}
        return self._values.in_group(group_index, rows)

    @contextmanager
    def _static_values(self) -> Iterator[Callable[[int], None]]:
        """Yields what puts a row's values where the model reads them; afterwards it reads the shared ones."""
        values, every = self._values, self._multipliers
        try:
            yield lambda row: values.use_static({name: rhos[row] for name, rhos in every.items()})
        finally:
            values.use_static(dict.fromkeys(every, 1.0))

    # --- beginning and end ---------------------------------------------------------------------------

    def require_same(self, settings: Mapping[str, object]) -> None:
        """Nothing to compare: there is one process."""

    def any(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def attach(self, values: ExploredValues, *, moments: MomentsRule, step_made: Told) -> bool:
        """Begin to work for an ensemble; tell whether all hold the same parameters, which they do."""
        if self.vectorize and values.static_names:
            raise ValueError(
                f"vectorize must be False to explore {values.static_names}, got True: they are read by the "
                "model itself, which then runs once for all replicas. Pass vectorize=False"
            )
        self._values = values
        self._explores = values.explores
        self._moments_rule = moments
        self._step_made = step_made
        return True

    def share_gradients(self, is_shared: bool) -> None:
        """Let rows train with the mean of their gradients, or each with its own."""
        self._has_local_gradients = not is_shared

    def detach(self) -> None:
        """Let go of the ensemble."""
        self._step_made = lambda: None

    # --- values --------------------------------------------------------------------------------------

    def place(self, multipliers: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Give every row its multipliers: the optimizer holds the shared values."""
        self._multipliers |= multipliers
        return dict.fromkeys(multipliers, 1.0)

    # --- losses, scores, health ----------------------------------------------------------------------

    def score(self) -> list[float]:
        """The loss on the probe of every replica."""
        assert self.probe is not None
        with evaluating(self.model), self._static_values() as hold_static_of:
            scores = self.rows.scores(self.probe.mean, hold_static_of, self.num_distinct)
        return scores * (self.count // len(scores))

    def losses_at(self, parameters: Sequence[Tensor], scales: Sequence[float]) -> list[list[float]]:
        """Score the user's model, which holds the mean, with its parameters at each of the scales."""
        assert self.probe is not None
        losses = []
        with evaluating(self.model), batch_statistics(self.model), scaled(parameters) as put:
            for scale in scales:
                put(scale)
                losses.append(losses_of(self.probe, self.model))
        return losses

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """These numbers: there is one process."""
        return [list(numbers)]

    def report(self, num_steps: int, scores: Sequence[float] | None) -> list[Report]:
        """Report what is known of every replica."""
        finite = rows_are_finite([*self.weights(), *self._averaged_moments()])
        finite *= self.count // len(finite)
        losses = [LossSum(*row) for row in zip(*self._losses.take(), strict=True)]
        return [Report(*row) for row in zip(losses, finite, scores or [None] * self.count, strict=True)]

    def _averaged_moments(self) -> list[Tensor]:
        return self.row_optimizer.matrices() if self._moments_rule == "average" else []

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these tensors are finite."""
        return Health().all_finite(tensors)

    # --- weights -------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """The matrices, with the rows that are computed."""
        return [matrix[: self.num_distinct] for matrix in self.rows.matrices]

    def weights_written(self) -> None:
        """Show them in the user's model."""
        self.rows.write_template(0)

    def weights_and_buffers(self) -> list[Tensor]:
        """The rows that are computed."""
        return [rows[: self.num_distinct].detach() for rows in self.rows.tensors()]

    def as_saved(self, tensors: Sequence[Tensor], *, copies: bool = True) -> list[Tensor]:
        """Return what a checkpoint holds of them: one row where all are equal."""
        rows = [t[:1] if bool((t == t[:1]).all()) else t for t in tensors]
        return [tensor.detach().to("cpu", copy=copies) for tensor in rows]

    def average(
        self, excluded: Collection[int], *, like_weights: Sequence[Tensor] = (), weights: Shares = None
    ) -> bool:
        """Give every replica the mean over those that are not excluded, and the user's model too."""
        if not self.differ:
            self.rows.write_template(0)
            return False
        included = [r for r in range(self.count) if r not in excluded]
        if excluded and self._moments_rule == "keep":
            self.copy(included[0], excluded)
        self.rows.average_(included, [*self._averaged_moments(), *like_weights], weights)
        if self._moments_rule == "reset":
            self.row_optimizer.clear()
        self._have_parted = False
        return True

    def average_tensors(
        self, tensors: Sequence[Tensor], excluded: Collection[int], *, weights: Shares = None
    ) -> None:
        """Give every row the mean of these tensors."""
        average_rows(tensors, [r for r in range(self.count) if r not in excluded], weights)

    @torch.no_grad()
    def copy(self, donor: int, receivers: Collection[int], *, like_weights: Sequence[Tensor] = ()) -> None:
        """Give rows all that another one holds."""
        rows = list(receivers)
        for tensor in [*self.rows.tensors(), *self.row_optimizer.matrices(), *like_weights]:
            tensor[rows] = tensor[donor].clone()

    def perturb(self, noise_scale: float, *, norm: Norm, seed: int) -> None:
        """Add Gaussian noise to the model's parameters, a different draw for each replica (paper, eq. 10)."""
        parameters = list(self.model.parameters())
        held = [*parameters, *self.model.buffers()]
        shown = [tensor.detach().clone() for tensor in held]
        for replica in reversed(range(self.count)):  # the first row stands for all while they are equal
            self.rows.write_template(min(replica, self.num_distinct - 1))
            add_noise(parameters, noise_scale, norm=norm, seed=seed, replica=replica)
            self.rows.read_template(replica)
        with torch.no_grad():
            for tensor, value in zip(held, shown, strict=True):
                tensor.copy_(value)
        self._have_parted = True

    def join(self) -> None:
        """Give every replica the parameters and buffers of the user's model."""
        self.rows.read_template()
        self._have_parted = False

    def equal_group(self) -> ReplicaGroup:
        """This process alone: all of them live here."""
        return ALONE

    def save_point(
        self, *, on_cpu: bool, spare: WeightsCopy | None = None, saved: Sequence[Tensor] | None = None
    ) -> WeightsCopy:
        """Copy the rows that are computed."""
        computed = self.weights_and_buffers()
        if spare is None or [rows.shape for rows in spare.weights] != [rows.shape for rows in computed]:
            spare = WeightsCopy(computed, [], ALONE, "cpu" if on_cpu else None)
        spare.weights = computed
        spare.take(saved)
        return spare

    @torch.no_grad()
    def restore(self, point: WeightsCopy) -> None:
        """Put the rows back, and let the optimizer begin again."""
        point.weights = [
            rows[: len(old)] for rows, old in zip(self.rows.tensors(), point.weights, strict=True)
        ]
        point.put("")
        self.row_optimizer.clear()
        self.weights_written()
