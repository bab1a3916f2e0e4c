"""The method, the search and the recipe for JAX and optax. Imports no torch."""

from hdet.errors import HdetError, install_command

try:
    from hdet.jax.find import find_lr
    from hdet.jax.held_out_decay import HeldOutWeightDecay, HeldOutWeightDecayState
    from hdet.jax.mesh_ensemble import Ensemble, warm_start
    from hdet.jax.optax_state import AutoLRState, EnsembleState
    from hdet.jax.schedule_and_tail import auto_lr, eval_params
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    raise HdetError(f"hdet.jax needs jax and optax: {install_command('jax')}") from error

__all__ = [
    "AutoLRState",
    "Ensemble",
    "EnsembleState",
    "HeldOutWeightDecay",
    "HeldOutWeightDecayState",
    "auto_lr",
    "eval_params",
    "find_lr",
    "warm_start",
]
