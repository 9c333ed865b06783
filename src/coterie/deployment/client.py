"""The client's process in a deployment. Each order of the server takes effect once or not at all.

The process has a run folder, which contains only this client. A step is the client's part of one
turn; its result is an upload. The newest checkpoint contains the state after the last step. Only
the server's next order shows whether the server accepted the upload of that step, so the previous
checkpoint is not deleted until that order arrives:

checkpoints/00004/   the state after the last step whose upload the server has accepted
checkpoints/00005/   the state after the next step, the upload of this step, and about.json, which
                     identifies the order for this step and has the lines that are appended to
                     metrics.jsonl if the server accepts the upload
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import Any

import torch

from coterie.bases import Base, load_base
from coterie.bases.devices import device_type, names_of
from coterie.bases.lora import lora_digests
from coterie.bases.precision import SLOW_PRECISION, fast_precision
from coterie.config.run import RunConfig
from coterie.deployment import terms
from coterie.deployment.orders import Orders, check_turn
from coterie.deployment.site import Declined, Site, ledger_of, run_folder
from coterie.engines.client_host import ClientHost
from coterie.errors import CoterieError, Diverged, Unwritable
from coterie.evaluation.quality import AT_START, sentences
from coterie.federation.participants import Participant, described_templates, gathered
from coterie.federation.pipeline import budgets_of
from coterie.federation.reading import Reading
from coterie.federation.sizes import MiB, check_messages, message_sizes
from coterie.files import parse_json
from coterie.messages import MessageError
from coterie.messages.envelope import LEAVES, Entry, Fault, Order, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.messages.names import SECONDS
from coterie.network.link import Seen
from coterie.privacy.ledger import Ledger
from coterie.runs import Recorder, RunFolder, describe, read
from coterie.runs.result import result
from coterie.turn import TRAIN, Turn

log = logging.getLogger(__name__)
Entries = list[dict[str, Any]]
"""Lines of metrics.jsonl."""
FAULTS: dict[type[CoterieError], Fault] = {MessageError: "refused", Diverged: "diverged"}
"""The fault that is reported to the server for each type of error; the default is "failed"."""


class Worker:
    """A client's process, which answers the server's orders.

    A loaded base stays in memory for all rounds, and for later runs with the same base.
    """

    def __init__(self, site: Site, seen: Seen = lambda *_: None) -> None:
        self.site, self.seen = site, seen
        self.bases: dict[tuple[object, ...], Base] = {}
        self.run: SiteRun | None = None
        self.orders = Orders(site)
        self.finished = False
        self.error = ""
        """The reason why the client left without the run's result; empty if there is none."""
        self.declined = False
        """Whether the client left because its user declined the run."""

    def answer(self, data: bytes) -> bytes:
        """Return the serialised reply to an order.

        If the client cannot carry out the order, the reply reports the error.

        Raises:
            MessageError: `data` is not a serialised order.
        """
        order, body = unseal(Order, data)
        try:
            return self._obey(order, body)
        except Declined as raised:
            self.finished, self.declined, self.error = True, True, str(raised)
            return self._reply(order, fault="declined")
        except CoterieError as raised:
            error, fault = raised, FAULTS.get(type(raised), "failed")
        if order.kind == "join" and not isinstance(error, MessageError | Unwritable):
            self.error = str(error)  # this machine lacks what the run needs, so a retry would fail
            return self._refuse(order, "unable", f"cannot be joined: {error}")
        log.error("order to %s: %s", order.kind, error)
        self.seen("fault", str(error))
        stops = fault == "diverged" and self.run is not None and self.run.ends_with(order)
        return self._reply(order, fault=fault, stops=stops)

    def close(self) -> None:
        """Release the lock on the run's folder."""
        if self.run is not None:
            self.run.close()

    def _obey(self, order: Order, body: bytes) -> bytes:
        if order.client != self.site.name:
            raise MessageError(
                f"The server sent this client an order for {order.client!r}; the order is ignored."
            )
        if order.kind == "join":
            return self._join(order)
        if self.run is None or self.run.id != order.run:
            return self._reply(order, fault="unknown run")
        if order.kind == "end":
            self.error = (
                "The server ended the run after an error; ask the server's operator for the cause."
            )
            self.finished = True
            return self._reply(order)
        check_turn(order, self.run.config)
        if order.kind == "step":
            upload, entries = self.run.step(order, body, self.orders)
            return self._reply(order, upload, entries, stops=self.run.ends_with(order))
        entries = self.run.finish(order, body)
        self.finished = True
        return self._reply(order, entries=entries)

    def _join(self, order: Order) -> bytes:
        if reason := terms.version_mismatch(order):
            fault = "protocol" if order.protocol != PROTOCOL else "plugin"
            return self._refuse(order, fault, reason)
        folder = run_folder(self.site, order.run)
        agreements = self._agreements(folder)
        for agreed in agreements:  # before anything is computed from what the server requests
            if reason := terms.disagreement(agreed, order):
                return self._refuse(order, "terms", reason)
        config = self.site.config(order)
        if reason := terms.extra_plugin(order, config):
            return self._refuse(order, "plugin", reason)
        if not agreements:
            self.site.ask(order, config)
        if reason := terms.public_text_mismatch(order, config):
            return self._refuse(order, "public", reason)
        ledger = ledger_of(self.site, order.run)
        if reason := terms.budget_excess(budgets_of(config), ledger):
            return self._refuse(order, "budget", reason)
        if reason := self.orders.refusal(order, config, folder):
            return self._refuse(order, "limits", reason)
        torch.set_num_threads(config.threads or torch.get_num_threads())
        base = self._base(config)
        if order.base not in ("", base.digest):
            reason = f"has a base with different weights than {config.base}"
            return self._refuse(order, "base", reason)
        if self.run is None or self.run.id != order.run:
            self.close()
            self.run = SiteRun(order, config, base, self.site, self.seen, ledger)
        self.seen("joined", self.run)
        return self._reply(order, self.run.host.hello(), base=base.digest)

    def _agreements(self, folder: RunFolder) -> list[terms.Terms]:
        """Return the terms that the user has agreed to, for this run or for all runs."""
        recorded = folder.description.get("agreed") if folder.is_run else None
        return [agreed for agreed in (recorded, self.site.agreed) if agreed is not None]

    def _refuse(self, order: Order, fault: Fault, reason: str) -> bytes:
        """Return a reply that refuses to join a run.

        If `LEAVES` contains the fault, the client then stops. Otherwise, it waits for more orders.

        Args:
            order: The server's order to join the run.
            fault: The fault to report to the server.
            reason: The reason, as the predicate of a sentence whose subject is "the run".
        """
        self.finished = self.finished or fault in LEAVES
        if fault in ("terms", "limits", "budget"):
            self.error = f"The run {reason}. Nothing more was sent."
        sentence = f"the run {reason}"
        log.error(sentence)
        self.seen("fault", sentence)
        return self._reply(order, fault=fault)

    def _base(self, config: RunConfig) -> Base:
        key = (config.base, config.precision, config.data.window)
        if key not in self.bases:
            self.bases = {key: load_base(*key, config.root, config.device)}
            log.info("loaded the base %s: %s", config.base, self.bases[key].digest)
        return self.bases[key]

    def _reply(
        self,
        order: Order,
        body: bytes = b"",
        entries: Entries | None = None,
        *,
        fault: Fault | None = None,
        base: str = "",
        stops: bool = False,
    ) -> bytes:
        shares = self.run is not None and self.run.config.deployment.share_metrics
        fields = [{k: v for k, v in e.items() if k != "during"} for e in entries or []]
        shared = [Entry(**entry) for entry in fields] if shares else None
        reply = Reply(
            run=order.run,
            client=self.site.name,
            kind=order.kind,
            turn=order.turn,
            fault=fault,
            base=base,
            stops=stops or None,
            entries=shared,
        )
        return seal(reply, body)


class SiteRun:
    """One client's part of a deployed run, with a run folder that contains only this client."""

    def __init__(
        self, order: Order, config: RunConfig, base: Base, site: Site, seen: Seen, ledger: Ledger
    ) -> None:
        self.id, self.config, self.seen, self.ledger = order.run, config, seen, ledger
        # The client's configuration contains no other clients.
        [participant] = gathered(config, base.tokenizer, self._warn).clients
        self.folder = self._folder(order, site, participant, base)
        self.locked = ExitStack()
        self.locked.enter_context(self.folder.lock())
        self.recorder = Recorder(lambda _, __, name, value: seen(name, value))
        self.host = ClientHost(config, base, participant, self.recorder, ledger)
        if config.precision == "bf16" and fast_precision(device_type(config.device)) == "fp32":
            seen("warning", SLOW_PRECISION)
        sizes = message_sizes(config, self.host.side.parameters(), order.clients or 1)
        check_messages(sizes, config.deployment.largest_message * MiB)
        if self.folder.checkpoints():
            self._restore()
        else:
            self._save(read.About(turn=-1, digest="", entries=[]))

    def close(self) -> None:
        """Release the lock on the folder."""
        self.locked.close()

    def _warn(self, reading: Reading) -> None:
        """Show warnings about this client's texts, without sending the warnings to the server."""
        for text in sentences(reading.quality(self.config, AT_START)):
            self.seen("warning", text)

    def _restore(self) -> None:
        name = self.host.name
        self.host.restore(self.folder.load(f"client-{name}"), self.folder.find(f"kept-{name}"))

    def _folder(self, order: Order, site: Site, participant: Participant, base: Base) -> RunFolder:
        folder, config = run_folder(site, self.id), self.config
        if not folder.is_run:
            extra = {
                "run": self.id,
                "agreed": terms.requested_terms(order),
                "device": names_of(config.device),
            }
            loras = lora_digests(config.all_bases, config.root)
            extra |= described_templates(config, {config.base: base.tokenizer}) | loras
            clients = {site.name: participant.described()}
            description = describe(config.as_dict(), clients, config.plugins, **extra)
            return RunFolder.create(folder.path, description)
        if folder.description["clients"][site.name]["data"] != participant.digest():
            raise CoterieError(
                f"The client's text has changed since the run in {folder.path} began; restore the "
                "text."
            )
        return folder

    def step(self, order: Order, download: bytes, orders: Orders) -> tuple[bytes, Entries]:
        """Execute this client's part of a turn, and return the upload and the recorded metrics.

        If the client has executed the same order before, the stored upload and metrics are returned
        without training again.
        """
        digest, turn = blake2b(download, digest_size=8).hexdigest(), self.config.turn(order.turn)
        newest = self._settle(order, digest)
        if (newest.turn, newest.digest) == (turn.number, digest):
            log.info("round %d: sent the stored upload again", turn.round + 1)
            return self.folder.read("upload"), newest.entries
        if turn.phase == TRAIN:
            orders.count_training(turn, self.folder)
        with self._transaction(turn) as began:
            counted = self.config.counts(order.counted, turn.number)
            upload = self.host.step(turn, download, counted=counted)
            entries = self._complete(turn.number, digest, began, upload=upload)
        self.seen("step", turn)
        if turn.closes and self.ends_with(order):
            self.seen("stopped", self.config.evaluation.patience)
        return upload, entries

    def finish(self, order: Order, download: bytes) -> Entries:
        """Apply the last download, write the result, and return the recorded metrics."""
        last = self.config.turn(order.turn - 1)
        if self._about().turn <= last.number:
            self._settle(order, "")
            with self._transaction(last) as began:
                kept = self.folder.find(f"kept-{self.host.name}")
                counted = self.config.counts(order.counted, order.turn)
                self.host.finish(download, kept, last, counted=counted)
                self._complete(order.turn, "", began)
        about = self._about()
        self._commit(about)
        self.folder.finish(result(self.folder, self.config.label, self.config.method.reports))
        self.seen("finished", self.folder.path)
        return about.entries

    def ends_with(self, order: Order) -> bool:
        """Return whether this client stops training after the exchange of an order."""
        turn = self.config.turn(order.turn)
        return self.host.stops(turn.round + turn.last)

    @contextmanager
    def _transaction(self, turn: Turn) -> Iterator[float]:
        """Restore the client's saved state if the body of the with statement raises an exception.

        The body executes an order of the server, which the server can repeat after the exception.

        Yields:
            The time at which the body begins, in seconds of the monotonic clock.
        """
        self.recorder.turn = turn
        try:
            yield time.monotonic()
        except BaseException:
            self.recorder.take()
            self._restore()
            raise

    def _complete(self, number: int, digest: str, began: float, **files: bytes) -> Entries:
        """Save the client's state after its part of a turn, and return the recorded metrics.

        Args:
            number: The number of the turn in the server's order.
            digest: The digest of the download; empty for the download after the last turn.
            began: The time at which the client began its part, in seconds of the monotonic clock.
            files: The contents of files to save with the state.
        """
        self.host.keep_items(self.folder.keep_items)
        self.recorder.log(None, SECONDS, time.monotonic() - began)
        about = read.About(turn=number, digest=digest, entries=self.recorder.take())
        self._save(about, **files)
        return about.entries

    def _settle(self, order: Order, digest: str) -> read.About:
        """Commit the newest step if the server accepted its upload, and undo the step otherwise.

        A step is this client's part of a turn. If the server repeats the order of the newest step,
        the step is not undone, so that the stored upload can be sent again.

        Args:
            order: The server's new order; `counted` is this client's last turn that was accepted.
            digest: The digest of the download in the new order.

        Returns:
            The content of about.json for the step that is the newest after the call.
        """
        newest = self._about()
        counted = -1 if order.counted is None else order.counted
        if newest.turn == counted:
            self._commit(newest)
        elif (newest.turn, newest.digest) != (order.turn, digest) and newest.turn > counted:
            log.warning(
                "the server did not accept the upload of round %d; the round has been undone",
                self.config.turn(newest.turn).round + 1,
            )
            if len(self.folder.checkpoints()) > 1:
                self.folder.drop([self.folder.checkpoint(newest.turn + 1)])
                self._restore()
                newest = self._about()
        if newest.turn < counted:
            missing = self.config.turn(counted).round + 1
            if self.host.pipeline.down:
                raise CoterieError(
                    f"The state of round {missing} is missing, but each download of this run "
                    "contains only the differences from the previous download; ask the server's "
                    "operator to expel this client."
                )
            log.warning("the state of round %d is missing; continuing without it", missing)
        return newest

    def _commit(self, newest: read.About) -> None:
        """Append the newest step's metrics to metrics.jsonl; keep only the newest checkpoint."""
        lines = list(self.folder.metrics())
        if newest.entries and newest.entries[-1] not in lines:
            self.folder.rewrite([*lines, *newest.entries])
        self.folder.drop(self.folder.checkpoints()[:-1])

    def _about(self) -> read.About:
        data = self.folder.read("about.json")
        try:
            return read.About.model_validate(parse_json(data))
        except ValueError:
            raise CoterieError(
                f"{self.folder.path}: about.json of the newest checkpoint is damaged; {read.REMEDY}"
            ) from None

    def _save(self, about: read.About, **files: bytes) -> None:
        files = {"about.json": json.dumps(vars(about)).encode(), **files}
        self.folder.save(about.turn + 1, self.host.states(), files=files)
