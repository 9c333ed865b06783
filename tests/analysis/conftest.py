"""Run folders written by hand."""

from written_runs import written

__all__ = ["written"]
