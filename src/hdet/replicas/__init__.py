"""Who the replicas are, and everything that passes between them."""

from hdet.replicas.average import Averager
from hdet.replicas.exchange import exchange, require_same_settings, widest_float
from hdet.replicas.gradients import finite_mean_hook
from hdet.replicas.group import Replicas

__all__ = [
    "Averager",
    "Replicas",
    "exchange",
    "finite_mean_hook",
    "require_same_settings",
    "widest_float",
]
