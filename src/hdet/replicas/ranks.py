"""RankReplicas: one replica in every process, or in several that each hold a part of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import HdetWarning, warn
from hdet.explore.values import ExploredValues
from hdet.replicas.average import Averager
from hdet.replicas.copies import ALONE, WeightsCopy, clear_state
from hdet.replicas.exchange import (
    Message,
    exchange,
    exchange_messages,
    exchange_with_all,
    exchange_within,
    joined_checksum,
    require_same_training,
)
from hdet.replicas.gradients import GradientExchange, SharedGradients
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.health import Equality, Health, Verdict, heal
from hdet.replicas.losses import NOTHING, LossMeter, LossSum, evaluating
from hdet.replicas.optimizers import partitioning_layer, refresh_masters, state_owner, without_ddp
from hdet.replicas.port import MomentsRule, Report, Shares, Told
from hdet.replicas.probe import Probe, batch_statistics, losses_of, scaled
from hdet.replicas.tensors import (
    AveragedTensors,
    Buffers,
    digest,
    fully_sharded,
    is_dry_step,
    layout_text,
    local_part,
    moments_of,
    names_of,
    parameters_of,
    sharded_like,
)
from hdet.replicas.warm_start import Norm, add_noise, was_warm_started
from hdet.weak_hook import WeakHook

_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class RankReplicas:
    """The replicas as this process sees them: it holds one, and reaches the others through its group.

    A replica may span several processes, each with its part of the parameters (fully_shard, HSDP, tensor
    parallelism). What they know of it is joined within the replica before replicas exchange anything, and
    parts are averaged with the same parts of other replicas.
    """

    group: ReplicaGroup
    """Who takes part."""
    optimizer: Optimizer
    """This replica's. The user steps it."""
    model: nn.Module | None
    """Adds its floating-point buffers and its other trainable parameters to what is averaged."""
    probe: Probe | None = field(kw_only=True)
    """Data that this replica is scored on, the same for all."""
    bucket_mib: float = field(kw_only=True)
    """Buffer size for averaging, in MiB."""
    layers: Sequence[Any] = ()
    """The optimizer and its wrappers. Where one of them keeps a part of the optimizer's state on each rank
    (ZeRO), replicas are whole but for that: moments are neither averaged nor healed."""

    needs_syncs = False
    has_rows = False

    def __post_init__(self) -> None:
        self.count = self.group.count
        self.index = self.group.index
        self.has_others = self.group.communicates
        self.is_writer = self.group.is_writer
        self.is_sharded = bool(self.group.within)
        self.traffic = self.group.traffic
        # One of each for the weights and one for copies of them: what they know stays good.
        self._averager = Averager(self.group, bucket_mib=self.bucket_mib)
        self._averager_of_copies = Averager(self.group, bucket_mib=self.bucket_mib)
        self._health = Health()
        self._health_of_moments = Health()
        self._buffers = Buffers(self.model)
        self._equality = Equality(self.group)
        self._verdict = Verdict(None)
        self._losses = LossMeter()
        self.add_loss = self._losses.add
        self._gradients = GradientExchange(self.model)
        self._shared_gradients = SharedGradients(self.group, self.optimizer)
        self._has_local_gradients = False
        self._has_trained_alone = False
        self._is_known_to_part = False
        self._has_parted = False  # whether replicas may differ though nothing is explored
        self._first_checksum = 0.0
        self._moments_rule = "keep"
        self._explores = False
        self._partitioned_by = partitioning_layer(self.layers)
        # The optimizer of ZeRO holds a part of the parameters, which is another one on each rank.
        self._whole_optimizer = self.optimizer if self._partitioned_by is None else None
        self._averaged = AveragedTensors(self._whole_optimizer, self.model, keeps_count=True)
        self._fully_sharded = fully_sharded(self.model)
        self._hooks: list[Any] = []

    @property
    def differ(self) -> bool:
        """Tell whether replicas may hold different parameters.

        They do where values are explored, a start was perturbed, or gradients are local.
        """
        return self._explores or self._has_parted or self._has_local_gradients

    # --- beginning and end ---------------------------------------------------------------------------

    def require_same(self, settings: Mapping[str, object]) -> None:
        """Raise on every replica if settings or layouts of parameters differ between them. Collective."""
        trained = self._averaged.now(), self._buffers.tensors
        require_same_training(self.group, settings, self.optimizer, self.model, *trained)

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any replica. Collective."""
        is_set = any(row[0] for row in exchange_within(self.group, [float(flag)]))
        return any(row[0] for row in exchange(self.group, [float(is_set)]))

    def attach(self, values: ExploredValues, *, moments: MomentsRule, step_made: Told) -> bool:
        """Begin to work for an ensemble; tell whether all hold the same parameters. Collective."""
        self._values = values
        self._explores = values.explores
        self._moments_rule = moments
        if self.has_others:  # a warm start makes them differ from the beginning
            parts = exchange_within(self.group, [float(self._health.checksum(self.weights()))])
            self._first_checksum = joined_checksum([row[0] for row in parts])
            sums = exchange(self.group, [self._first_checksum])
            self._has_parted = len({row[0] for row in sums}) > 1
        if self._has_parted:
            self._require_whole("start from the same parameters")
            if not was_warm_started(self._averaged.now()) and self.is_writer:
                _log.warning(
                    "replicas begin with different parameters: the first sync averages them. If you did not "
                    "ask for it, use the same seed on every rank"
                )
        self._step_made = step_made
        self._hooks = [self.optimizer.register_step_post_hook(WeakHook(self._optimizer_stepped))]
        return not self._has_parted

    def _optimizer_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        # Most steps have a learning rate, and no device is asked for it.
        lr = optimizer.param_groups[0].get("lr")
        if (isinstance(lr, Tensor) or not lr) and is_dry_step(optimizer):
            return
        if self._has_local_gradients:
            self._gradients.stop()  # a framework may have put it back
            self._has_trained_alone = True
        self._step_made()

    def _require_whole(self, must: str) -> None:
        if self._partitioned_by is not None:
            raise ValueError(
                f"all replicas must {must} with a {self._partitioned_by}, but they do not: each rank steps "
                "its part of the parameters and sends it to the others. Leave the noise out, or use a plain "
                "optimizer"
            )

    def detach(self) -> None:
        """Let go of the optimizer and of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._gradients.resume()

    def share_gradients(self, is_shared: bool) -> None:
        """Let DistributedDataParallel average gradients as it did before, or keep them here."""
        self._has_local_gradients = not is_shared
        if is_shared:
            self._gradients.resume()
        else:
            self._gradients.stop()

    def place(self, multipliers: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """This replica's multipliers: the optimizer here holds its values."""
        return {name: row[self.index] for name, row in multipliers.items()}

    def clear_losses(self) -> None:
        """Forget the losses since the last exchange."""
        self._losses.take()

    def score(self) -> list[float]:
        """The loss of this replica on the probe."""
        assert self.probe is not None and self.model is not None
        self._buffers.put_back()  # a NaN of one batch in rank zero's statistics is in those of all by now
        with evaluating(self.model):
            return [self.probe.mean(without_ddp(self.model)).item()]

    def losses_at(self, parameters: Sequence[Tensor], scales: Sequence[float]) -> list[list[float]]:
        """Score this replica on the probe with these parameters multiplied by each of the scales."""
        assert self.probe is not None
        with (
            evaluating(self.model),
            batch_statistics(self.model),
            scaled(list(map(local_part, parameters))) as put,
        ):
            losses = []
            for scale in scales:
                self._reshard()  # else it computes with the whole weights that it may still hold
                put(scale)
                losses.append(losses_of(self.probe, self.model))
        self._reshard()
        return losses

    def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return these numbers of every process. Collective."""
        if not self.group.joins:
            return [list(numbers)]
        return exchange_with_all(self.group, numbers, "a look at the probe")

    def report(self, num_steps: int, scores: Sequence[float] | None) -> list[Report]:
        """The one small exchange of a sync. Collective."""
        if self._explores and not self._has_local_gradients and not self._shared_gradients.is_seen:
            self._shared_gradients.require(num_steps)
        weights = self.weights()
        moments = self._averaged_moments() if self._moments_rule == "average" else []
        is_finite = self._health.all_finite(weights)
        is_finite = is_finite and (not moments or self._health_of_moments.all_finite(moments))
        losses = self._losses.take()
        if not self.group.joins:  # alone: if more replicas were asked for, they say nothing
            silent = Report(NOTHING, True, None if scores is None else math.nan)
            every = [silent] * self.count
            every[self.index] = Report(losses, is_finite, None if scores is None else scores[0])
            return every
        ought_to_be_equal = self.has_others and not self.differ
        # Local gradients let replicas part in the first round. If they do not, somebody else shares them.
        looks_whether_they_part = (
            self.has_others and self._has_trained_alone and not (self._explores or self._is_known_to_part)
        )
        is_compared = ought_to_be_equal or looks_whether_they_part
        here = Message(
            *losses,
            is_finite=float(is_finite),
            score=math.nan if scores is None else scores[0],
            num_steps=float(num_steps),
            base=digest(repr([tunable.base for tunable in self._values.tunables])),
            checksum=float(self._health.checksum(weights)) if is_compared else 0.0,
            moments=digest(layout_text(moments)) if moments else 0.0,
        )
        every = exchange_messages(self.group, here, f"the sync at step {num_steps}")
        if looks_whether_they_part:
            self._look_whether_they_part([message.checksum for message in every])
        self._verdict = Verdict(None)
        if ought_to_be_equal:
            self._verdict = self._equality.judge(
                every, weights, lambda: names_of(self._averaged.now(), self.optimizer, self.model)
            )
            self._has_parted = self._verdict.agreed is None and any(message.is_finite for message in every)
        return [
            Report(
                LossSum(*message[:3]),
                bool(message.is_finite),
                None if scores is None else message.score,
                r not in self._verdict.odd,
            )
            for r, message in enumerate(every)
        ]

    def _look_whether_they_part(self, checksums: Sequence[float]) -> None:
        if checksums[self.index] == self._first_checksum:
            return  # nothing has moved yet
        self._is_known_to_part = True
        if len(set(checksums)) == 1 and self.is_writer:
            warn(
                "replicas are equal after a round with gradients='local', so something still averages their "
                "gradients, or they train on the same batches: pass the DistributedDataParallel module as "
                "model=, and give each rank its own data",
                HdetWarning,
            )

    def all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether these tensors of this replica are finite, in all its processes."""
        return all(r[0] for r in exchange_within(self.group, [float(self._health.all_finite(tensors))]))

    # --- weights -------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """All parameters of this replica, or the parts of them that are here."""
        tensors = self._averaged.now()
        return list(map(local_part, tensors)) if self._averaged.are_sharded else tensors

    def _averaged_moments(self) -> list[Tensor]:
        optimizer = self._whole_optimizer
        return [] if optimizer is None else list(map(local_part, moments_of(optimizer)))

    def weights_written(self) -> None:
        """Tell those who keep copies of the weights: fully_shard, and ZeRO of DeepSpeed its masters."""
        if self._fully_sharded:
            self._reshard()
        if self._partitioned_by is not None:
            refresh_masters(self.layers)

    def _reshard(self) -> None:
        for module in self._fully_sharded:
            module.reshard()

    def weights_and_buffers(self) -> list[Tensor]:
        """Give what a save point is a copy of."""
        return [*self.weights(), *([] if self.model is None else map(local_part, self.model.buffers()))]

    def as_saved(self, tensors: Sequence[Tensor], *, copies: bool = True) -> list[Tensor]:
        """Return what a checkpoint holds: sharded as the owners, for ``torch.distributed.checkpoint``."""
        owners = [*self._averaged.now(), *([] if self.model is None else self.model.buffers())]
        pairs = zip(tensors, owners, strict=False)
        return [sharded_like(part.detach().to("cpu", copy=copies), owner) for part, owner in pairs]

    def average(
        self, excluded: Collection[int], *, like_weights: Sequence[Tensor] = (), weights: Shares = None
    ) -> bool:
        """Give every replica the mean over those that are not excluded, if they differ: tell. Collective.

        Where all ought to be equal, those that are not get what the others hold.
        """
        agreed, differ = self._verdict.agreed, self.differ
        if agreed is not None and (receivers := {*range(self.count)} - {*agreed} | {*excluded}):
            # They are equal, so nothing is averaged: those that are not get what one of them holds.
            donor = min({*agreed} - {*excluded}, default=agreed[0])
            self.copy(donor, receivers - {donor}, like_weights=like_weights)
        elif agreed is None and (differ or excluded):
            # A replica that is left out takes the others' moments as well: its own would spoil it again.
            if excluded and self._moments_rule == "keep":
                self.copy(min({*range(self.count)} - {*excluded}), excluded)
            moments = self._averaged_moments() if self._moments_rule == "average" else []
            tensors = [*self.weights(), *moments, *like_weights, *self._buffers.tensors]
            self._averager.average_(tensors, *self._share(excluded, weights))
            if self._moments_rule == "reset":
                clear_state(state_owner(self.optimizer))
            self._has_parted = False
            self.weights_written()
        else:
            self._reshard()
        if self._buffers.tensors:
            self._buffers.put_back()
        return differ

    def average_tensors(
        self, tensors: Sequence[Tensor], excluded: Collection[int], *, weights: Shares = None
    ) -> None:
        """Give every replica the mean of these tensors. Collective."""
        self._averager_of_copies.average_(tensors, *self._share(excluded, weights))

    def _share(self, excluded: Collection[int], weights: Shares) -> tuple[float, int]:
        """Return what this replica contributes to a mean, and how many do."""
        if weights is None:
            return self.index not in excluded, self.count - len(excluded)
        return weights[self.index], 1

    def copy(self, donor: int, receivers: Collection[int], *, like_weights: Sequence[Tensor] = ()) -> None:
        """Give replicas all that another one holds. Collective."""
        if self.has_others:
            heal(self.group, self._whole_optimizer, self.model, donor, receivers, like_weights)
            self.weights_written()

    def perturb(self, noise_scale: float, *, norm: Norm, seed: int) -> None:
        """Add Gaussian noise to this replica's parameters (paper, eq. 10)."""
        self._require_whole("keep the same parameters")
        self._reshard()
        parameters = self._averaged.now() if self.model is None else list(self.model.parameters())
        add_noise(parameters, noise_scale, norm=norm, seed=seed, replica=self.index)
        self._has_parted = True

    def equal_group(self) -> ReplicaGroup:
        """All replicas while they ought to be equal, else this one alone."""
        return self.group if self.has_others and not self.differ else ALONE

    def save_point(
        self, *, on_cpu: bool, spare: WeightsCopy | None = None, saved: Sequence[Tensor] | None = None
    ) -> WeightsCopy:
        """Copy the weights and buffers, each replica its part while all are equal."""
        self._reshard()
        weights, group = self.weights(), self.equal_group()
        if spare is None or spare.group is not group:
            buffers = self.weights_and_buffers()[len(weights) :]
            spare = WeightsCopy(weights, buffers, group, "cpu" if on_cpu else None)
            if saved is None:  # it has just been taken
                return spare
        spare.weights = weights
        spare.take(saved)
        return spare

    def restore(self, point: WeightsCopy) -> None:
        """Put weights and buffers back, with an optimizer as before its first step. Collective."""
        owner = state_owner(self.optimizer)
        point.put("going back to a copy")
        clear_state(owner)
        for parameter in parameters_of(owner):
            parameter.grad = None
        self.weights_written()
