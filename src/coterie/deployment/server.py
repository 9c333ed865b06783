"""The server of a deployment, whose clients can be late, disconnected or malicious."""

import logging
import math
import time
from collections.abc import Iterable, Set
from itertools import chain

from torch import nn

from coterie.config.run import RunConfig
from coterie.deployment.joins import Joins
from coterie.deployment.quorum import Quorum
from coterie.deployment.seats import Seat, restore_seats, seats_state
from coterie.deployment.status import Monitor, ServerWatch, awaited_uploads
from coterie.engines.server_host import ServerHost
from coterie.errors import CoterieError, Diverged, plural
from coterie.federation.participants import Participant
from coterie.messages import MessageError, State
from coterie.messages.envelope import LEAVES, Kind, Order, Reply, fault_in_words, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.messages.names import BYTES_DOWN, BYTES_UP, LEFT_OUT, SECONDS
from coterie.network.link import Link
from coterie.runs import RECEIVED, Recorder, RunFolder
from coterie.runs.result import result

log = logging.getLogger(__name__)
GRACE = 60.0
"""Time in seconds that the server waits for disconnected clients at the end of a run."""


class ServerRun(ServerHost):
    """The server of a deployed run. It starts or continues the run, and serves it to the end.

    A run continues from its newest checkpoint. The server repeats each order until the client
    replies. Therefore, clients and this process can stop and continue at any time.
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
        self.link, self.run = link, folder.description["run"]
        one_mean = bool(config.method.schema().reduced("mean"))
        self.monitor = Monitor(config.label, config.rounds, folder, watch, one_mean=one_mean)
        self._note, self._tell = self.monitor.note, self.monitor.tell
        self.seats = {name: Seat() for name in names}
        self.quorum = Quorum(config, self.seats)
        self.leaving: list[str] = []  # expelled clients whose data are still in `server`
        self.joins = Joins(self, link.largest)
        self.joins.check_messages()
        self.kind: Kind = "step"  # the kind of the order that is sent to the clients in `waiting`
        self.waiting: set[str] = set()  # clients that have not replied to the current order
        self.unlisted: set[str] = set()  # clients that have a key but are not part of the run
        self.late: set[str] = set()  # tickets of orders whose replies are to be discarded

    def rounds(self) -> None:
        """Run the remaining rounds; raise Diverged if no client can continue."""
        try:
            self._rounds()
        except Diverged:
            self._ask("end", [name for name, seat in self.seats.items() if seat.present])
            end = time.monotonic() + GRACE
            while any(self.seats[n].present for n in self.waiting) and time.monotonic() < end:
                self._poll()
            raise

    def _rounds(self) -> None:
        for name in self.folder.expelled():
            self._expel(name)
        done = self._restore()
        self.monitor.start(self.config.turn(done).round)
        for turn in map(self.config.turn, range(done, self.config.turns)):
            if self._is_over():
                break
            began = time.monotonic()
            self.turn = self.recorder.turn = turn
            if (counted := self._take()) is None:
                break
            self.recorder.log(None, SECONDS, time.monotonic() - began)
            self.folder.append(lines := self.recorder.take())
            self._save(turn.number + 1)
            self.monitor.closes(turn, counted, lines)
        self._finish()
        self.folder.finish(result(self.folder, self.config.label, self.config.method.reports))
        self.monitor.save(ended=True)

    def _take(self) -> int | None:
        """Take a turn; return the number of accepted uploads, or None if all clients stopped."""
        while members := self._gather():
            if self._count(members):
                return self._settle()
        return None

    def _gather(self) -> list[str]:
        """Wait for a quorum, and begin a turn. Return its clients, or [] if all have stopped."""
        self.quorum.eligible = self.exchange.uploaded if self.turn.after else None
        while len(ready := self.quorum.ready()) < (needed := self.quorum.needed):
            missing = f"{self.quorum.missing()}; {len(ready)} of {needed} clients are ready"
            self.monitor.waits(self.turn, missing)
            self._poll()
            if self.quorum.all_stopped(self.joins.hellos):
                return []
        self._remove_expelled()
        members = self.quorum.ready()
        self.open(self.turn, members)
        self.exchange.begin()
        self._ask("step", members)
        self.monitor.opens(self.turn)
        return members

    def _count(self, members: list[str]) -> bool:
        """Wait for enough uploads; return False if the round must begin again."""
        uploads, end = self.exchange, time.monotonic() + self.config.deployment.deadline
        while self._uploaded(members, end):
            self.quorum.check_diverged(self.turn.round, members, uploads.diverged)
            uploads.settle()
            counted = len(uploads.counted)
            refused = {n: r for n, r in uploads.refused.items() if n not in uploads.diverged}
            for name, reason in sorted(refused.items()):
                self._tell(f"rejected the upload of {name}: {reason}")
            if self.quorum.suffice(counted, refused, uploads.asked_again, uploads.diverged):
                return True
            self._tell(f"too few uploads ({counted}); asking again")
            self._ask("step", {*self.waiting, *refused})
            for name in refused:
                if not uploads.ask_again(name):
                    self.seats[name].fail()
            uploads.repeat()
        return False

    def _uploaded(self, members: list[str], end: float) -> bool:
        """Wait for uploads until `end`; return False if the round must begin again."""
        replies = members, self.waiting, self.exchange.diverged, end  # `_poll` updates the sets
        again, left = False, len(self.leaving)
        while not (len(self.leaving) > left or again or self.quorum.complete(*replies)):
            uploads = awaited_uploads(self.waiting, end - time.monotonic())
            self.monitor.waits(self.turn, uploads)
            self._poll()
            again = self.quorum.begins_again(*replies)
        self._check_expelled()
        if again:
            self._tell("too few uploads; begun again with more clients")
        again = again or len(self.leaving) > left
        for name in self.waiting if again else ():
            self._abandon(self.seats[name])
        return not again

    def _settle(self) -> int:
        """End the round with its uploads, and return the number of accepted uploads."""
        counted, diverged = self.exchange.counted, self.exchange.diverged
        for name in sorted(self.waiting | diverged):
            if not self.turn.after:  # otherwise, the client's upload counts nevertheless
                self.monitor.excludes(name)
            self._abandon(self.seats[name])
        self.exchange.record(self.recorder)
        self.waiting = set()  # no orders are sent until the next round
        self._record_entries(counted)
        for name in counted:
            self.seats[name].counted = self.turn.number
        for name in sorted({*counted, *diverged} if self.turn.closes else diverged):
            if self.seats[name].stops:
                self.seats[name].stopped = True
                rounds = plural(self.config.evaluation.patience or 0, "round")
                self._note(f"{name} stopped: no better validation score for {rounds}")
        used, self.quorum.eligible = self.exchange.uploaded or counted, None
        self.close()
        self.score(self.turn)
        return len(used)

    def _is_over(self) -> bool:
        """Return whether all clients stopped, or a quorum stopped and no other client is ready."""
        all_stopped = self.quorum.all_stopped(self.joins.hellos)
        if all_stopped or not self.quorum.met():
            return all_stopped
        end = time.monotonic() + self.config.deployment.deadline
        while not self.quorum.ready() and time.monotonic() < end:
            self._poll()
        return not self.quorum.ready()

    def _finish(self) -> None:
        """Send the result to all clients that have joined, and record which have received it."""
        self.turn = self.config.turn(self.folder.turns())
        self._remove_expelled()
        if self.turn.number < self.config.turns:  # the run ends early
            self.recorder.turn = self.config.turn(self.turn.number - 1)
            self.score(self.recorder.turn, ends=True)
        self.recorder.turn = self.turn
        self._ask("finish", self.joins.hellos)
        received = self.folder.listed(RECEIVED)
        try:
            self._await_receipt(received)
        finally:
            self._record_entries(self.joins.hellos.keys() - self.waiting)
            lines = list(self.folder.metrics())  # a killed process may have appended some of them
            self.folder.append([line for line in self.recorder.take() if line not in lines])
            self.folder.write_list(RECEIVED, self.joins.hellos.keys() - (self.waiting - received))

    def _await_receipt(self, received: Set[str]) -> None:
        """Wait a limited time for the clients that have not received the result."""
        began, longest = time.monotonic(), max(GRACE, self.config.deployment.deadline)
        while missing := sorted(self.waiting - received):
            present = any(self.seats[name].present for name in missing)
            if time.monotonic() > began + (longest if present else GRACE):
                break
            self._poll()
            if self.leaving:
                self._remove_expelled()
                self._save(self.turn.number)
        for name in missing:
            self._note(f"{name} did not receive the result; use --resume when {name} is connected")

    def _ask(self, kind: Kind, names: Iterable[str]) -> None:
        """Set the next order for some clients; `_poll` then sends this order."""
        self.kind, self.waiting = kind, set(names)
        for name in self.waiting:
            self.seats[name].ask()

    def _poll(self) -> None:
        """Process connections and replies, send each client its next order, and sleep briefly."""
        self._check_expelled()
        present = self.link.present()  # read first: clients reply, then disconnect
        tickets = {seat.ticket: name for name, seat in self.seats.items() if seat.ticket}
        for ticket, data in self.link.replies([*tickets, *self.late]):
            if ticket in tickets:
                self._reply(tickets[ticket], data)
            self.late.discard(ticket)
        self._complete_joins()
        for name in sorted(present.keys() - self.seats.keys()):
            if self.config.deployment.anyone and name not in self.quorum.expelled:
                self.seats[name] = Seat()
            elif name not in self.unlisted | self.quorum.expelled:
                self.unlisted.add(name)
                self._note(f"{name} has a key but is not part of this run")
        for name, seat in sorted(self.seats.items()):
            if (connection := present.get(name)) != seat.present:
                self._note(f"{name} {'connected' if connection else 'disconnected'}")
                self._abandon(seat)
                seat.connect(connection)
            if connection and seat.ticket is None and time.monotonic() >= seat.retry_at:
                if not seat.joined:
                    self._send(name, "join")
                elif name in self.waiting:
                    self._send(name, self.kind)
        self.monitor.shows(self.seats, self.waiting)
        self.link.wait()

    def _check_expelled(self) -> None:
        for name in sorted(self.folder.expelled() - self.quorum.expelled):
            self._note(f"{name} was expelled")
            self._expel(name)
        self.quorum.check_open()

    def _expel(self, name: str) -> None:
        """Stop using a client that the operator has expelled."""
        self.quorum.expelled.add(name)
        self.leaving.append(name)
        self._abandon(self.seats.pop(name, Seat()))
        self.waiting.discard(name)
        if self.exchange.drop(name) and not self.turn.after:
            self.recorder.log(name, LEFT_OUT, "expelled")
        self.joins.forget(name)

    def _remove_expelled(self) -> None:
        """Remove the data of expelled clients, unless a phase after training may need them."""
        while self.leaving and not self.turn.after:
            self.leave(self.leaving.pop())

    def _abandon(self, seat: Seat) -> None:
        """Stop waiting for a client's reply, and discard the reply if it arrives later."""
        if seat.ticket is not None:
            self.late.add(seat.ticket)
        seat.ticket = None

    def _send(self, name: str, kind: Kind) -> None:
        seat, downloads = self.seats[name], kind in ("step", "finish")
        order = Order(
            run=self.run,
            client=name,
            kind=kind,
            turn=self.turn.number,
            counted=seat.counted,
            protocol=PROTOCOL,
            base=self.joins.base,
            **(self.joins.fields(name) if kind == "join" else {}),
        )
        body = self.download(name) if downloads else b""
        data = seal(order, body)
        seat.ticket = self.link.send(name, data, order.turn, 2 * self.config.deployment.deadline)
        if downloads:
            self.recorder.log(name, BYTES_DOWN, len(body), self._metric_round)
        self.monitor.moved(name, down=len(data))

    def _reply(self, name: str, data: bytes | None) -> None:
        """Process a client's reply; an invalid reply is logged and does not stop the run."""
        seat = self.seats[name]
        seat.ticket = None
        seat.fail()  # cleared below if the reply is valid
        if data is None:
            return
        self.monitor.moved(name, up=len(data))
        try:
            reply, body = unseal(Reply, data)
            if (reply.run, reply.client) != (self.run, name):
                raise MessageError("The message belongs to another run or client.")
            if reply.fault == "unknown run":
                seat.joined = False
                seat.clear()
            elif reply.fault is not None and reply.fault != "diverged":
                self._note(fault_in_words(name, reply.kind, reply.fault))
                seat.declined = reply.fault == "declined"
                if reply.fault in LEAVES:
                    seat.retry_at = math.inf  # until the client reconnects
            elif reply.kind == "join":
                self._join(name, reply, body)
            elif (reply.kind, reply.turn) == (self.kind, self.turn.number) and name in self.waiting:
                self._complete_order(name, reply, body)
        except Exception as error:  # an error of one client must not stop the run
            self._refuse(f"rejected a message from {name}", error)

    def _join(self, name: str, reply: Reply, hello: bytes) -> None:
        if not self.config.method.mixes_bases:
            self.joins.check_base(reply.base)
        if self.joins.hellos.get(name) == hello:
            self._joined(name)
        else:
            self.joins.begin(name, hello)
            self.seats[name].retry_at = math.inf  # no order before the preparation has ended

    def _complete_joins(self) -> None:
        """Mark clients as joined if the server has finished preparing for them."""
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

    def _complete_order(self, name: str, reply: Reply, body: bytes) -> None:
        if reply.fault is not None:
            self._note(fault_in_words(name, reply.kind, reply.fault))
            self.exchange.diverge(name)
        elif self.kind == "step":
            self.take(name, body)
            self.recorder.log(name, BYTES_UP, len(body))
        seat = self.seats[name]
        seat.stops = bool(reply.stops) and self.config.evaluation.patience is not None
        seat.clear()
        seat.entries = (reply.entries or []) if self.config.deployment.share_metrics else []
        self.waiting.discard(name)

    def _record_entries(self, names: Iterable[str]) -> None:
        """Record the metrics that the clients sent with their last replies."""
        for name in sorted(names):
            for entry in self.seats[name].entries:
                if entry.is_from_client:
                    # Clients send scores of the previous round with this round's upload.
                    round = max(self.turn.round - 1, min(entry.round, self._metric_round))
                    self.recorder.log(name, entry.name, entry.value, round)

    @property
    def _metric_round(self) -> int:
        """The round for which metrics are recorded; if the run is ending, it is the last round."""
        return self.config.turn(self.turn.number - (self.kind == "finish")).round

    def _refuse(self, event: str, error: Exception) -> None:
        """Show why a client's message was refused; log the traceback if the error is unexpected."""
        if not isinstance(error, CoterieError):
            log.debug(event, exc_info=error)
            error = CoterieError(f"{type(error).__name__} in the method")
        self._note(f"{event}: {error}")

    def _save(self, turns: int) -> None:
        values = seats_state(self.seats, self.joins.base)
        states = [("engine", State({"hellos": self.joins.tensors()}, values))]
        keep = self.config.deployment.checkpoints * len(self.config.phases)
        self.folder.save(turns, chain(self.states(), states), keep=keep)

    def _restore(self) -> int:
        if done := self.folder.turns():
            engine = self.folder.load("engine")
            restore_seats(self.seats, engine.values, self.quorum.expelled)
            self.joins.restore(engine, self.quorum.expelled)
            self.restore()
        # Keep metrics that were received at the end: their clients may have left.
        ended = done == self.config.turns or self.quorum.all_stopped(self.joins.hellos)
        self.folder.forget_from(done + ended)
        return done
