"""The paper's claims beyond its Table 1: other hyperparameters, robustness, a group-aware start, and why."""

from research.claims.experiment import STUDIES, Claims, read_claims, run_claims
from research.claims.page import table

__all__ = ["STUDIES", "Claims", "read_claims", "run_claims", "table"]
