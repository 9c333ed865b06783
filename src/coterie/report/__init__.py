"""Tables and figures of runs."""

from coterie.report.tables import Comparison, Table, run_table

__all__ = ["Comparison", "Table", "run_table"]
