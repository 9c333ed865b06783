"""The local engine: all clients in this process, one at a time.

They share one base in memory. The states of all but a few clients are on disk, so memory hardly
grows with the number of clients.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from coterie.aggregation.mean import Rule, weighted_mean
from coterie.bases import Base
from coterie.config import RunConfig
from coterie.engines.clients import ClientParts, NewStates
from coterie.engines.rounds import Download, Rounds
from coterie.errors import Diverged
from coterie.federation import Participant
from coterie.messages import State
from coterie.messages.names import BYTES_DOWN
from coterie.methods.contract import ClientSide
from coterie.runs import Recorder, RunFolder, Watch
from coterie.training.context import ClientId


class LocalClients(Mapping[ClientId, ClientSide]):
    """Clients in this process; by name, their sides of the method as their last steps left them."""

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        recorder: Recorder,
    ) -> None:
        self.folder, self.recorder, self.new = folder, recorder, NewStates(folder)
        self.parts = ClientParts(config, base, participants, recorder.log, self.new)

    def __getitem__(self, name: ClientId) -> ClientSide:
        """Return a client's side, as its last step left it."""
        return self.parts[name].side

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.parts)

    def __len__(self) -> int:
        """Return the number of all clients."""
        return len(self.parts)

    def at_work(self) -> AbstractContextManager[object]:
        """Return a block within which new states are on disk."""
        return self.new.emptied()

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """Make every client as it is at the run's start; yield its first message."""
        return self.parts.hellos()

    def step(
        self, round: int, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """Train clients in turn; yield their uploads."""
        for name in names:
            received, before = download(name), self.recorder.count
            try:
                upload = self.parts[name].step(round, received, counted=name not in lost)
            except Diverged as error:
                self.recorder.undo(before)
                self.parts.begin_anew(name)
                self.recorder.log(name, BYTES_DOWN, len(received))
                upload = error
            yield name, upload

    def finish(self, round: int, download: Download, lost: Collection[ClientId]) -> None:
        """Let every client receive the last download, and be scored."""
        for name, part in self.parts.items():
            part.finish(download(name), self.new.kept(name), round, counted=name not in lost)
            part.keep_items(self.folder)

    def stops(self, name: ClientId, rounds: int) -> bool:
        """Return whether a client takes no part in rounds after so many."""
        return self.parts.stop(name, rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """Yield what a checkpoint has of the clients."""
        return self.parts.states()

    def restore(self) -> None:
        """Take every client back to the newest checkpoint."""
        self.parts.restore()

    def covered(self) -> set[tuple[str, ...]]:
        """Return the layers of the bases that clients' adapters modify."""
        return self.parts.covered


LocalRun = Rounds[LocalClients]


def local_run(
    config: RunConfig,
    base: Base,
    participants: Sequence[Participant],
    folder: RunFolder,
    watch: Watch,
    own: Participant | None = None,
    rule: Rule = weighted_mean,
) -> LocalRun:
    """Return a run whose clients work in this process and have joined; see `Rounds`."""
    run = Rounds(LocalClients, config, base, participants, folder, watch, own, rule)
    run.join()
    return run
