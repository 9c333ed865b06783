"""Analysis of runs: comparisons, tuning, tables, audits, cost estimates and data for figures."""

from coterie.analysis.comparison import Comparison
from coterie.analysis.tables import Table, run_table

__all__ = ["Comparison", "Table", "run_table"]
