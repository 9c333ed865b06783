"""Tables of results, their statistics, and how they compare with a paper's."""

from coterie.results.comparison import Comparison
from coterie.results.tables import Table, run_table

__all__ = ["Comparison", "Table", "run_table"]
