"""OneCycleAutoLR: a OneCycleLR whose replicas differ, with the reference's argument names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.checks import check_keys, require_choice, require_flag, require_number, require_number_or_choice
from hdet.ensemble import Ensemble
from hdet.errors import HdetError, warn
from hdet.explore import LearningRate
from hdet.method.controller import Controller, first_controlled_sync, num_controlled_rounds
from hdet.replicas import ReplicaGroup
from hdet.replicas.optimizers import plain_optimizer, require_resumable, unchanged_on_error
from hdet.schedules.one_cycle_arguments import (
    as_list,
    check_momentum,
    check_phases,
    check_ranges,
    num_steps,
    per_group,
)
from hdet.search.found import set_rate
from hdet.steering.needs import comparing, controllers_of
from hdet.weak_hook import Closing

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hdet.ensemble.settings import Options


class OneCycleAutoLR(OneCycleLR, Closing):
    """Drop-in for :class:`torch.optim.lr_scheduler.OneCycleLR` with the method of the paper.

    With ``ensemble_lr_spread_ratio=0`` (the default) and no controller it is that scheduler, bit for bit.
    Use it as one, passing the loss::

        scheduler = hdet.OneCycleAutoLR(optimizer, max_lr=9e-4, total_steps=total_steps,
                                        ensemble_lr_spread_ratio=1/9, model_sync_interval=100, model=model)
        ...
        optimizer.step()
        scheduler.step(loss)

    Args:
        optimizer: this replica's optimizer.
        max_lr: peak learning rate, one for all parameter groups or one each.
        total_steps: length of training; or give ``epochs`` and ``steps_per_epoch``.
        epochs: number of epochs.
        steps_per_epoch: steps in each.
        pct_start: share of the steps in which the learning rate rises.
        anneal_strategy: ``"cos"`` or ``"linear"``.
        cycle_momentum: cycle momentum (or Adam's beta1) against the learning rate, also while the
            controller holds the learning rate.
        base_momentum: lower end of that cycle.
        max_momentum: upper end of that cycle.
        div_factor: the first learning rate is max_lr / div_factor.
        final_div_factor: the last one is max_lr / (div_factor * final_div_factor).
        three_phase: a third phase for the final descent.
        last_epoch: index of the last step, when resuming without a saved state.
        ensemble_lr_spread_ratio: half-width of the replicas' multipliers; 0 is plain OneCycleLR.
        model_sync_interval: steps between syncs.
        auto_lr_warmup_steps: step from which the controller acts.
        enable_auto_lr: whether there is a controller.
        loss_scale: softness of the replicas' weights (the paper states 0.1, its code uses 0.002), or
            ``"auto"`` for the spread of their losses.
        lr_of_lr: step size of the controller.
        momentum_of_lr: momentum of the controller.
        rank: which replica this is, where torch.distributed is not running.
        world_size: how many there are, where torch.distributed is not running.
        end: where the controller's decay ends, as a share of the learning rate at its start, such as the
            paper's 0.22. ``"floor"`` is the schedule's own floor. The readings of the printed eq. 8 are
            ``"final_fraction"``, 1 / (div_factor * final_div_factor), and ``"final_div_factor"``,
            final_div_factor / div_factor, which *raises* the learning rate.
        **options: what :class:`hdet.Ensemble` takes besides: ``model``, ``controllers`` instead of the
            paper's, ``probe``, ``records``, ``replicas``, ``seed``, ``average_tail`` and others. With a tail
            let the plan end higher: ``final_div_factor=1 / (0.15 * div_factor)`` is 0.15 of the peak.
    """

    _ensemble: Ensemble | None = None

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        auto_lr_warmup_steps: int = 100000,
        enable_auto_lr: bool = False,
        loss_scale: float | Literal["auto"] = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        rank: int = 0,
        world_size: int = 1,
        *,
        end: float | Literal["floor", "final_fraction", "final_div_factor"] = "floor",
        **options: Unpack[Options],
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "optimizer", "options", "__class__")}
        self._given = given | options
        wrapped, optimizer = optimizer, plain_optimizer(optimizer)
        num_groups = len(optimizer.param_groups)
        max_lrs = per_group("max_lr", max_lr, num_groups, above=0)
        total_steps = num_steps(total_steps, epochs, steps_per_epoch)
        pct_start = require_number("pct_start", pct_start, at_least=0, below=1)
        require_choice("anneal_strategy", anneal_strategy, ("cos", "linear"))
        check_momentum(optimizer, cycle_momentum, base_momentum, max_momentum)
        check_phases(pct_start, total_steps, require_flag("three_phase", three_phase))
        check_ranges(given)
        require_resumable(optimizer, last_epoch, "max_lr")
        if rank >= world_size and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"rank must be below world_size={world_size}, got {rank}: leave both out, they are taken "
                "from torch.distributed"
            )
        controllers = list(controllers_of(options.get("controllers", ())))
        if enable_auto_lr and comparing(controllers):
            raise ValueError(
                "enable_auto_lr must be False where controllers has an hdet.Controller, got True: it stands "
                "for the paper's controller; leave out either"
            )
        require_number_or_choice("end", end, ("floor", "final_fraction", "final_div_factor"), above=0)
        require_number_or_choice("loss_scale", loss_scale, ("auto",), above=0)
        rounds = auto_lr_warmup_steps, model_sync_interval, total_steps
        if require_flag("enable_auto_lr", enable_auto_lr) and num_controlled_rounds(*rounds) < 1:
            warn(
                f"auto_lr_warmup_steps={auto_lr_warmup_steps} with model_sync_interval={model_sync_interval} "
                f"leaves the controller no round of {total_steps} steps, so it is off: lower them, as "
                "hdet.presets.paper does"
            )
        elif enable_auto_lr:
            first, rises_until = first_controlled_sync(*rounds[:2]), int(pct_start * total_steps)
            if first < rises_until - 1:
                warn(
                    f"auto_lr_warmup_steps={auto_lr_warmup_steps} lets the controller take over at step "
                    f"{first}, but the learning rate rises until step {rises_until}. It is held from there, "
                    f"so max_lr is never reached: pass auto_lr_warmup_steps={rises_until}"
                )
            if end == "final_fraction":
                end = 1 / final_div_factor / div_factor
            elif end == "final_div_factor":
                end = final_div_factor / div_factor
            if end != "floor" and end > 1:
                warn(
                    f"end={given['end']!r} raises the learning rate {end:g}-fold from where the controller "
                    "starts: pass end=0.22, as in the paper's figure 3, or the other reading of eq. 8, "
                    "end='final_fraction'"
                )
            paper = Controller(
                form="paper",
                start=auto_lr_warmup_steps,
                step_size=lr_of_lr,
                momentum=momentum_of_lr,
                temperature=loss_scale,
                end=end,
            )
            controllers.append(paper)
        options["controllers"] = controllers
        if options.get("replicas") is None:
            options["replicas"] = ReplicaGroup.of(None, fallback_index=rank, fallback_count=world_size)

        with unchanged_on_error(optimizer):
            super().__init__(
                optimizer,
                max_lr=max_lrs,
                total_steps=total_steps,
                pct_start=pct_start,
                anneal_strategy=anneal_strategy,
                cycle_momentum=cycle_momentum,
                base_momentum=as_list(base_momentum),
                max_momentum=as_list(max_momentum),
                div_factor=div_factor,
                final_div_factor=final_div_factor,
                three_phase=three_phase,
                last_epoch=last_epoch,
            )
            floor = [group["min_lr"] for group in optimizer.param_groups]
            self._ensemble = Ensemble(
                wrapped,
                explore=[LearningRate(ensemble_lr_spread_ratio, floor=floor)],
                sync_every=model_sync_interval,
                total_steps=total_steps,
                **options,
            )
        self._ensemble.stepped_by = type(self).__name__
        self._ends_at_floor = ensemble_lr_spread_ratio > 0
        if self.last_epoch > 0:
            self._ensemble.begin_at(self.last_epoch)

    @property
    def ensemble(self) -> Ensemble:
        """The engine behind this scheduler."""
        assert self._ensemble is not None
        return self._ensemble

    def step(self, loss: Tensor | float | None = None, *, skipped: bool = False) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Count one optimizer step and set the next learning rate; see :meth:`hdet.Ensemble.step`."""
        ensemble = self._ensemble
        if ensemble is None:
            super().step()  # the first value, which LRScheduler.__init__ asks for
        elif ensemble.count(loss, skipped=skipped):
            self._advance()  # it reads none of the values that it changes, so none is put back first
            ensemble.put_values()

    def _advance(self) -> None:
        is_past_end = self.last_epoch >= self.total_steps
        if not is_past_end:
            super().step()
        # The value that OneCycleLR computes after its last step is beyond the end of its curve, and
        # below zero if that is linear. It counts only for training that goes on.
        if is_past_end or (self._ends_at_floor and self.last_epoch == self.total_steps):
            for group in self.optimizer.param_groups:
                set_rate(group, group["min_lr"])

    def observe(self, loss: Tensor | float) -> None:
        """Take the loss of one micro-batch, without a step."""
        self.ensemble.observe(loss)

    def converge(self) -> None:
        """Average the parameters now: before a save or an evaluation. Collective."""
        self.ensemble.converge()

    def finish(self) -> None:
        """End the run before its last step; see :meth:`hdet.Ensemble.finish`. Collective."""
        self.ensemble.finish()

    def close(self) -> None:
        """Put the scheduled values back in place and let go of the optimizer, for good."""
        self.ensemble.close()

    def get_last_lr(self) -> list[float | Tensor]:
        """Give what this replica's optimizer uses now; tensors are copies."""
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        return [lr.clone() if isinstance(lr, Tensor) else lr for lr in lrs]

    def state_dict(self) -> dict[str, Any]:
        """Save numbers only, the same on every replica. Call :meth:`converge` first; not collective."""
        state = {
            k: v
            for k, v in super().state_dict().items()
            if k not in ("_ensemble", "_given", "_ends_at_floor")
        }
        state["ensemble"] = self.ensemble.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint, also one of a plain OneCycleLR or of another number of replicas."""
        check_keys("state_dict", state_dict, ["last_epoch"])
        state = dict(state_dict)
        ensemble = state.pop("ensemble", None)
        if ensemble is not None:
            self.ensemble.check_state_dict(ensemble)  # before anything changes
        super().load_state_dict(state)
        if ensemble is not None:
            self.ensemble.load_state_dict(ensemble)
        else:
            self.ensemble.begin_at(self.last_epoch)

    # --- copies of the whole object, as OneCycleLR allows them ------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.ensemble.replicas.has_others:
            raise HdetError(
                "OneCycleAutoLR cannot be pickled or copied while a process group joins its replicas: save "
                "its state_dict(), and build a new one"
            )
        return {"optimizer": self.optimizer, "given": self._given, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state["optimizer"].param_groups
        fields = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
        self.__init__(state["optimizer"], **state["given"])
        for group, before in zip(groups, fields, strict=True):  # the momentum, where it is cycled
            group.update(before)
        self.load_state_dict(state["state"])
