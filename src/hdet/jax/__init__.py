"""The search and the recipe for JAX and optax. Imports no torch."""

from hdet.errors import HdetError, install_command

try:
    from hdet.jax.auto import AutoLRState, auto_lr, eval_params
    from hdet.jax.find import find_lr
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    raise HdetError(f"hdet.jax needs jax and optax: {install_command('jax')}") from error

__all__ = ["AutoLRState", "auto_lr", "eval_params", "find_lr"]
