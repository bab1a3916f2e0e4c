"""hdet as a submission to AlgoPerf's self-tuning ruleset: AdamW, with a learning rate that is found.

AlgoPerf calls the five functions at the end of this file. There are no hyperparameters. The first call of
``update_params`` makes the search with batches from the queue, so that its time counts. ``hdet.AutoLR`` then
trains. Every evaluation sees a mean of the recent weights: what is scored is the time to a target.

The ruleset: https://github.com/mlcommons/algorithmic-efficiency/blob/main/docs/DOCUMENTATION.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hdet
from hdet.replicas.optimizers import plain_model, without_ddp

__all__ = ["data_selection", "get_batch_size", "init_optimizer_state", "prepare_for_eval", "update_params"]

GUESS = 1e-3
"""The learning rate that the search starts from, for every workload."""
PLANNED = 0.75
"""Share of the workload's step hint that a run is planned for. Targets were set by runs of this length."""
RECENCY = 20
"""The mean that is evaluated looks back on a share of the steps so far: 1/22 of them on average."""
BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 64,
    "ogbg": 512,
    "wmt": 128,
}
"""Those of AlgoPerf's own baselines, which are what its step hints were counted with."""
MORE = "more"
"""Where the first batch holds the queue that it came from."""


def recent_mean(means: Sequence[Tensor], weights: Sequence[Tensor], num_taken: Tensor | int) -> None:
    r"""Move a mean towards the weights, of which later ones count more (Shamir and Zhang, ICML 2013).

    .. math:: m_t = \Bigl(1 - \frac{c + 1}{t + c}\Bigr) m_{t-1} + \frac{c + 1}{t + c} x_t

    ``RECENCY`` is :math:`c`, and ``num_taken`` is :math:`t - 1`.

    >>> mean = [torch.zeros(())]
    >>> recent_mean(mean, [torch.ones(())], 0), mean[0].item()
    (None, 1.0)
    """
    share = (RECENCY + 1) / (int(num_taken) + 1 + RECENCY)
    torch._foreach_lerp_(list(means), list(weights), share)  # pyright: ignore[reportPrivateImportUsage]


class Training:
    """All that a run has beside the model, as one entry of AlgoPerf's optimizer state.

    Args:
        model: what is trained, as the workload gives it.
        planned_steps: length of the run, with the search.
    """

    def __init__(self, model: nn.Module, planned_steps: int) -> None:
        self.model, self.planned_steps = model, planned_steps
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=GUESS)
        self.auto: hdet.AutoLR | None = None
        """None until the search is made."""
        self.mean = AveragedModel(plain_model(without_ddp(model)), multi_avg_fn=recent_mean)
        self.mean_is_shown = False

    def search(self, workload: Any, model_state: Any, batches: Iterable[Any], rng: Any) -> None:
        """Find the learning rate, and plan the rest of the run."""

        def loss_of(model: nn.Module, batch: Any) -> Tensor:
            return loss_and_state(workload, model, model_state, batch, rng)[0]

        found = hdet.find_lr(self.model, self.optimizer, batches, loss_of, total_steps=self.planned_steps)
        if workload.metrics_logger is not None:
            numbers = {"found_lr": found.lr[0], "search_steps": found.num_steps}
            workload.metrics_logger.append_scalar_metrics(numbers, 0)
        self.auto = self._begin(self.planned_steps - found.num_steps, found)

    def _begin(self, num_steps: int, found: hdet.FoundLR | None = None) -> hdet.AutoLR:
        return hdet.AutoLR(self.optimizer, total_steps=num_steps, model=self.model, found=found)

    def step(self, loss: Tensor) -> None:
        """One optimizer step. After the planned ones, it goes on with the last learning rate."""
        self.optimizer.step()
        if self.auto is not None:
            self.auto.step(loss)
        self.mean.update_parameters(plain_model(without_ddp(self.model)))

    @torch.no_grad()
    def show_mean(self, is_shown: bool) -> None:
        """Put the mean of recent weights into the model, or the weights themselves."""
        if is_shown != self.mean_is_shown and self.mean.n_averaged:
            for mean, weights in zip(self.mean.parameters(), self.model.parameters(), strict=True):
                kept = weights.clone()
                weights.copy_(mean)
                mean.copy_(kept)
            self.mean_is_shown = is_shown

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. AlgoPerf saves after an evaluation, while the mean is shown."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "auto": None if self.auto is None else self.auto.state_dict(),
            "total_steps": None if self.auto is None else self.auto.total_steps,
            "mean": self.mean.state_dict(),
            "mean_is_shown": self.mean_is_shown,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a checkpoint into a run that has not begun."""
        num_steps = state["total_steps"]
        self.auto = None if num_steps is None else self._begin(num_steps)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.auto is not None:
            self.auto.load_state_dict(state["auto"])
        self.mean.load_state_dict(state["mean"])
        self.mean_is_shown = state["mean_is_shown"]


def loss_and_state(
    workload: Any, model: nn.Module, model_state: Any, batch: dict[str, Any], rng: Any
) -> tuple[Tensor, Any]:
    """Mean loss of a batch, and the new state of the model. A model in evaluation mode gets no dropout."""
    from algoperf.spec import ForwardPassMode  # pyright: ignore[reportMissingImports]

    outputs, new_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=ForwardPassMode.TRAIN,  # batch norm shall use the batch's statistics, also for a score
        rng=rng,
        update_batch_norm=True,
        **({} if model.training else {"dropout_rate": 0.0}),
    )
    losses = workload.loss_fn(
        label_batch=batch["targets"], logits_batch=outputs, mask_batch=batch.get("weights")
    )
    return losses["summed"] / losses["n_valid_examples"], new_state


# --- what AlgoPerf calls --------------------------------------------------------------------------------


def get_batch_size(workload_name: str) -> int:
    """The global batch size."""
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"workload_name must be one of {', '.join(BATCH_SIZES)}, got {workload_name!r}")
    return BATCH_SIZES[workload_name]


def init_optimizer_state(
    workload: Any, model_params: nn.Module, model_state: Any, hyperparameters: None, rng: Any
) -> dict[str, Training]:
    """Before the run. There are no batches yet, so that the search has to wait."""
    del model_state, hyperparameters, rng
    return {"training": Training(model_params, int(PLANNED * workload.step_hint))}


def data_selection(
    workload: Any, input_queue: Iterator[dict[str, Any]], optimizer_state: dict[str, Training],
    current_param_container: nn.Module, model_state: Any, hyperparameters: None, global_step: int, rng: Any,
) -> dict[str, Any]:  # fmt: skip
    """The next batch. The first one takes the queue along, for the search."""
    del workload, optimizer_state, current_param_container, model_state, hyperparameters, rng
    batch = next(input_queue)
    return batch | {MORE: input_queue} if global_step == 0 else batch


def update_params(
    workload: Any, current_param_container: nn.Module, current_params_types: Any, model_state: Any,
    hyperparameters: None, batch: dict[str, Any], loss_type: Any, optimizer_state: dict[str, Training],
    eval_results: Any, global_step: int, rng: Any, train_state: Any = None,
) -> tuple[dict[str, Training], nn.Module, Any]:  # fmt: skip
    """One step, and the search before the first one."""
    del current_params_types, hyperparameters, loss_type, eval_results, train_state
    training, model = optimizer_state["training"], current_param_container
    training.show_mean(False)
    if global_step == 0:
        queue = batch[MORE]
        batch = {name: value for name, value in batch.items() if name != MORE}
        training.search(workload, model_state, chain([batch], queue), rng)
    model.train()
    training.optimizer.zero_grad()
    loss, new_state = loss_and_state(workload, model, model_state, batch, rng)
    loss.backward()
    training.step(loss.detach())
    return optimizer_state, model, new_state


def prepare_for_eval(
    workload: Any, current_param_container: nn.Module, current_params_types: Any, model_state: Any,
    hyperparameters: None, loss_type: Any, optimizer_state: dict[str, Training], eval_results: Any,
    global_step: int, rng: Any,
) -> tuple[dict[str, Training], nn.Module, Any]:  # fmt: skip
    """Show the mean of recent weights. The next step puts the weights themselves back."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    optimizer_state["training"].show_mean(True)
    return optimizer_state, current_param_container, model_state
