"""Run folders, with metrics and checkpoints, and callbacks that follow a run."""

from coterie.runs.folder import RECEIVED, RunFolder, describe
from coterie.runs.progress import Callback, RunStart
from coterie.runs.read import turn_of
from coterie.runs.recorder import Recorder

__all__ = ["RECEIVED", "Callback", "Recorder", "RunFolder", "RunStart", "describe", "turn_of"]
