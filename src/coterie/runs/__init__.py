"""Run folders, with metrics and checkpoints, and callbacks that follow a run."""

from coterie.runs.folder import RunFolder, describe
from coterie.runs.progress import Callback, RunStart
from coterie.runs.recorder import Recorder

__all__ = ["Callback", "Recorder", "RunFolder", "RunStart", "describe"]
