"""HdetCallback: the learning rate of a Hugging Face Trainer, found before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.auto import AutoLR
from hdet.errors import HdetError, install_command
from hdet.explore import Hyperparameter
from hdet.integrations.accelerate import undisturbed
from hdet.integrations.arguments import checked_settings
from hdet.records import RecordSink
from hdet.replicas.optimizers import plain_optimizer
from hdet.replicas.probe import Probe, ProbeOrBatches
from hdet.search.found import FoundLR
from hdet.steering.needs import AnyController
from hdet.tuning import searched

if TYPE_CHECKING:
    TrainerCallback = object
else:
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError:  # the class then says what to install
        TrainerCallback = object


Loss = Callable[[nn.Module, Any], Tensor]

_KEY = "hdet"
"""Of our state within the scheduler's."""


class HdetCallback(TrainerCallback):
    """Find the learning rate when training begins, and train with it.

    ``Trainer(..., callbacks=[HdetCallback()])`` is all. ``learning_rate`` of the TrainingArguments is where
    the search starts. :class:`hdet.AutoLR` takes the place of the Trainer's schedule, so
    ``lr_scheduler_type`` and warm-up are not used. After the last step the model holds the mean of the last
    weights. A resumed training goes on bit for bit, without a search.

    Args:
        search: False to train with ``learning_rate`` itself, without a search.
        spread: half-width of the ranks' learning rates around the schedule, as in :class:`hdet.AutoLR`. Ranks
            are averaged every ``sync_every`` steps, before an evaluation, and before a checkpoint is saved.
        explore: further hyperparameters in which ranks differ.
        controllers: as in :class:`hdet.AutoLR`, such as ``[hdet.Thermostat(), hdet.HeldOutWeightDecay()]``.
            Both need a probe.
        probe: held-out batches, such as ``trainer.get_eval_dataloader()``, which gives each rank its part.
            They are scored by ``loss``, in evaluation mode. An :class:`hdet.Probe` has a loss of its own.
        sync_every: steps per round, and between looks of the guard; None for a good number.
        loss: ``loss(model, inputs)``, a scalar tensor, for a Trainer with a loss of its own; None for the
            loss that the model returns. If it then returns none, tell the guard:
            ``callback.auto.observe(loss)``.
        records: takes a record of the search and of every round, such as ``hdet.Records("records.jsonl")``.
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
        loss: Loss | None = None,
        records: RecordSink | None = None,
    ) -> None:
        if not TYPE_CHECKING and TrainerCallback is object:
            raise HdetError(f"HdetCallback needs transformers: {install_command('transformers')}")
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be callable or None, got {loss!r} of type {type(loss).__name__}")
        self._searches = search
        self._probe = probe
        more: dict[str, Any] = {"controllers": controllers, "sync_every": sync_every, "records": records}
        self._settings = checked_settings(probe, spread=spread, explore=explore, **more)
        self._loss = loss
        self.found: FoundLR | None = None
        """Holds what the search has found; from the checkpoint after a resume."""
        self.auto: AutoLR | None = None
        """Drives the optimizer."""
        self._hook: Any = None
        self._followed: _Followed | None = None
        self._losses: list[Tensor] = []
        self._are_shares = False
        self._num_sharing = 1

    # --- what the Trainer calls ----------------------------------------------------------------------

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Search, or load a checkpoint, and take over the learning rate."""
        self._let_go()
        self._check(args, lr_scheduler)
        bare = plain_optimizer(optimizer)
        saved = vars(lr_scheduler).pop(_KEY, None)  # the Trainer has loaded scheduler.pt
        if saved is None and state.global_step > 0:
            raise HdetError(
                f"the checkpoint of step {state.global_step} has no state of hdet: resume from one that was "
                "saved with HdetCallback and save_only_model=False, or train without the callback"
            )
        probe = self._held_out()
        self.found = None
        if saved is not None:
            self.found = None if saved["found"] is None else FoundLR(**saved["found"])
        elif self._searches:
            self.found = self._search(args, state, model, bare, train_dataloader, probe)
        self.auto = AutoLR(
            bare,
            total_steps=state.max_steps,
            model=model,
            found=self.found if saved is None else None,
            probe=probe,
            **self._settings,
        )
        if saved is not None:
            self.auto.load_state_dict(saved["auto"])
        self._followed = _Followed(lr_scheduler, bare, self._state)
        self._hook = model.register_forward_hook(self._take_loss, with_kwargs=True)
        # The Trainer divides by the tokens of all ranks, and multiplies by their number outside of the model.
        self._num_sharing = args.world_size if args.average_tokens_across_devices else 1

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, before the Trainer logs, evaluates or saves."""
        assert self.auto is not None
        losses, self._losses = self._losses, []
        if not losses and self._loss is None:
            raise HdetError(
                "the model returned no loss in a training step, so the Trainer has a loss of its own and the "
                "search used another: pass it as HdetCallback(loss=...)"
            )
        if self._are_shares:
            losses = [torch.stack(losses).sum() * self._num_sharing]
        for loss in losses:
            self.auto.observe(loss)
        self.auto.step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join the ranks before a save, and before an evaluation if they differ."""
        if self.auto is None:
            return
        if control.should_save or (control.should_evaluate and self.auto.replicas.differ):
            self.auto.converge()

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Join them too where the Trainer saves if this evaluation is the best."""
        if self._followed is not None and self.auto is not None and args.save_strategy == "best":
            self.auto.converge()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After an early stop put the mean of the last weights in place, unless the best ones were loaded."""
        if self.auto is not None and not (args.load_best_model_at_end and state.best_model_checkpoint):
            self.auto.finish()
        self._let_go()

    # --- parts ---------------------------------------------------------------------------------------

    def _check(self, args: Any, lr_scheduler: Any) -> None:
        """Raise for what would be searched or trained wrong."""
        if args.deepspeed or args.fsdp:
            raise HdetError(
                f"HdetCallback needs whole parameters on every rank, got deepspeed={args.deepspeed!r}, "
                f"fsdp={args.fsdp!r}: use plain data parallelism (torchrun), or hdet.find_lr in your own loop"
            )
        if args.n_gpu > 1:
            raise HdetError(
                f"HdetCallback needs one GPU per process, got {args.n_gpu} in DataParallel: start with "
                "torchrun, or set CUDA_VISIBLE_DEVICES to one of them"
            )
        if args.fp16:
            raise HdetError("fp16 must be False, got True: trials have no gradient scaler. Use bf16=True")
        if args.label_smoothing_factor and self._loss is None:
            raise HdetError(
                f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}: the Trainer then has "
                "a loss of its own. Pass it as HdetCallback(loss=...)"
            )
        if type(lr_scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR"):
            raise HdetError(
                "lr_scheduler_type must be one that steps without a metric, got "
                f'{type(lr_scheduler).__name__}: leave it at "linear". HdetCallback takes its place'
            )

    def _held_out(self) -> Probe | None:
        """Make a probe of held-out batches."""
        if self._probe is None or isinstance(self._probe, Probe):
            return self._probe
        with undisturbed(self._probe):
            return Probe(_Steps(self._probe, 1), self._loss or _own_loss)

    def _search(
        self, args: Any, state: Any, model: nn.Module, optimizer: Optimizer, loader: Any, probe: Probe | None
    ) -> FoundLR:
        # A probe of the user may have batches of another form.
        held = None if probe is None or probe is self._probe else probe.batches
        with undisturbed(loader):
            return searched(
                model,
                optimizer,
                _Steps(loader, args.gradient_accumulation_steps),
                partial(_accumulated, self._loss or _own_loss),
                total_steps=state.max_steps,
                probe=held,
                clip_norm=args.max_grad_norm or None,
                progress=args.disable_tqdm,  # else its own bar is on the screen
            )

    def _take_loss(self, model: nn.Module, _: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """Keep the loss, in a forward hook: callbacks are not told. It does not wait for the device."""
        if model.training and torch.is_grad_enabled():
            loss = _loss_in(outputs)
            if loss is not None:
                self._losses.append(loss.detach().reshape(()))
                self._are_shares = inputs.get("num_items_in_batch") is not None

    def _state(self) -> dict[str, Any]:
        assert self.auto is not None
        return {
            "auto": self.auto.state_dict(),
            "found": None if self.found is None else asdict(self.found),
        }

    def _let_go(self) -> None:
        """Leave model, optimizer and scheduler as the Trainer made them. What was found stays readable."""
        if self._followed is not None and self.auto is not None:
            self._hook.remove()
            self._followed.let_go()
            self.auto.close()
        self._followed = None
        self._losses = []


class _Followed:
    """Makes the Trainer's own scheduler report and save what AutoLR does, instead of writing values.

    Our state is saved within its state. The Trainer writes that on one rank, and loads it on all before
    training begins: ``load_state_dict`` of a torch scheduler keeps what it does not know as an attribute.
    """

    _REPLACED = ("step", "get_last_lr", "state_dict")

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer, state: Callable[[], Any]) -> None:
        self._scheduler = scheduler
        self._optimizer = optimizer
        self._state = state
        self._saved = scheduler.state_dict
        self._rates: list[float] = []
        self.step()
        for name in self._REPLACED:
            setattr(scheduler, name, getattr(self, name))

    def step(self) -> None:
        """After AutoLR's step: remember the learning rates of the next one."""
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return what the Trainer logs."""
        return self._rates

    def state_dict(self) -> dict[str, Any]:
        """Return what the Trainer writes to scheduler.pt."""
        own = {name: value for name, value in self._saved().items() if name not in self._REPLACED}
        return {**own, _KEY: self._state()}

    def let_go(self) -> None:
        """Give the scheduler its own methods back."""
        for name in self._REPLACED:
            delattr(self._scheduler, name)


@dataclass(frozen=True)
class _Steps:
    """Gives the batches of a loader: one for each optimizer step, or a tuple of those that it accumulates."""

    loader: Iterable[Any]
    num_accumulated: int

    def __iter__(self) -> Iterator[Any]:
        step: list[dict[str, Any]] = []
        has_given = False
        for batch in self.loader:
            step.append(dict(batch))  # a BatchEncoding is not a dict
            if len(step) == self.num_accumulated:
                yield step[0] if self.num_accumulated == 1 else tuple(step)
                step, has_given = [], True
        if step and not has_given:
            yield tuple(step)


def _accumulated(loss_of: Loss, model: nn.Module, step: Any) -> Tensor:
    """Take the mean loss of the batches that a step accumulates, one of them in memory at a time.

    Gradients are there when it returns: what it returns has nothing left to differentiate.
    """
    if not isinstance(step, tuple):
        return loss_of(model, step)
    total = torch.zeros(())
    for batch in step:
        loss = loss_of(model, batch) / len(step)
        if torch.is_grad_enabled():
            loss.backward()
        total = total.to(loss.device) + loss.detach()
    return total.requires_grad_(torch.is_grad_enabled())


def _own_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    loss = _loss_in(model(**inputs))
    if loss is None:
        raise HdetError(
            f"the model returned no loss for inputs {sorted(inputs)}: give it labels, or pass "
            "HdetCallback(loss=...)"
        )
    return loss


def _loss_in(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
