"""The run folder: metrics, checkpoints, resuming, and what is shown meanwhile."""

from coterie.runs.folder import Recorder, RunFolder, describe
from coterie.runs.progress import ConsoleWatch, Watch

__all__ = ["ConsoleWatch", "Recorder", "RunFolder", "Watch", "describe"]
