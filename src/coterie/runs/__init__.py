"""The run folder: metrics, checkpoints, resuming, and what is shown meanwhile."""

from coterie.runs.folder import Recorder, RunFolder, describe
from coterie.runs.progress import JUMPED, ConsoleWatch, Watch

__all__ = ["JUMPED", "ConsoleWatch", "Recorder", "RunFolder", "Watch", "describe"]
