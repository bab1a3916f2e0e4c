"""Where replicas live, and everything that passes between them.

``port`` says what the method asks of its replicas. ``ranks`` has one replica in every process, and
``stacked`` has all of them in this process.
"""

from hdet.replicas.average import Averager
from hdet.replicas.gradients import finite_mean_hook
from hdet.replicas.group import ReplicaGroup
from hdet.replicas.port import Replicas, Report
from hdet.replicas.ranks import RankReplicas
from hdet.replicas.warm_start import warm_start

__all__ = ["Averager", "RankReplicas", "ReplicaGroup", "Replicas", "Report", "finite_mean_hook", "warm_start"]
