"""RankReplicas: one replica in every process, or in several that each hold a part of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigurationMismatchError, HdetWarning, warn
from hdet.replicas.average import Averager
from hdet.replicas.copies import ALONE, WeightsCopy, clear_state
from hdet.replicas.exchange import Message, exchange, exchange_within, joined_checksum, require_same_settings
from hdet.replicas.gradients import GradientExchange
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.healing import Equality, Verdict, heal
from hdet.replicas.health import Health
from hdet.replicas.losses import LossMeter, LossSum, evaluating, number_of
from hdet.replicas.optimizers import partitioning_layer, refresh_masters, state_owner
from hdet.replicas.port import MomentsRule, Report, Shares, Values
from hdet.replicas.tensors import (
    Buffers,
    LocalParts,
    averaged_tensors,
    digest,
    is_dry_step,
    layout_text,
    local_part,
    moments_of,
    names_of,
    parameters_of,
    reshard,
    sharded_like,
)
from hdet.replicas.warm_start import Norm, add_noise
from hdet.weak_hook import weak_hook

_log = logging.getLogger(__name__)


class RankReplicas:
    """The replicas as this process sees them: it holds one, and reaches the others through its group.

    A replica may span several processes, each with its part of the parameters (fully_shard, HSDP, tensor
    parallelism). What they know of it is joined within the replica before replicas exchange anything, and
    parts are averaged with the same parts of other replicas.

    Args:
        group: who takes part.
        optimizer: this replica's optimizer. The user steps it.
        model: adds its floating-point buffers and its other trainable parameters to what is averaged.
        probe: the loss of this replica on a batch that is the same for all.
        bucket_mib: buffer size for averaging, in MiB.
        layers: what the optimizer is wrapped in. Where one of them keeps a part of the optimizer's state on
            each rank (ZeRO), replicas are whole but for that: moments are neither averaged nor healed.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        optimizer: Optimizer,
        model: nn.Module | None,
        *,
        probe: Callable[[], Tensor | float] | None,
        bucket_mib: float,
        layers: Sequence[Any] = (),
    ) -> None:
        self.count, self.index, self.has_others = group.count, group.index, group.communicates
        self.is_writer, self.has_probe = group.is_writer, probe is not None
        self.needs_syncs, self.has_rows, self.is_sharded = False, False, bool(group.within)
        self._group, self._optimizer, self._model, self._probe = group, optimizer, model, probe
        self._averager = Averager(group, bucket_mib=bucket_mib)
        self._averager_of_copies = Averager(group, bucket_mib=bucket_mib)
        self._buffers = Buffers(model)
        self._health, self._health_of_moments = Health(), Health()
        self._equality, self._verdict = Equality(group), Verdict(None)
        self._losses = LossMeter()
        self.add_loss = self._losses.add
        self._gradients, self._has_local_gradients = GradientExchange(model), False
        self._has_trained_alone = self._is_known_to_part = False
        self._first_checksum = 0.0
        self._gradient_norm: Tensor | None = None
        self._moments_rule, self._explores = "keep", False
        self._layers, self._partitioned_by = layers, partitioning_layer(layers)
        self._weights, self._moments = LocalParts(), LocalParts()
        self._has_parted = False  # whether replicas may differ though nothing is explored
        self._hooks: list[Any] = []

    @property
    def differ(self) -> bool:
        """Whether replicas may hold different parameters.

        They do where values are explored, a start was perturbed, or gradients are local.
        """
        return self._explores or self._has_parted or self._has_local_gradients

    @property
    def bytes_sent(self) -> int:
        """What this process has put into collectives so far."""
        return self._group.traffic.num_bytes

    # --- beginning and end ---------------------------------------------------------------------------

    def require_same(self, settings: Mapping[str, object]) -> None:
        """Raise on every replica if settings or layouts of parameters differ between them. Collective."""
        layout = layout_text(self.weights() + self._buffers.tensors)
        require_same_settings(self._group, settings, here={"parameters": layout})

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any replica. Collective."""
        is_set = any(row[0] for row in exchange_within(self._group, [float(flag)]))
        return any(row[0] for row in exchange(self._group, [float(is_set)]))

    def attach(
        self, values: Values, *, moments: MomentsRule, measures_gradients: bool, step_made: Callable[[], None]
    ) -> bool:
        """Begin to work for an ensemble; whether all hold the same parameters. Collective."""
        self._explores, self._moments_rule = values.explores, moments
        if self.has_others:  # a warm start makes them differ from the beginning
            parts = exchange_within(self._group, [float(self._health.checksum(self.weights()))])
            self._first_checksum = joined_checksum([row[0] for row in parts])
            sums = exchange(self._group, [self._first_checksum])
            self._has_parted = len({row[0] for row in sums}) > 1
            if self._has_parted:
                self._require_whole("start from the same parameters")
                if self.is_writer:
                    _log.warning(
                        "replicas begin with different parameters, as after a warm start: the first sync "
                        "averages them. If you did not ask for it, use the same seed on every rank"
                    )

        self._step_made, self._measures_gradients = step_made, measures_gradients
        self._hooks = [self._optimizer.register_step_post_hook(weak_hook(self._optimizer_stepped))]
        return not self._has_parted

    def _optimizer_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if is_dry_step(optimizer):
            return
        if self._has_local_gradients:
            self._gradients.stop()  # a framework may have put it back
            self._has_trained_alone = True
        if self._measures_gradients:
            gradients = [local_part(p.grad) for p in parameters_of(optimizer) if p.grad is not None]
            self._gradient_norm = nn.utils.get_total_norm(gradients) if gradients else None
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

    # --- values --------------------------------------------------------------------------------------

    def place(self, multipliers: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """This replica's multipliers: the optimizer here holds its values."""
        return {name: row[self.index] for name, row in multipliers.items()}

    # --- losses, scores, health ----------------------------------------------------------------------

    def clear_losses(self) -> None:
        """Forget the losses since the last exchange."""
        self._losses.take()

    def score(self) -> list[float]:
        """The loss of this replica on the probe."""
        assert self._probe is not None
        with evaluating(self._model):
            loss = self._probe()
        return [number_of("probe must return", loss)]

    def report(
        self, num_steps: int, base: Callable[[], Mapping[str, float]], scores: Sequence[float] | None
    ) -> list[Report]:
        """The one small exchange of a sync. Collective."""
        weights = self.weights()
        moments = self._averaged_moments()
        ought_to_be_equal = self.has_others and not self.differ
        # Local gradients let replicas part in the first round. If they do not, somebody else shares them.
        looks_whether_they_part = (
            self.has_others and self._has_trained_alone and not (self._explores or self._is_known_to_part)
        )
        is_compared = ought_to_be_equal or looks_whether_they_part
        norm = self._gradient_norm
        here = Message(
            *self._losses.take(),
            is_finite=float(self._health.all_finite(weights) and self._health_of_moments.all_finite(moments)),
            score=math.nan if scores is None else scores[0],
            num_steps=float(num_steps),
            base=digest(repr(dict(base()))) if self._group.joins else 0.0,
            checksum=float(self._health.checksum(weights)) if is_compared else 0.0,
            moments=digest(layout_text(moments)) if moments else 0.0,
            squared_norm=math.nan if norm is None else float(norm) ** 2,
        )
        every = self._exchanged(here, f"the sync at step {num_steps}") if self._group.joins else [here]
        if len(every) < self.count:  # alone, though more replicas were asked for: they say nothing
            every = [here if r == self.index else here.silent() for r in range(self.count)]
        if looks_whether_they_part:
            self._look_whether_they_part([message.checksum for message in every])
        self._verdict = Verdict(None)
        if ought_to_be_equal:
            self._verdict = self._equality.judge(every, weights, self._names, num_steps)
            self._has_parted = self._verdict.agreed is None and any(message.is_finite for message in every)
        return [
            Report(
                LossSum(*message[:3]),
                bool(message.is_finite),
                None if scores is None else message.score,
                r not in self._verdict.odd,
                None if math.isnan(message.squared_norm) else math.sqrt(message.squared_norm),
            )
            for r, message in enumerate(every)
        ]

    def _exchanged(self, here: Message, what: str) -> list[Message]:
        """The messages of all replicas, each joined from those of its processes. Collective."""
        parts = [Message(*row) for row in exchange_within(self._group, here, what)]
        _require_in_step(parts)
        every = [Message(*row) for row in exchange(self._group, Message.joined(parts), what)]
        _require_in_step(every)
        if len({message.moments for message in every}) > 1:
            raise ConfigurationMismatchError(
                "replicas must hold optimizer state for the same parameters, but they do not: with local "
                "gradients a parameter that only some replicas use has state only there. Let every parameter "
                "take part in every loss, or pass moments='keep'"
            )
        return every

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
        """Whether these tensors of this replica are finite, in all its processes."""
        is_finite = float(self._health.all_finite(tensors))
        return all(row[0] for row in exchange_within(self._group, [is_finite]))

    # --- weights -------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """All parameters of this replica, or the parts of them that are here."""
        return self._weights.of(self._whole())

    def _whole(self) -> list[Tensor]:
        return averaged_tensors(self._whole_optimizer, self._model)

    def _names(self) -> list[str]:
        return names_of(self._whole(), self._optimizer, self._model)

    @property
    def _whole_optimizer(self) -> Optimizer | None:
        """The optimizer, unless it holds a part that is another one on each rank."""
        return self._optimizer if self._partitioned_by is None else None

    def _averaged_moments(self) -> list[Tensor]:
        optimizer = self._whole_optimizer if self._moments_rule == "average" else None
        return [] if optimizer is None else self._moments.of(moments_of(optimizer))

    def weights_written(self) -> None:
        """Tell those who keep copies of the weights: fully_shard, and ZeRO of DeepSpeed its masters."""
        reshard(self._model)
        if self._partitioned_by is not None:
            refresh_masters(self._layers)

    def as_saved(self, tensors: Sequence[Tensor], *, copies: bool = True) -> list[Tensor]:
        """What a checkpoint holds of them: sharded as their owners, for ``torch.distributed.checkpoint``."""
        pairs = zip(tensors, self._whole(), strict=True)
        return [sharded_like(part.detach().to("cpu", copy=copies), owner) for part, owner in pairs]

    def average(
        self, excluded: Collection[int], *, like_weights: Sequence[Tensor] = (), weights: Shares = None
    ) -> None:
        """Give every replica the mean over those that are not excluded, if they differ. Collective.

        Where all ought to be equal, those that are not get what the others hold.
        """
        agreed = self._verdict.agreed
        if agreed is not None:
            # They are equal, so nothing is averaged: those that are not get what one of them holds.
            donor = min(set(agreed) - set(excluded), default=agreed[0])
            receivers = {*range(self.count)} - set(agreed) | set(excluded)
            if receivers:
                self.copy(donor, receivers - {donor}, like_weights=like_weights)
            else:
                reshard(self._model)
        elif self.differ or excluded:
            # A replica that is left out takes the others' moments as well: its own would spoil it again.
            if excluded and self._moments_rule == "keep":
                self.copy(min({*range(self.count)} - set(excluded)), excluded)
            tensors = [*self.weights(), *self._averaged_moments(), *like_weights, *self._buffers.tensors]
            self._averager.average_(tensors, *self._share(excluded, weights))
            if self._moments_rule == "reset":
                clear_state(state_owner(self._optimizer))
            self._has_parted = False
            self.weights_written()
        else:
            reshard(self._model)
        self._buffers.put_back()

    def average_tensors(
        self, tensors: Sequence[Tensor], excluded: Collection[int], *, weights: Shares = None
    ) -> None:
        """Give every replica the mean of these tensors. Collective."""
        self._averager_of_copies.average_(tensors, *self._share(excluded, weights))

    def _share(self, excluded: Collection[int], weights: Shares) -> tuple[float, int]:
        """What this replica contributes to a mean, and how many do."""
        if weights is None:
            return self.index not in excluded, self.count - len(excluded)
        return weights[self.index], 1

    def copy(self, donor: int, receivers: Collection[int], *, like_weights: Sequence[Tensor] = ()) -> None:
        """Give replicas all that another one holds. Collective."""
        if self.has_others:
            heal(self._group, self._whole_optimizer, self._model, donor, receivers, like_weights)
            self.weights_written()

    def perturb(self, noise_scale: float, *, norm: Norm, seed: int) -> None:
        """Add Gaussian noise to this replica's parameters (paper, eq. 10)."""
        self._require_whole("keep the same parameters")
        reshard(self._model)
        parameters = self._whole() if self._model is None else list(self._model.parameters())
        add_noise(parameters, noise_scale, norm=norm, seed=seed, replica=self.index)
        self._has_parted = True

    def equal_group(self) -> ReplicaGroup:
        """All replicas while they ought to be equal, else this one alone."""
        return self._group if self.has_others and not self.differ else ALONE

    def save_point(self, *, on_cpu: bool) -> WeightsCopy:
        """Copy the weights and buffers, each replica its part while all are equal."""
        reshard(self._model)
        buffers = [] if self._model is None else [local_part(buffer) for buffer in self._model.buffers()]
        return WeightsCopy(self.weights(), buffers, self.equal_group(), "cpu" if on_cpu else None)

    def restore(self, point: WeightsCopy) -> None:
        """Put weights and buffers back, with an optimizer as before its first step. Collective."""
        owner = state_owner(self._optimizer)
        point.put("going back to a copy")
        clear_state(owner)
        for parameter in parameters_of(owner):
            parameter.grad = None
        self.weights_written()


def _require_in_step(messages: Sequence[Message]) -> None:
    remedy = "call step() on every replica for the same optimizer steps, load the same checkpoint everywhere"
    if len({message.num_steps for message in messages}) > 1:
        shown = [int(message.num_steps) for message in messages]
        raise ConfigurationMismatchError(f"replicas must sync at the same step, got steps {shown}: {remedy}")
    if len({message.base for message in messages}) > 1:
        shown = [f"{int(message.base):012x}" for message in messages]
        raise ConfigurationMismatchError(
            f"replicas must share the same base values, got fingerprints {shown}: {remedy}"
        )
