"""The run folder: metrics, checkpoints, resuming, and what follows a run."""

from coterie.runs.folder import Recorder, RunFolder, describe
from coterie.runs.progress import Watch

__all__ = ["Recorder", "RunFolder", "Watch", "describe"]
