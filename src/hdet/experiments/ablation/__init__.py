"""The paper's Table 1 repeated, with the rows that it leaves out, and verdicts on its claims."""

from hdet.experiments.ablation.experiment import ablate, read_ablation
from hdet.experiments.ablation.summary import Ablation, Case, Result
from hdet.experiments.ablation.table import table
from hdet.experiments.ablation.verdicts import Claim, claims

__all__ = ["Ablation", "Case", "Claim", "Result", "ablate", "claims", "read_ablation", "table"]
