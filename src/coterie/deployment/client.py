"""A client's process in a deployment: it answers the server's orders, each once or not at all.

Its folder is a run folder with this one client. The newest checkpoint is that of the last step;
whether it counts is known when the next order comes. Until then the one before is kept, too:

checkpoints/00004/   the state that the server counts on
checkpoints/00005/   the state after the next step, its upload, and about.json: which order it
                     answered, and the entries that go to metrics.jsonl if it counts
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
from coterie.bases.devices import names_of
from coterie.config.run import RunConfig
from coterie.data.quality import AT_START, sentences
from coterie.deployment.orders import Orders, check_round
from coterie.deployment.site import Site, ledger_of, run_folder
from coterie.deployment.terms import (
    budget_excess,
    disagreement,
    extra_plugin,
    public_text_mismatch,
    requested_terms,
    version_mismatch,
)
from coterie.engines.runtime import ClientPart, result
from coterie.errors import CoterieError, Diverged, Unwritable
from coterie.federation.participants import Participant, described_templates, participants_of
from coterie.federation.reading import Reading
from coterie.files import parse_json
from coterie.messages import MessageError
from coterie.messages.envelope import LEAVES, Entry, Fault, Order, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.messages.names import SECONDS
from coterie.network.link import Seen
from coterie.privacy.ledger import Ledger
from coterie.runs import Recorder, RunFolder, describe, read

log = logging.getLogger(__name__)
Entries = list[dict[str, Any]]
"""Lines of metrics.jsonl."""
FAULTS: dict[type[CoterieError], Fault] = {MessageError: "refused", Diverged: "diverged"}
"""What a server is told of an error; of any other that it "failed"."""


class Worker:
    """Answers orders. The base is loaded once, whatever the number of rounds and runs."""

    def __init__(self, site: Site, seen: Seen = lambda *_: None) -> None:
        self.site, self.seen = site, seen
        self.bases: dict[tuple[object, ...], Base] = {}
        self.run: SiteRun | None = None
        self.orders = Orders(site)
        self.finished = False
        self.declined = ""
        """Why it did not agree, if it did not."""
        self.error = ""
        """Why it left without the run's result, if it did."""

    def answer(self, data: bytes) -> bytes:
        """The reply to an order. Raises MessageError if it is no order; faults are told in it."""
        order, body = unseal(Order, data)
        try:
            return self._obey(order, body)
        except CoterieError as error:
            why, fault = error, FAULTS.get(type(error), "failed")
        if order.kind == "join" and not isinstance(why, MessageError | Unwritable):
            self.error = str(why)  # this machine lacks what the run needs: to ask again is in vain
            return self._unlike(order, "unable", f"cannot be joined: {why}")
        log.error("round %d: %s", order.round + 1, why)
        self.seen("fault", str(why))
        stops = fault == "diverged" and self.run is not None and self.run.ends_with(order)
        return self._reply(order, fault=fault, stops=stops)

    def close(self) -> None:
        """Let go of the run's folder."""
        if self.run is not None:
            self.run.close()

    def _obey(self, order: Order, body: bytes) -> bytes:
        if order.client != self.site.name:
            raise MessageError(f"The server mistook this client for {order.client!r}.")
        if order.kind == "join":
            return self._join(order)
        if self.run is None or self.run.id != order.run:
            return self._reply(order, fault="unknown run")
        if order.kind == "end":
            self.error = "The server ended the run after an error; ask its operator."
            self.finished = True
            return self._reply(order)
        check_round(order, self.run.config.exchanges)
        if order.kind == "step":
            upload, entries = self.run.step(order, body, self.orders)
            return self._reply(order, upload, entries, stops=self.run.ends_with(order))
        entries = self.run.finish(order, body)
        self.finished = True
        return self._reply(order, entries=entries)

    def _join(self, order: Order) -> bytes:
        if why := version_mismatch(order):
            return self._unlike(order, "protocol" if order.protocol != PROTOCOL else "plugin", why)
        config = self.site.config(order)
        if why := extra_plugin(order, config):
            return self._unlike(order, "plugin", why)
        folder = run_folder(self.site, order.run, config)
        if why := self._disagrees(order, config, folder):
            return self._unlike(order, "terms", why)
        if why := public_text_mismatch(order, config):
            return self._unlike(order, "public", why)
        ledger = ledger_of(self.site, order.run)
        if why := budget_excess(config.budgets, ledger):
            return self._unlike(order, "budget", why)
        if why := self.orders.refusal(order, config, folder):
            return self._unlike(order, "terms", why)
        torch.set_num_threads(config.threads or torch.get_num_threads())
        base = self._base(config)
        if order.base not in ("", base.digest):
            how = f"has a base with different weights than {config.base}"
            return self._unlike(order, "base", how)
        if self.run is None or self.run.id != order.run:
            self.close()
            self.run = SiteRun(order, config, base, self.site, self.seen, ledger)
        self.seen("joined", self.run)
        return self._reply(order, self.run.part.hello(), base=base.digest)

    def _disagrees(self, order: Order, config: RunConfig, folder: RunFolder) -> str | None:
        """Why the run is not what was agreed to; somebody is asked if nothing was."""
        kept = folder.description.get("agreed") if folder.is_run else None
        agreements = [terms for terms in (kept, self.site.agreed) if terms is not None]
        for terms in agreements:
            if why := disagreement(terms, order):
                return why
        return None if agreements or self.site.agrees(order, config) else "was not agreed to"

    def _unlike(self, order: Order, fault: Fault, how: str) -> bytes:
        """Refuse to join those who run something else; or leave, if asking again is in vain."""
        self.finished = self.finished or fault in LEAVES
        if fault in ("terms", "budget"):
            self.declined = how
        why = f"the run {how}"
        log.error(why)
        self.seen("fault", why)
        return self._reply(order, fault=fault)

    def _base(self, config: RunConfig) -> Base:
        key = (config.base, config.training.precision, config.data.window)
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
        told = [{k: v for k, v in f.items() if k != "during"} for f in entries or []]
        shared = [Entry(**entry) for entry in told] if shares else None
        reply = Reply(
            run=order.run,
            client=self.site.name,
            kind=order.kind,
            round=order.round,
            fault=fault,
            base=base,
            stops=stops or None,
            entries=shared,
        )
        return seal(reply, body)


class SiteRun:
    """One client's part of one deployed run, in a folder of its own."""

    def __init__(
        self,
        order: Order,
        config: RunConfig,
        base: Base,
        site: Site,
        seen: Seen,
        ledger: Ledger,
    ) -> None:
        self.id, self.config, self.seen, self.ledger = order.run, config, seen, ledger
        [participant] = participants_of(config, base.tokenizer, self._look)  # of this client alone
        self.folder = self._folder(order, site, participant, base)
        self.locked = ExitStack()
        self.locked.enter_context(self.folder.lock())
        self.recorder = Recorder(lambda _, name, value: seen(name, value))
        self.part = ClientPart(config, base, participant, self.recorder, ledger)
        if self.folder.checkpoints():
            self._restore()
        else:
            self._save(read.About(round=-1, digest="", entries=[]))

    def close(self) -> None:
        """Let go of the folder."""
        self.locked.close()

    def _look(self, read: Reading) -> None:
        """Say what is to know of this client's own texts; it stays here."""
        for text in sentences(read.quality(self.config, AT_START)):
            self.seen("warning", text)

    def _restore(self) -> None:
        name = self.part.name
        self.part.restore(self.folder.load(f"client-{name}"), self.folder.find(f"kept-{name}"))

    def _folder(self, order: Order, site: Site, participant: Participant, base: Base) -> RunFolder:
        folder, config = run_folder(site, self.id, self.config), self.config
        if not folder.is_run:
            more = {
                "run": self.id,
                "agreed": requested_terms(order),
                "device": names_of(config.device),
            }
            more |= described_templates(config, {config.base: base.tokenizer})
            clients = {site.name: participant.described()}
            description = describe(config.as_dict(), clients, config.plugins, **more)
            return RunFolder.create(folder.path, description)
        if folder.description["clients"][site.name]["data"] != participant.digest():
            raise CoterieError(
                f"The client's text has changed since the run in {folder.path} began."
            )
        return folder

    def step(self, order: Order, download: bytes, orders: Orders) -> tuple[bytes, Entries]:
        """The upload of a round and its entries; from store if the order was obeyed before."""
        digest = blake2b(download, digest_size=8).hexdigest()
        newest = self._settle(order, digest)
        if (newest.round, newest.digest) == (order.round, digest):
            log.info("round %d: sent the stored answer again", order.round + 1)
            return self.folder.read("upload"), newest.entries
        orders.count_training(order, self.folder)
        with self._whole(order.round) as began:
            counted = order.counted == order.round - 1
            upload = self.part.step(order.round, download, counted=counted)
            entries = self._done(order.round, digest, began, upload=upload)
        self.seen("step", order.round)
        if self.ends_with(order):
            self.seen("stopped", self.config.evaluation.patience)
        return upload, entries

    def finish(self, order: Order, download: bytes) -> Entries:
        """Take in the last download; the folder then holds the result. Returns its entries."""
        last = order.round - 1
        if self._about().round <= last:
            self._settle(order, "")
            with self._whole(last) as began:
                kept = self.folder.find(f"kept-{self.part.name}")
                self.part.finish(download, kept, last, counted=order.counted == last)
                self._done(order.round, "", began)
        about = self._about()
        self._count(about)
        self.folder.finish(result(self.config, self.folder))
        self.seen("finished", self.folder.path)
        return about.entries

    def ends_with(self, order: Order) -> bool:
        """Return whether this client takes no part in rounds after that of an order."""
        return self.part.stops(order.round + 1)

    @contextmanager
    def _whole(self, round: int) -> Iterator[float]:
        """Within the block, which gets the time, all or nothing: what fails is as if it had not
        begun, and may come again."""
        self.recorder.round = round
        try:
            yield time.monotonic()
        except BaseException:
            self.recorder.take()
            self._restore()
            raise

    def _done(self, round: int, digest: str, began: float, **files: bytes) -> Entries:
        """Save what a step has come to; return its entries."""
        self.part.keep_items(self.folder)
        self.recorder.log(None, SECONDS, time.monotonic() - began)
        about = read.About(round=round, digest=digest, entries=self.recorder.take())
        self._save(about, **files)
        return about.entries

    def _settle(self, order: Order, digest: str) -> read.About:
        """Keep the newest step if the server counted it, undo it if not; what is then the newest.

        A step that this order repeats is kept, too: it is answered from store.
        """
        newest = self._about()
        counted = -1 if order.counted is None else order.counted
        if newest.round == counted:
            self._count(newest)
        elif (newest.round, newest.digest) != (order.round, digest) and newest.round > counted:
            log.warning("round %d was not counted and has been undone", newest.round + 1)
            if len(self.folder.checkpoints()) > 1:
                self.folder.drop([self.folder.checkpoint(newest.round + 1)])
                self._restore()
                newest = self._about()
        if newest.round < counted:
            if self.part.aggregation.pipeline.down:
                raise CoterieError(
                    f"The state of round {counted + 1} is missing, and the downloads of this run "
                    "are differences from it; ask the operator to expel this client."
                )
            log.warning("the state of round %d is missing; continuing without it", counted + 1)
        return newest

    def _count(self, newest: read.About) -> None:
        """Make the newest step the one that the server counts on."""
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
        self.folder.save(about.round + 1, self.part.states(), files=files)
