"""LearningRateSearch: a callback of Lightning that finds the learning rate, and then trains with it."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch.utils.data import DataLoader

from hdet.auto import AutoLR
from hdet.errors import HdetError, install_command
from hdet.explore import Hyperparameter
from hdet.integrations.arguments import checked_settings
from hdet.integrations.lightning_unseen import UnseenProbe, loss_in, made_ready, training_loss, unseen
from hdet.records import RecordSink
from hdet.replicas.probe import Probe, ProbeOrBatches
from hdet.search.found import FoundLR
from hdet.search.loaders import twin
from hdet.steering.needs import AnyController
from hdet.tuning import searched

_log = logging.getLogger(__name__)


def _callback_class() -> Any:
    try:
        return importlib.import_module("lightning.pytorch.callbacks").Callback
    except ModuleNotFoundError:
        return object


_Callback = _callback_class()


class LearningRateSearch(_Callback):
    """Finds the learning rate by :func:`hdet.find_lr` as ``fit`` begins, and trains by :class:`hdet.AutoLR`.

    Return only the optimizer from ``configure_optimizers``: its learning rate is where the search starts.
    Trials run ``training_step`` on the bare module. Logs, metrics, checkpoints and other callbacks see
    nothing of them, and random numbers and data come as they would without them. The weights after the last
    step are the mean over the last ones. Checkpoints hold what was found, so that a run that goes on from
    ``ckpt_path`` does not search again.

    Args:
        search: False to train with the learning rate that the optimizer has, without a search.
        spread: half-width of the ranks' learning rates around the schedule, as in :class:`hdet.AutoLR`. Ranks
            are averaged every ``sync_every`` steps, before a validation, and before a checkpoint is saved.
        explore: further hyperparameters in which ranks differ.
        controllers: as in :class:`hdet.AutoLR`, such as ``[hdet.Thermostat(), hdet.HeldOutWeightDecay()]``.
            Both need a probe.
        probe: held-out batches, such as a DataLoader. They are scored by the loss of ``training_step``, in
            evaluation mode, and nothing else sees it. An :class:`hdet.Probe` has a loss of its own. On
            several ranks give each its part of the data, or all of it to every rank.
        sync_every: steps per round, and between looks of the guard; None for a good number.
        records: takes a record of every round, such as ``hdet.Records("records.jsonl")``.

    .. code-block:: python

        trainer = lightning.Trainer(max_epochs=10, callbacks=[LearningRateSearch()])
        trainer.fit(module, loader)
    """

    def __init__(
        self,
        *,
        search: bool = True,
        spread: float = 0.0,
        explore: Sequence[Hyperparameter] = (),
        controllers: Sequence[AnyController] = (),
        probe: ProbeOrBatches | None = None,
        sync_every: int | None = None,
        records: RecordSink | None = None,
    ) -> None:
        if _Callback is object:
            raise HdetError(f"LearningRateSearch needs lightning: {install_command('lightning')}")
        super().__init__()
        self._searches = search
        self._probe = probe
        more: dict[str, Any] = {"controllers": controllers, "sync_every": sync_every, "records": records}
        self._settings = checked_settings(probe, spread=spread, explore=explore, **more)
        self._forget()

    # --- the beginning -------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget an earlier run."""
        if stage == "fit":
            self._forget()

    def _forget(self) -> None:
        self.found: FoundLR | None = None
        """Holds what the search has found. None before it."""
        self.auto: AutoLR | None = None
        """Drives the optimizer. None before ``fit`` has begun."""
        self._saved: dict[str, Any] | None = None
        self._scale: float | None = None
        self._has_stepped = False
        self._may_converge = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise for what cannot work, before anything has run."""
        _check(trainer, pl_module, searches=self._searches)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Search, unless a checkpoint was loaded."""
        if trainer.fast_dev_run:
            _log.info("fast_dev_run: the learning rate is not searched for, and has no schedule")
            return
        total_steps = trainer.estimated_stepping_batches
        if not 0 < total_steps < math.inf:
            raise HdetError(
                "the length of the run must be known, but trainer.estimated_stepping_batches is "
                f"{total_steps}: pass Trainer(max_steps=...)"
            )
        optimizer, probe = trainer.optimizers[0], self._probe
        if probe is not None and not isinstance(probe, Probe):
            probe = UnseenProbe(pl_module, probe)
        if self._saved is None:
            if trainer.global_step:
                raise HdetError(
                    f"LearningRateSearch must be there from the first step, but the run is at step "
                    f"{trainer.global_step} without its state: load only the weights of this checkpoint, and "
                    "fit with a new Trainer, without ckpt_path"
                )
            if self._searches:
                self.found = _search(trainer, pl_module, int(total_steps), probe)
        self.auto = AutoLR(
            optimizer,
            total_steps=int(total_steps),
            model=trainer.strategy.model,
            found=self.found if self._saved is None else None,
            probe=probe,
            **self._settings,
        )
        if self._saved is not None:
            self.auto.load_state_dict(self._saved["auto"])
        # Not trainer.global_step: it also counts steps that a gradient scaler has skipped.
        self._hook = optimizer.register_step_post_hook(self._optimizer_stepped)
        if self.auto.replicas.differ:
            weights_of = trainer.strategy.lightning_module_state_dict

            def weights() -> dict[str, Any]:  # not in our state_dict: it is not asked with save_weights_only
                self._converge()
                return weights_of()

            trainer.strategy.lightning_module_state_dict = weights

    # --- every batch ---------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the scale of the gradients, where the optimizer hides the steps that it skips."""
        if getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._scale = None if scaler is None else scaler.get_scale()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the loss, and follow the optimizer if it has stepped."""
        if self.auto is None:
            return
        loss = loss_in(outputs)
        if loss is not None:  # Lightning has divided it
            self.auto.observe(loss * trainer.accumulate_grad_batches)
        self.log("lr", float(trainer.optimizers[0].param_groups[0]["lr"]))
        if self._has_stepped:
            self._has_stepped = False
            is_skipped = self._scale is not None and trainer.precision_plugin.scaler.get_scale() < self._scale
            self.auto.step(skipped=is_skipped)
        if trainer.global_step >= (self.auto.total_steps or math.inf):
            self.auto.finish()  # where steps were skipped: before the last validation

    def _optimizer_stepped(self, *_: Any) -> None:
        self._has_stepped = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Average ranks that differ. Every rank comes here. Before training begins they are equal."""
        self._converge()

    def _converge(self) -> None:
        if self.auto is not None and self.auto.replicas.differ and self._may_converge:
            self.auto.converge()

    # --- the end -------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the mean of the last weights in place, also where the run ends early."""
        if self.auto is not None:
            self.auto.finish()
        self._may_converge = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Others may not come to a collective any more."""
        self._may_converge = False

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the optimizer."""
        if stage == "fit" and self.auto is not None:
            self.auto.close()
            self._hook.remove()
            vars(trainer.strategy).pop("lightning_module_state_dict", None)

    # --- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what was found, and where the run stands. All ranks come here when a checkpoint is saved."""
        if self.auto is None:
            return self._saved or {}
        if self._may_converge:
            self.auto.converge()
        found = None if self.found is None else asdict(self.found)
        return {"found": found, "auto": self.auto.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until the optimizer is there too."""
        self._saved = state_dict
        if state_dict["found"] is not None:
            self.found = FoundLR(**state_dict["found"])


def _check(trainer: Any, module: Any, *, searches: bool) -> None:
    """Raise for what cannot work, with the remedy."""
    strategies = importlib.import_module("lightning.pytorch.strategies")
    if not isinstance(trainer.strategy, strategies.SingleDeviceStrategy | strategies.DDPStrategy):
        raise HdetError(
            f"strategy must be one device or ddp, got {type(trainer.strategy).__name__}: use strategy='ddp'. "
            "A sharded model trains with hdet.find_lr and hdet.AutoLR in a loop of your own"
        )
    if len(trainer.optimizers) != 1:
        raise HdetError(
            f"configure_optimizers must return one optimizer, got {len(trainer.optimizers)}: "
            "hdet.JointOptimizer makes one of several that train one model"
        )
    if not module.automatic_optimization:
        raise HdetError(
            "automatic_optimization must be True, got False: training_step then steps the optimizer, so that "
            "trials cannot be kept apart from the run. Call hdet.find_lr before fit, and hdet.AutoLR after "
            "every optimizer.step()"
        )
    if trainer.lr_scheduler_configs:
        name = type(trainer.lr_scheduler_configs[0].scheduler).__name__
        raise HdetError(
            f"configure_optimizers must return only the optimizer, got a {name} too: leave it out, "
            "LearningRateSearch brings the schedule"
        )
    if searches and trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise HdetError(
            "gradient_clip_algorithm must be 'norm', got 'value': the search can only clip by the norm"
        )
    if searches and "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise HdetError(
            "training_step must take a batch, got dataloader_iter: a trial then has no batches of its own. "
            "Write training_step(self, batch, batch_idx)"
        )


# --- the search ----------------------------------------------------------------------------------------


def _search(trainer: Any, module: Any, total_steps: int, probe: Probe | None) -> FoundLR:
    """Find the learning rate with the module's own loss on the trainer's own batches; nothing is changed.

    Trials are scored on held-out batches where there are some. An :class:`hdet.Probe` may have others.
    """
    held = [(batch,) for batch in probe.batches] if isinstance(probe, UnseenProbe) else None
    with unseen(module):
        return searched(
            module,
            trainer.optimizers[0],
            _Batches(trainer, module),
            lambda _, batch: training_loss(module, batch[0]),
            total_steps=total_steps,
            probe=held,
            clip_norm=trainer.gradient_clip_val or None,
            progress=trainer.progress_bar_callback is None,
        )


class _Batches:
    """Gives the batches of this rank as training gets them. The trainer's own loader does not move.

    Each batch is the only item of a tuple: to find_lr a list would be the batches of several replicas.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._module = module
        loader = trainer.fit_loop._combined_loader  # noqa: SLF001
        self._loader = copy.copy(loader)
        self._loader.flattened = [_twin(part) for part in loader.flattened]

    def __iter__(self) -> Iterator[tuple[Any]]:
        for batch, _, _ in self._loader:
            yield (made_ready(self._module, batch),)


def _twin(loader: Any) -> Any:
    """Make a loader of the same data with its own order."""
    if isinstance(loader, Iterator):
        raise HdetError(
            f"train_dataloader must be able to start over, got {type(loader).__name__}: return a DataLoader, "
            "so that the search does not take batches from the run"
        )
    return twin(loader) if isinstance(loader, DataLoader) else copy.copy(loader)
