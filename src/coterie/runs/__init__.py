"""Run folders, with metrics and checkpoints, and callbacks that follow a run."""

from coterie.runs.folder import Recorder, RunFolder, describe
from coterie.runs.progress import Callback, RunStart

__all__ = ["Callback", "Recorder", "RunFolder", "RunStart", "describe"]
