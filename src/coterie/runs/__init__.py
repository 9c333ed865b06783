"""Run folders, with metrics and checkpoints, and callbacks that follow a run."""

from coterie.runs.folder import Recorder, RunFolder, describe
from coterie.runs.progress import Watch

__all__ = ["Recorder", "RunFolder", "Watch", "describe"]
