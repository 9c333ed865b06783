"""A server in a deployment: rounds over a network on which clients are late, gone or wrong.

It knows clients by their names. How bytes reach them is a `Link`'s affair; see flower/link.py.
"""

import logging
import math
import time
from collections.abc import Iterable

from torch import nn

from coterie.config.run import RunConfig
from coterie.deployment.joins import Joins
from coterie.deployment.orders import join_fields
from coterie.deployment.quorum import Quorum
from coterie.deployment.seats import Seat, ServerWatch, restore_seats, saved
from coterie.engines.runtime import result
from coterie.engines.server_part import ServerPart
from coterie.engines.uploads import Uploads
from coterie.errors import CoterieError, Diverged, plural
from coterie.federation.participants import Participant, public_digest
from coterie.messages import Message, MessageError, State
from coterie.messages.envelope import LEAVES, TOLD, Kind, Order, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.messages.names import BYTES_DOWN, BYTES_UP, LEFT_OUT, SECONDS
from coterie.network.link import LONGEST_LINE, Link
from coterie.runs import Recorder, RunFolder

log = logging.getLogger(__name__)
GRACE = 60.0
"""Seconds that the end of a run waits for clients that are gone."""


class ServerRun(ServerPart):
    """One method on a network, from its newest checkpoint (or the start) to its end.

    Every turn looks at who is there and sends each client what it lacks: an order to join, the
    round's step, or the end. So a client, or this process, may vanish at any point and come back.
    """

    def __init__(
        self,
        config: RunConfig,
        skeleton: nn.Module,
        folder: RunFolder,
        link: Link,
        watch: ServerWatch,
        own: Participant | None = None,
    ) -> None:
        names = sorted(client.name for client in config.clients)
        super().__init__(config, skeleton, names, own, folder, Recorder(lambda *_: None))
        self.link, self.watch, self.run = link, watch, folder.description["run"]
        self.seats = {name: Seat() for name in names}
        self.quorum = Quorum(config, self.seats)
        self.leaving: list[str] = []
        """Expelled clients of which the method's server side still keeps something."""
        self.public = public_digest(config)
        self.joins = Joins(self)
        self.kind: Kind = "step"
        """What clients are to do, those that are waited for."""
        self.round = 0
        self.waiting: set[str] = set()
        """Clients that have not done it yet."""
        self.strangers: set[str] = set()
        """Clients with a key that the run does not name."""
        self.uploads = Uploads(folder.path, self.server, self.aggregation)
        self.late: set[str] = set()
        """Tickets of replies that nobody waits for."""

    def rounds(self) -> None:
        """Run what is left. Raises Diverged, once clients know, if nobody can go on."""
        try:
            self._rounds()
        except Diverged:
            self._ask("end", [name for name, seat in self.seats.items() if seat.present])
            end = time.monotonic() + GRACE
            while any(self.seats[n].present for n in self.waiting) and time.monotonic() < end:
                self._turn()
            raise

    def _rounds(self) -> None:
        for name in self.folder.without():
            self._expel(name)
        done = self._restore()
        self.watch.start(self.config.label, self.config.exchanges, done)
        for round in range(done, self.config.exchanges):
            if self._is_over():
                break
            began = time.monotonic()
            self.round = self.recorder.round = round
            if (counted := self._round()) is None:
                break
            self.recorder.log(None, SECONDS, time.monotonic() - began)
            self.folder.append(self.recorder.take())
            self._save(round + 1)
            self.watch.round_over(round, counted)
        self._finish()
        self.folder.finish(result(self.config, self.folder))

    def _round(self) -> int | None:
        """Carry out a round; return how many uploads counted, or None if nobody is left for it."""
        while members := self._gather():
            if (mean := self._count(members)) is not None:
                return self._settle(mean)  # else it begins anew, without who was expelled
        return None

    def _gather(self) -> list[str]:
        """Wait for a quorum and open the round; return its clients, or none if all have stopped."""
        quorum = self.quorum
        if len(quorum.ready()) < quorum.needed:
            self._note(f"round {self.round + 1}: waiting for {plural(quorum.needed, 'client')}")
        while len(quorum.ready()) < quorum.needed:
            self._turn()
            if quorum.all_stopped(self.joins.hellos):
                return []
        self._let_leave()
        members = quorum.ready()
        self.open(self.round, members)
        self.uploads.begin()
        self._ask("step", members)
        return members

    def _count(self, members: list[str]) -> Message | None:
        """Return the mean of the uploads once enough count, or None if a client was expelled."""
        uploads, end = self.uploads, time.monotonic() + self.config.deployment.deadline
        while self._uploaded(members, end):
            uploads.require(self.round, self.waiting)
            mean, counted = uploads.mean(self.round), len(uploads.counted)
            refused = {n: w for n, w in uploads.refused.items() if n not in uploads.diverged}
            for name, why in sorted(refused.items()):
                self._note(f"round {self.round + 1}: rejected the upload of {name}: {why}")
            if self.quorum.suffice(counted, refused, uploads.asked_again, uploads.diverged):
                return mean
            self._note(f"round {self.round + 1}: too few uploads ({counted}); asking again")
            self._ask("step", {*self.waiting, *refused})
            for name in refused:
                if not uploads.ask_again(name):
                    self.seats[name].fail()
            self.open(self.round, members)  # what was counted is counted anew
        return None

    def _uploaded(self, members: list[str], end: float) -> bool:
        """Wait for uploads until `end`; return False if a client was expelled meanwhile."""
        complete, diverged = self.quorum.complete, self.uploads.diverged
        while not (self.leaving or complete(members, self.waiting, diverged, end)):
            self._turn()
        self._look_for_expelled()
        if self.leaving:
            for name in self.waiting:
                self._forget(self.seats[name])
        return not self.leaving

    def _settle(self, mean: Message) -> int:
        """Close the round with the mean of its uploads; return how many there are."""
        counted, diverged = self.uploads.counted, self.uploads.diverged
        for name in sorted(self.waiting | diverged):
            self._note(f"round {self.round + 1}: {name} was excluded")
            self._forget(self.seats[name])
        self.uploads.record(self.recorder)
        self.waiting = set()  # nobody is asked for anything until the next round
        self._record_entries(counted)
        for name in counted:
            self.seats[name].counted = self.round
        for name in sorted({*counted} | diverged):
            if self.seats[name].stops:
                self.seats[name].stopped = True
                rounds = plural(self.config.evaluation.patience or 0, "round")
                self._note(f"{name} stopped: no gain for {rounds}")
        self.close(mean, counted)
        self.score(self.round)
        return len(counted)

    def _is_over(self) -> bool:
        """Whether all who took part have stopped; or a quorum has, and the others stay away."""
        all_stopped = self.quorum.all_stopped(self.joins.hellos)
        if all_stopped or not self.quorum.met():
            return all_stopped
        end = time.monotonic() + self.config.deployment.deadline
        while not self.quorum.ready() and time.monotonic() < end:
            self._turn()
        return not self.quorum.ready()

    def _finish(self) -> None:
        """Let everybody who has taken part end the run; those who are gone have what they have."""
        self.round = self.folder.rounds()
        self._let_leave()
        if self.round < self.config.exchanges:  # it ends early
            self.recorder.round = self.round - 1
            self.score(self.round - 1, last=True)
        self.recorder.round = self.round
        self._ask("finish", self.joins.hellos)
        began, longest = time.monotonic(), max(GRACE, self.config.deployment.deadline)
        while self.waiting and time.monotonic() < began + longest:
            here = any(self.seats[name].present for name in self.waiting)
            if not here and time.monotonic() > began + GRACE:
                break
            self._turn()
            if self.leaving:
                self._let_leave()
                self._save(self.round)
        for name in sorted(self.waiting):
            self._note(f"{name} did not receive the result; use --resume when it is back")
        self._record_entries(self.joins.hellos.keys() - self.waiting)
        told = list(self.folder.metrics())  # some already, if a kill came before the result
        self.folder.append([line for line in self.recorder.take() if line not in told])

    def _ask(self, kind: Kind, names: Iterable[str]) -> None:
        """From now on, clients of these names are to do something."""
        self.kind, self.waiting = kind, set(names)
        for name in self.waiting:
            self.seats[name].ask()

    def _turn(self) -> None:
        """Look who is there, take replies in, send what each client lacks, and rest a little."""
        self._look_for_expelled()
        present = self.link.present()  # before replies, so that who leaves has replied
        tickets = {seat.ticket: name for name, seat in self.seats.items() if seat.ticket}
        for ticket, data in self.link.replies([*tickets, *self.late]):
            if ticket in tickets:
                self._reply(tickets[ticket], data)
            self.late.discard(ticket)
        self._welcome()
        for name in sorted(present.keys() - self.seats.keys()):
            if self.config.deployment.anyone and name not in self.quorum.without:
                self.seats[name] = Seat()
            elif name not in self.strangers | self.quorum.without:
                self.strangers.add(name)
                self._note(f"{name} has a key but is not part of this run")
        for name, seat in sorted(self.seats.items()):
            mark = present.get(name)
            if mark != seat.present:
                self._note(f"{name} {'is here' if mark else 'is gone'}")
                self._forget(seat)
                seat.present = mark
                seat.clear()
            if mark and seat.ticket is None and time.monotonic() >= seat.again:
                if not seat.joined:
                    self._send(name, "join")
                elif name in self.waiting:
                    self._send(name, self.kind)
        self.watch.seats(self.round, self.seats, self.waiting)
        self.link.wait()

    def _look_for_expelled(self) -> None:
        for name in sorted(self.folder.without() - self.quorum.without):
            self._note(f"{name} was expelled")
            self._expel(name)

    def _expel(self, name: str) -> None:
        """Let go of a client that an operator has expelled."""
        self.quorum.without.add(name)
        self.leaving.append(name)
        if name in self.seats:
            self._forget(self.seats.pop(name))
        self.waiting.discard(name)
        if self.uploads.drop(name):
            self.recorder.log(name, LEFT_OUT, "expelled")
        self.joins.forget(name)
        if not self.quorum.open:
            raise CoterieError("All clients of the run have been expelled; begin a new run.")

    def _let_leave(self) -> None:
        """The method's side keeps nothing more of clients that were expelled."""
        while self.leaving:
            self.leave(self.leaving.pop())

    def _forget(self, seat: Seat) -> None:
        """Wait no longer for a client's reply; if it comes after all, it is thrown away."""
        if seat.ticket is not None:
            self.late.add(seat.ticket)
        seat.ticket = None

    def _send(self, name: str, kind: Kind) -> None:
        seat, downloads = self.seats[name], kind in ("step", "finish")
        order = Order(
            run=self.run,
            client=name,
            kind=kind,
            round=self.round,
            counted=seat.counted,
            protocol=PROTOCOL,
            base=self.joins.base,
            **(join_fields(self.config, name, self.public) if kind == "join" else {}),
        )
        body = self.download(name) if downloads else b""
        data = seal(order, body)
        seat.ticket = self.link.send(name, data, self.round, 2 * self.config.deployment.deadline)
        if downloads:
            self.recorder.log(name, BYTES_DOWN, len(body), self._of)
        self.watch.moved(name, 0, len(data))

    def _reply(self, name: str, data: bytes | None) -> None:
        """Take a reply in. Whatever is wrong with it is noted, and the run goes on."""
        seat = self.seats[name]
        seat.ticket = None
        seat.fail()  # unless it turns out otherwise
        if data is None:
            return
        self.watch.moved(name, len(data), 0)
        try:
            reply, body = unseal(Reply, data)
            if (reply.run, reply.client) != (self.run, name):
                raise MessageError("The message belongs to another run or client.")
            if reply.fault == "unknown run":
                seat.joined = False
                seat.clear()
            elif reply.fault is not None and reply.fault != "diverged":
                self._note(f"{name} could not {reply.kind}: {TOLD[reply.fault]}")
                if reply.fault in LEAVES:
                    seat.again = math.inf  # until it connects anew
            elif reply.kind == "join":
                self._join(name, reply, body)
            elif (reply.kind, reply.round) == (self.kind, self.round) and name in self.waiting:
                self._done(name, reply, body)
        except Exception as error:  # whatever it is, one client cannot stop a run
            self._refuse(f"rejected a message from {name}", error)

    def _join(self, name: str, reply: Reply, hello: bytes) -> None:
        if not self.config.method.mixes_bases:
            self.joins.check_base(reply.base)
        if self.joins.hellos.get(name) == hello:
            self._joined(name)
        else:
            self.joins.begin(name, hello)
            self.seats[name].again = math.inf  # it has said all that it can

    def _welcome(self) -> None:
        """Seat the clients for whom the server is now prepared."""
        for name, error in self.joins.ended():
            if error is None:
                self._joined(name)
            else:
                self.seats[name].fail()
                self._refuse(f"rejected a message from {name}", error)

    def _joined(self, name: str) -> None:
        self.seats[name].joined = True
        self.seats[name].clear()
        self._note(f"{name} joined")

    def _done(self, name: str, reply: Reply, body: bytes) -> None:
        if reply.fault is not None:
            self._note(f"{name} diverged: {TOLD[reply.fault]}")
            self.uploads.diverge(name)
        elif self.kind == "step":
            self.uploads.take(name, body)
            self.recorder.log(name, BYTES_UP, len(body))
        seat = self.seats[name]
        seat.stops = bool(reply.stops) and self.config.evaluation.patience is not None
        seat.clear()
        seat.entries = (reply.entries or []) if self.config.deployment.share_metrics else []
        self.waiting.discard(name)

    def _record_entries(self, names: Iterable[str]) -> None:
        """Record what clients told of their last steps, each under its own name."""
        for name in sorted(names):
            for entry in self.seats[name].entries:
                if entry.is_a_client_s:
                    # A score of the round before comes up in this one.
                    round = max(self.round - 1, min(entry.round, self._of))
                    self.recorder.log(name, entry.name, entry.value, round)

    @property
    def _of(self) -> int:
        """The round that figures are of: the last one's, at the end."""
        return self.round - (self.kind == "finish")

    def _refuse(self, what: str, error: Exception) -> None:
        """Note what was wrong; what a method did not foresee is kept for its author."""
        if not isinstance(error, CoterieError):
            log.debug(what, exc_info=error)
            error = CoterieError(f"{type(error).__name__} in the method")
        self._note(f"{what}: {error}")

    def _note(self, text: str) -> None:
        line = " ".join(text.split())[:LONGEST_LINE]  # it may quote what a client sent
        log.info(line)
        self.watch.note(line)

    def _save(self, rounds: int) -> None:
        self.folder.save(rounds, self._states(), keep=self.config.deployment.checkpoints)

    def _states(self) -> Iterable[tuple[str, State]]:
        yield from self.states()
        yield "engine", State({"hellos": self.joins.tensors()}, saved(self.seats, self.joins.base))

    def _restore(self) -> int:
        done = self.folder.rounds()
        if done:
            engine = self.folder.load("engine")
            self.joins.base = engine.values["base"]
            restore_seats(self.seats, engine.values, self.quorum.without)
            for name in sorted(engine["hellos"].keys() - self.quorum.without):
                self.joins.restore(name, engine["hellos"][name].numpy().tobytes())
            self.restore()
        # What was told at the end stays: who told it may have left.
        ended = done == self.config.exchanges or self.quorum.all_stopped(self.joins.hellos)
        self.folder.forget_from(done + ended)
        return done
