"""Sessions, which load bases and data once for several runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Literal, get_args

import torch

from coterie.bases import Base, Bases, weights_digest
from coterie.bases.devices import names_of
from coterie.bases.lora import lora_digests
from coterie.config.plugins import check_importable
from coterie.config.run import RunConfig
from coterie.engines.cluster import check_address, set_variables
from coterie.engines.floor import as_result, floor_items
from coterie.engines.local import local_run
from coterie.engines.rounds import Rounds
from coterie.errors import CoterieError, imports_for
from coterie.evaluation.quality import AT_START, sentences
from coterie.federation.checks import check
from coterie.federation.participants import (
    Federation,
    Participant,
    described_templates,
    gathered,
)
from coterie.federation.reading import Reading
from coterie.federation.sizes import check_run
from coterie.inference.reference import reference_digest
from coterie.methods.contract import SERVER
from coterie.runs import Callback, RunFolder, describe
from coterie.runs.trackers import trackers

Engine = Literal["local", "ray"]
"""The name of an engine: `local` (one process) or `ray` (several processes or machines)."""


class Session:
    """Bases and data that several runs share.

    Args:
        config: The run whose bases and data are loaded.
        threads: The number of threads that PyTorch uses. None: the value of `threads` in the run
            file, or the engine's default.
        engine: The engine.
        address: The HOST:PORT of the Ray cluster that the engine `ray` uses; None: this machine.
        gpus: The number of GPUs of each worker of the engine `ray`; None: derived from the run's
            `device`.
    """

    def __init__(
        self,
        config: RunConfig,
        threads: int | None = None,
        engine: Engine = "local",
        address: str | None = None,
        gpus: float | None = None,
    ) -> None:
        self.config, self.engine = config, engine
        self.rounds = _rounds(engine, config, address, gpus)
        # Other engines run one client per processor.
        default = torch.get_num_threads() if engine == "local" else 1
        torch.set_num_threads(threads or config.threads or default)
        self._federations: dict[tuple[int, bool, str, str], Federation] = {}
        self.warnings: list[str] = []
        """Warnings about the quality of the clients' texts."""

    @cached_property
    def bases(self) -> Bases:
        """A cache of the bases that the runs of this session use. Each base is loaded once."""
        config = self.config
        return Bases(config.precision, config.data.window, config.root, config.device)

    @property
    def base(self) -> Base:
        """The base that the run file sets for all clients without a base of their own."""
        return self.bases[self.config.base]

    def participants(self, config: RunConfig) -> list[Participant]:
        """Return the clients of a run, with this session's data."""
        return self.federation(config).clients

    def federation(self, config: RunConfig) -> Federation:
        """Return the clients and the server of a run, with this session's bases.

        Runs of one session may differ in the section `data`, for example if a table's rows do.
        """
        data = config.data.model_dump_json()
        key = (config.seed, config.pooled, config.evaluation.split, data)
        if key not in self._federations:
            read = gathered(config, self.base.tokenizer, self._check_quality)
            clients = [self._with_base(config, client) for client in read.clients]
            server = None if read.server is None else self._with_base(config, read.server)
            self._federations[key] = Federation(clients, server)
        return self._federations[key]

    def floor(self, config: RunConfig) -> dict[str, Any]:
        """Return the floor: the scores of a model that always gives the commonest answer.

        For each client of this session, the model answers every test question with the commonest
        answer in the client's training data. The scores have the format of `RunFolder.outcome`.
        """
        alone = config.model_copy(update={"pooled": False})
        clients = [floor_items(alone, client) for client in self.participants(alone)]
        items = {name: scores for texts in clients for name, scores in texts.items()}
        return as_result(items, config.seed)

    def _check_quality(self, read: Reading) -> None:
        if not self._federations:
            self.warnings = sentences(read.quality(self.config, AT_START))

    def _with_base(self, config: RunConfig, participant: Participant) -> Participant:
        return replace(participant, base=self.bases[config.base_of(participant.name)])

    def check(self, *configs: RunConfig) -> None:
        """Check that the method of each run supports the clients of the run.

        Raises:
            CoterieError: If a method does not support the clients of its run, if a message may be
                too large, or if the package of a tracker is not installed.
        """
        for config in configs:
            trackers(config.trackers, Path(), ())
            clients = self.participants(config)
            public = clients[0].public is not None
            names = tuple(client.name for client in clients)
            check(config, names, public)
            check_run(config, self.base.model, names, Path(gettempdir()))

    def start(
        self, config: RunConfig, folder: RunFolder, callbacks: Sequence[Callback] = ()
    ) -> Rounds[Any]:
        """Create the round loop of a run that uses this session's data.

        Args:
            config: The run.
            folder: The run folder.
            callbacks: The callbacks whose hooks are called during the run.

        Returns:
            The round loop. The run starts when the caller calls the round loop's method `run`.
        """
        federation = self.federation(config)
        clients, server = federation.clients, federation.server
        # Trackers come first, because a later callback can stop the run after a complete round.
        followers = [*trackers(config.trackers, folder.path, callbacks), *callbacks]
        return self.rounds(config, self.base, clients, folder, followers, server)

    def description(self, config: RunConfig, participants: list[Participant]) -> dict[str, Any]:
        """Describe a run for run.json, so that the run can be repeated.

        Args:
            config: The run.
            participants: The clients' data.
        """
        clients = {p.name: p.described() for p in participants}
        server = self.federation(config).server
        server_data = {} if server is None else {SERVER: server.described()}
        tokenizers = {base: loaded.tokenizer for base, loaded in self.bases.items()}
        templates = described_templates(config, tokenizers)
        reference = {} if (hash := reference_digest(config)) is None else {"reference": hash}
        engine = {"engine": self.engine, "device": names_of(config.device)}
        weights = {base.name: weights_digest(base, config.root) for base in self.bases}
        loras = lora_digests(config.all_bases, config.root)
        details = {**reference, **loras, **engine, "weights": weights, **templates}
        return describe(config.as_dict(), clients, config.plugins, **details, **server_data)

    def finish(
        self, folder: RunFolder, config: RunConfig, callbacks: Sequence[Callback] = ()
    ) -> None:
        """Start or resume a run and complete it; do nothing if the run is already finished.

        Args:
            folder: The run folder.
            config: The run.
            callbacks: The callbacks whose hooks are called during the run.

        Raises:
            CoterieError: If a participant's data have changed since the run started, or if the run
                that provides the reference model of DPO has changed.
        """
        if folder.result is not None:
            return
        for name in self.changed(folder, config):
            owner = "the server" if name == SERVER else f"client {name!r}"
            raise CoterieError(
                f"The text of {owner} has changed since the run in {folder.path} began; start a "
                "new run."
            )
        if folder.description.get("reference") != reference_digest(config):
            raise CoterieError(
                f"The run that training.dpo.reference names has changed since the run in "
                f"{folder.path} began; start a new run."
            )
        self.start(config, folder, callbacks).run()

    def changed(self, folder: RunFolder, config: RunConfig) -> list[str]:
        """Return the names of the participants whose text has changed since a run started.

        Args:
            folder: The run folder.
            config: The run.

        Returns:
            The sorted names.
        """
        described = folder.description
        server = {SERVER: described[SERVER]} if SERVER in described else {}
        old = {name: entry["data"] for name, entry in (described["clients"] | server).items()}
        federation = self.federation(config)
        participants = filter(None, (*federation.clients, federation.server))
        new = {participant.name: participant.digest() for participant in participants}
        return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _rounds(
    engine: Engine, config: RunConfig, address: str | None, gpus: float | None
) -> Callable[..., Rounds[Any]]:
    """Return a function that creates the round loop of a run.

    Raises:
        CoterieError: If the engine is unknown or not installed, or if `address` or `gpus` cannot be
            used. The error is also raised if the engine's worker processes could not import a class
            that the run uses, such as the class of a method that is defined in a notebook.
    """
    if engine != "ray" and (address, gpus) != (None, None):
        raise CoterieError("--address and --gpus need the engine `ray` (--engine ray).")
    if engine == "local":
        return local_run
    if engine not in get_args(Engine):
        raise CoterieError(
            f"There is no engine {engine!r}; choose one of {', '.join(get_args(Engine))}."
        )
    set_variables(address)
    with imports_for(f"The engine {engine}", "ray"):
        from coterie.engines.ray import RayClients
    if address is not None:
        check_address(address)  # before data are read
    check_importable(f"The engine {engine}", config.objects)
    return partial(Rounds, partial(RayClients, address=address, gpus=gpus))
