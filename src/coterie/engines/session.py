"""What several runs on the same base and data have in common, loaded once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, get_args

import torch

from coterie.bases import Base, Bases
from coterie.bases.devices import names_of
from coterie.config.plugins import check_importable
from coterie.config.run import RunConfig
from coterie.data.quality import AT_START, sentences
from coterie.engines.floor import as_result, floor_items
from coterie.engines.local import local_run
from coterie.engines.rounds import Rounds
from coterie.errors import CoterieError
from coterie.federation.checks import check
from coterie.federation.participants import (
    Federation,
    Participant,
    described_templates,
    gathered,
)
from coterie.federation.reading import Reading
from coterie.inference.reference import reference_digest
from coterie.methods.contract import SERVER
from coterie.runs import Callback, RunFolder, describe

Engine = Literal["local", "flower-simulation"]
"""Where clients work: in this process, one at a time; or in several processes of this machine."""


class Session:
    """One base and one set of texts, for as many runs as are wanted."""

    def __init__(
        self, config: RunConfig, threads: int | None = None, engine: Engine = "local"
    ) -> None:
        self.config, self.engine = config, engine
        self.rounds = _rounds(engine, config)
        every = torch.get_num_threads() if engine == "local" else 1  # then clients are many at once
        torch.set_num_threads(threads or config.threads or every)
        self._federations: dict[tuple[int, bool, str], Federation] = {}
        self.warnings: list[str] = []
        """What a person should know of the clients' texts, as they were first divided."""

    @cached_property
    def bases(self) -> Bases:
        """The one copy of each base."""
        config = self.config
        return Bases(config.training.precision, config.data.window, config.root, config.device)

    @property
    def base(self) -> Base:
        """The run's base."""
        return self.bases[self.config.base]

    def participants(self, config: RunConfig) -> list[Participant]:
        """The clients of a run with this session's data."""
        return self.federation(config).clients

    def federation(self, config: RunConfig) -> Federation:
        """Everybody who takes part in a run with this session's data, with their bases."""
        key = (config.seed, config.pooled, config.evaluation.split)
        if key not in self._federations:
            found = gathered(config, self.base.tokenizer, self._look)
            clients = [self._with_base(config, client) for client in found.clients]
            server = None if found.server is None else self._with_base(config, found.server)
            self._federations[key] = Federation(clients, server)
        return self._federations[key]

    def floor(self, config: RunConfig) -> dict[str, Any]:
        """Return the floor under the scores of a run with this session's data, as a result."""
        alone = config.model_copy(update={"pooled": False})
        found = [floor_items(alone, client) for client in self.participants(alone)]
        return as_result({n: kept for items in found for n, kept in items.items()}, config.seed)

    def _look(self, read: Reading) -> None:
        if not self._federations:
            self.warnings = sentences(read.quality(self.config, AT_START))

    def _with_base(self, config: RunConfig, one: Participant) -> Participant:
        return replace(one, base=self.bases[config.base_of(one.name)])

    def check(self, *configs: RunConfig) -> None:
        """Raise CoterieError if a method cannot run with the clients there are."""
        for config in configs:
            clients = self.participants(config)
            public = clients[0].public is not None
            check(config, tuple(client.name for client in clients), public)

    def start(
        self, config: RunConfig, folder: RunFolder, callbacks: Sequence[Callback] = ()
    ) -> Rounds[Any]:
        """A run with this session's data, ready for its rounds."""
        who = self.federation(config)
        return self.rounds(config, self.base, who.clients, folder, callbacks, who.server)

    def description(self, config: RunConfig, participants: list[Participant]) -> dict[str, Any]:
        """What a run folder must say so that the run can be repeated."""
        clients = {p.name: p.described() for p in participants}
        own = self.federation(config).server
        server = {} if own is None else {SERVER: own.described()}
        tokenizers = {base: loaded.tokenizer for base, loaded in self.bases.items()}
        templates = described_templates(config, tokenizers)
        earlier = {} if (hash := reference_digest(config)) is None else {"reference": hash}
        more = {"engine": self.engine, "device": names_of(config.device), **templates, **server}
        return describe(config.as_dict(), clients, config.plugins, **earlier, **more)

    def finish(
        self, folder: RunFolder, config: RunConfig, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Bring one run to its result, unless it has one."""
        if folder.result is not None:
            return
        for name in self.changed(folder, config):
            whose = "the server" if name == SERVER else f"client {name!r}"
            raise CoterieError(
                f"The text of {whose} has changed since the run in {folder.path} began; start a "
                "new run."
            )
        if folder.description.get("reference") != reference_digest(config):
            raise CoterieError(
                f"The run that training.dpo.reference names has changed since the run in "
                f"{folder.path} began; start a new run."
            )
        self.start(config, folder, callbacks).run()

    def changed(self, folder: RunFolder, config: RunConfig) -> list[str]:
        """Those whose text is not what it was when the run in a folder began."""
        described = folder.description
        server = {SERVER: described[SERVER]} if SERVER in described else {}
        then = {name: one["data"] for name, one in (described["clients"] | server).items()}
        who = self.federation(config)
        everybody = filter(None, (*who.clients, who.server))
        now = {one.name: one.digest() for one in everybody}
        return [n for n in sorted(then.keys() | now.keys()) if then.get(n) != now.get(n)]


def _rounds(engine: Engine, config: RunConfig) -> Callable[..., Rounds[Any]]:
    """Return what makes the rounds; raises CoterieError for an engine that cannot."""
    if engine == "local":
        return local_run
    if engine not in get_args(Engine):
        raise CoterieError(
            f"There is no engine {engine!r}; choose one of {', '.join(get_args(Engine))}."
        )
    from coterie.network.flower import imports_for

    with imports_for(f"The engine {engine}", "simulation"):
        from coterie.engines.simulation import SimulatedClients
    check_importable(f"The engine {engine}", config.objects)
    return partial(Rounds, SimulatedClients)
