"""hdet's finders against what a user could do instead, from several starts, at equal budget."""

from research.compare.experiment import NOTES, compare, read_comparison, table
from research.compare.summary import Case, Cell, Comparison, Row

__all__ = ["NOTES", "Case", "Cell", "Comparison", "Row", "compare", "read_comparison", "table"]
