"""One of AlgoPerf's own training algorithms as a submission, at a learning rate of our choice.

Two environment variables say which: ALGOPERF_BASELINE is a name of BASELINES, and ALGOPERF_LEARNING_RATE a
number. The functions are those of the clone. The batch size is that of our submission, since theirs leave out
the mnist workload, and hyperparameters are given here, since the self-tuning ruleset gives none.
"""

from __future__ import annotations

import os
from collections import namedtuple
from functools import partial
from importlib import import_module
from typing import Any

from research.algoperf.submission import get_batch_size

__all__ = ["BASELINES", "get_batch_size"]

BASELINES = {
    "nadamw": "algorithms.baselines.self_tuning.pytorch_nadamw_full_budget",
    "adamw": "algorithms.target_setting_algorithms.pytorch_adamw",
    "nesterov": "algorithms.target_setting_algorithms.pytorch_nesterov",
}
SETTINGS = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "warmup_steps": 300,
    "decay_steps_factor": 0.9,
    "end_factor": 0.01,
}
"""Of those that take any. NAdamW brings its own."""
_FUNCTIONS = ("init_optimizer_state", "update_params", "data_selection", "prepare_for_eval")


def __getattr__(name: str) -> Any:
    """Look the function up when AlgoPerf asks for it: the clone is not there before."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs: Any = import_module(BASELINES[os.environ["ALGOPERF_BASELINE"]])
    lr = float(os.environ["ALGOPERF_LEARNING_RATE"])
    if hasattr(theirs, "HPARAMS"):
        theirs.HPARAMS = theirs.HPARAMS._replace(learning_rate=lr)
        return getattr(theirs, name)
    function = getattr(theirs, name)  # an AttributeError of theirs tells AlgoPerf that there is none
    if name == "data_selection":
        return function
    return partial(_with, function, {"learning_rate": lr, **SETTINGS})


def _with(function: Any, settings: dict[str, float], *args: Any, **named: Any) -> Any:
    """Call the function with these hyperparameters instead of none: they are the fourth argument."""
    hyperparameters = namedtuple("Hyperparameters", settings)(**settings)
    if "hyperparameters" in named:
        named["hyperparameters"] = hyperparameters
    else:
        args = (*args[:3], hyperparameters, *args[4:])
    return function(*args, **named)
