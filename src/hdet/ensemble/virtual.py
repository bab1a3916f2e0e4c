"""VirtualEnsemble: the method with N replicas in one process on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hdet.checks import check_counts, check_keys, check_list, require_count, require_flag, require_kind
from hdet.ensemble.ensemble import Ensemble
from hdet.replicas.optimizers import plain_optimizer
from hdet.replicas.probe import ProbeOrBatches, probe_of
from hdet.replicas.saved import check_tensors
from hdet.replicas.stacked import StackedReplicas
from hdet.replicas.tensors import require_initialized
from hdet.weak_hook import Closing


class VirtualEnsemble(Closing):
    """Train N replicas of a model in one process, with the same engine as on N ranks.

    The model and the optimizer that you give are templates: the replicas' parameters live in matrices with
    one row each, and one broadcast step updates them all. After every sync and :meth:`converge`, the model
    holds the mean. After a sync whose merge rule leaves replicas apart, it holds the first one.

    Args:
        model: what to train; all replicas start from its parameters.
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW`` over the model's parameters. It is never stepped
            itself: its groups hold the shared hyperparameters.
        loss: ``loss(model, batch)``, a scalar tensor.
        num_replicas: how many replicas.
        gradients: ``"shared"``, the mean over replicas as in data-parallel training, or ``"local"``, each its
            own.
        vectorize: compute all replicas at once (``torch.func.vmap``), or one after the other, which takes any
            model and any hyperparameter.
        join_equal: while replicas do not differ (no spread, one shared gradient), compute them as one, on all
            their batches joined along the first dimension. The same mean gradient where the loss is a mean
            over examples and the batches have one size, at a fraction of the time; not with BatchNorm.
        probe: an :class:`hdet.Probe`, or held-out batches that become one with ``loss``. It scores each
            replica at every sync, if they differ.
        **settings: everything else that :class:`hdet.Ensemble` takes.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> ensemble = VirtualEnsemble(model, torch.optim.SGD(model.parameters(), lr=0.1),
    ...                            lambda m, x: m(x).square().mean(), num_replicas=4, sync_every=2)
    >>> losses = ensemble.step(torch.ones(3, 2))                # one batch for all replicas
    >>> losses = ensemble.step(batches=[torch.ones(3, 2)] * 4)  # one batch each
    >>> losses.shape, ensemble.engine.num_steps
    (torch.Size([4]), 2)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        num_replicas: int = 8,
        gradients: Literal["shared", "local"] = "shared",
        vectorize: bool = True,
        join_equal: bool = False,
        probe: ProbeOrBatches | None = None,
        **settings: Any,
    ) -> None:
        require_count("num_replicas", num_replicas, at_most=2**16)
        require_flag("vectorize", vectorize)
        require_flag("join_equal", join_equal)
        require_kind("model must be a torch.nn.Module", model, isinstance(model, nn.Module))
        require_initialized(model.parameters())
        require_kind("loss must be a function loss(model, batch)", loss, callable(loss))
        self.model = model
        self.replicas = StackedReplicas(
            model,
            plain_optimizer(optimizer),
            loss,
            count=num_replicas,
            vectorize=vectorize,
            joins_equal=join_equal,
            probe=probe_of(probe, loss),
        )
        """The replicas live here."""
        told: dict[str, Any] = {"gradients": gradients, "probe": self.replicas.probe}
        self.engine = Ensemble(optimizer, replicas=self.replicas, **told, **settings)
        """It counts steps, syncs, and moves the base."""

    def step(self, batch: Any = None, *, batches: Sequence[Any] | None = None) -> Tensor:
        """Make one optimizer step of every replica, and return their losses.

        Args:
            batch: one batch for all replicas, as a DataLoader gives it. A list or tuple is one batch, too.
            batches: one batch for each replica instead.
        """
        if (batch is None) == (batches is None):
            raise TypeError(
                "step() must be given either batch or batches, got "
                f"{'neither' if batch is None else 'both'}: pass step(batch) for one batch that all replicas "
                "share, or step(batches=[...]) for one per replica"
            )
        if batches is not None:
            count, is_list = self.replicas.count, isinstance(batches, (list, tuple))
            must = f"batches must be a list of {count} batches, one per replica"
            share = "pass step(batch) for one that all replicas share"
            require_kind(must, batches, is_list, share)
            if len(batches) != count:
                raise ValueError(f"batches must be {count}, one per replica, got {len(batches)}: {share}")
        self.engine.watch.require_same_groups()  # before rows meet a group that they do not know
        losses = self.replicas.train_step(batch, batches)
        self.engine.step(losses)
        return losses

    @property
    def found_lr(self) -> dict[str, float]:
        """Give the peak of every learning rate as the run has corrected it; at first, what was asked for."""
        return self.engine.found_lr

    def summary(self) -> str:
        """Tell in a few plain lines what was asked for, and where the run stands."""
        return self.engine.summary()

    def converge(self) -> None:
        """Average the replicas now: before a save or an evaluation of :attr:`model`."""
        self.engine.converge()

    def finish(self) -> None:
        """End the run before its last step; see :meth:`hdet.Ensemble.finish`."""
        self.engine.finish()

    def warm_start(self, noise_scale: float = 0.01, *, norm: Literal["tensor", "global"] = "tensor") -> None:
        """Add Gaussian noise to the model's parameters, a different draw for each replica (eq. 10)."""
        self.engine.warm_start(noise_scale, norm=norm)

    def close(self) -> None:
        """Put the scheduled values back in place and let go of the optimizer, for good."""
        self.engine.close()

    def state_dict(self) -> dict[str, Any]:
        """Save everything: parameters, moments, schedule and controller. Call :meth:`converge` first."""
        return {
            "engine": self.engine.state_dict(),
            "model": {name: value.detach().clone() for name, value in self.model.state_dict().items()},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.engine.optimizer.state_dict()["param_groups"]
            ],
            "row_optimizer": self.replicas.row_optimizer.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; with another number of replicas, each takes the mean of the moments.

        A state that does not fit is refused before anything changes.
        """
        self._check_state(state_dict)
        self.model.load_state_dict(state_dict["model"])
        self.replicas.join()
        self.replicas.row_optimizer.load_state_dict(state_dict["row_optimizer"])
        optimizer_state = self.engine.optimizer.state_dict()
        for group, saved in zip(optimizer_state["param_groups"], state_dict["param_groups"], strict=True):
            group.update(saved)
        self.engine.optimizer.load_state_dict(optimizer_state)
        self.engine.load_state_dict(state_dict["engine"])
        # Now that it is known whether replicas differ:
        self.replicas.row_optimizer.fit(self.replicas.num_distinct)

    def _check_state(self, state: dict[str, Any]) -> None:
        check_keys("state_dict", state, ("engine", "model", "param_groups", "row_optimizer"))
        self.engine.check_state_dict(state["engine"])
        own = self.model.state_dict()
        check_keys("state_dict model", state["model"], own)
        if unknown := sorted(set(state["model"]) - set(own)):
            raise ValueError(
                f"state_dict model must be of this model, which has no {', '.join(unknown)}: build the model "
                "that it was saved with"
            )
        for name, value in own.items():
            if isinstance(value, Tensor):
                check_tensors(f"state_dict model {name}", [state["model"][name]], [value])
        self._check_optimizer(state["param_groups"], state["row_optimizer"])

    def _check_optimizer(self, groups: Any, row_optimizer: Any) -> None:
        own = self.engine.optimizer.param_groups
        check_list("state_dict param_groups", groups, len(own), "parameter groups")
        check_keys("state_dict row_optimizer", row_optimizer, ("moments", "num_updates"))
        check_counts("state_dict row_optimizer", row_optimizer, ("num_updates",))
        moments = row_optimizer["moments"]
        check_list("state_dict moments", moments, len(own), "parameter groups")
        names = {"momentum_buffer"} if isinstance(self.engine.optimizer, SGD) else {"exp_avg", "exp_avg_sq"}
        for saved, group, here, matrix in zip(groups, own, moments, self.replicas.rows.matrices, strict=True):
            check_keys("state_dict param_groups", saved, [name for name in ("lr", "betas") if name in group])
            check_keys("state_dict moments", here, ())
            if here and set(here) != names:
                raise ValueError(
                    f"state_dict moments must be those of {type(self.engine.optimizer).__name__}, "
                    f"{sorted(names)}, got {sorted(here)}: build the optimizer that it was saved with"
                )
            for name, value in here.items():
                check_tensors(f"state_dict moments {name}", [value], [matrix], has_rows=True)
