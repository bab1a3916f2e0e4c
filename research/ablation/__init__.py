"""The paper's Table 1 repeated, with the rows that it leaves out, and verdicts on its claims."""

from research.ablation.experiment import ablate, read_ablation
from research.ablation.summary import Ablation, Case, Result
from research.ablation.table import table
from research.ablation.verdicts import Claim, claims

__all__ = ["Ablation", "Case", "Claim", "Result", "ablate", "claims", "read_ablation", "table"]
