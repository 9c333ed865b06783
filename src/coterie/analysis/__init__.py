"""What runs measured and what they cost: comparisons, tuning, tables, audits and estimates."""

from coterie.analysis.comparison import Comparison
from coterie.analysis.tables import Table, run_table

__all__ = ["Comparison", "Table", "run_table"]
