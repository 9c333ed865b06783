"""A Flower app that takes part in a Flower federation, on Flower's public interface.

`coterie flower init` writes an app whose objects come from `server_app` and `client_app`. The
server app runs a `ServerRun`, and sends its orders as messages of type `train`. Flower executes the
client app in a new process for each message. Between messages, the client's state is therefore
stored in the client's folder.
"""

# pyright: reportMissingImports=false
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.cli import deploy, terminal
from coterie.cli.console import Board, ClientBoard
from coterie.config.deployed import load_deployment
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig
from coterie.config.values import read_yaml
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.deployment.start import Serving, serve, serve_again
from coterie.errors import CoterieError, imports_for
from coterie.files import read_inside, write_bytes
from coterie.messages.envelope import Order, unseal
from coterie.network.link import Link
from coterie.runs import RunFolder
from coterie.runs.progress import logged

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

POLL_SECONDS = 0.5
"""The time between two requests of the server app for replies."""
ASK_SECONDS = 60.0
"""The time in which a node must state its client's name; the server app then asks again."""
ABSENT_SECONDS = 90.0
"""The time after which a node counts as disconnected if Flower does not list it.

Flower stops listing a busy node whose heartbeat is late.
"""
LARGEST_GRPC = 2**31 - 2**20
"""The maximum size of an order in bytes.

Flower sends an order as one gRPC message, which must be smaller than 2 GiB.
"""
ORDER, NAME = "order", "name"
"""The keys of records in messages: an order or its reply, and a client's name."""

log = logging.getLogger("coterie")


class GridLink(Link):
    """The `network.link.Link` of a server app, which sends messages through Flower's grid.

    The server app asks each node for the name of its client. If two nodes state the same name, the
    first node is used while it is connected.
    """

    largest = LARGEST_GRPC

    def __init__(self, grid: "Grid", note: Callable[[str], None]) -> None:
        self.grid, self.note = grid, note
        self.names: dict[int, str] = {}
        """The name that each node has stated; empty if the node cannot take part."""
        self.asked: dict[int, str] = {}
        """The ids of messages that ask nodes for their names, by node."""
        self.nodes: dict[str, int] = {}
        """The node of each connected client, by name."""
        self.listed: dict[int, float] = {}
        """The time on the monotonic clock at which Flower last listed each node."""
        self.ignored: set[int] = set()
        """Nodes that are not used because another node has the same name."""
        self.lost: set[str] = set()
        """Tickets of orders that could not be sent."""
        self.handed_out = False
        """Whether `replies` has returned a reply since the last call of `wait`."""

    def present(self) -> Mapping[str, str]:
        now = time.monotonic()
        self.listed |= dict.fromkeys(self.grid.get_node_ids(), now)
        online = {node for node, last in self.listed.items() if now - last < ABSENT_SECONDS}
        self.asked = {n: id for n, id in self.asked.items() if n in online and id not in self.lost}
        for node in sorted(online - self.names.keys() - self.asked.keys()):
            self.asked[node] = self._push(node, "query", None, ASK_SECONDS)
        for id, name in self._pull(self.asked.values(), NAME):
            node = next(node for node, asked in self.asked.items() if asked == id)
            del self.asked[node]
            if isinstance(name, str):
                self.names[node] = name
                if not name:
                    self.note(f"node {node} cannot take part; the log of that SuperNode says why")
        self.nodes = {}
        for node, name in self.names.items():
            if name and node in online and self.nodes.setdefault(name, node) != node:
                if node not in self.ignored:
                    self.note(f"node {node} is ignored: node {self.nodes[name]} has the same name")
                self.ignored.add(node)
        return {name: str(node) for name, node in self.nodes.items()}

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        return self._push(self.nodes[client], "train", data, seconds, str(turn))

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        tickets = list(tickets)
        for ticket, data in self._pull(tickets, ORDER):
            self.handed_out = True
            yield ticket, data if isinstance(data, bytes) else None
        for ticket in self.lost.intersection(tickets):
            self.lost.remove(ticket)
            yield ticket, None

    def wait(self) -> None:
        if not self.handed_out:
            time.sleep(POLL_SECONDS)
        self.handed_out = False

    def _push(
        self, node: int, kind: str, data: bytes | None, seconds: float, group: str = ""
    ) -> str:
        """Send a message to a node, and return the message's id."""
        from flwr.app import ConfigRecord, Message, RecordDict

        content = RecordDict({} if data is None else {ORDER: ConfigRecord({ORDER: data})})
        message = Message(content, node, kind, ttl=seconds, group_id=group)
        id = next(iter(self.grid.push_messages([message])), None)
        if not id:  # the node has left
            self.lost.add(id := f"lost-{time.monotonic_ns()}")
        return id

    def _pull(self, ids: Iterable[str], key: str) -> Iterator[tuple[str, Any]]:
        """Yield the id of each message that is no longer pending, and a value from its reply.

        The value is None if the node reported an error or did not reply in time, or if the reply
        does not contain the value.

        Args:
            ids: The ids of the messages.
            key: The key of a record in the reply, and also the key of the value in this record.
        """
        from flwr.app import ConfigRecord

        wanted = [id for id in ids if id not in self.lost]
        for reply in self.grid.pull_messages(wanted) if wanted else ():
            record: Any = reply.content.get(key) if reply.has_content() else None
            value = record.get(key) if isinstance(record, ConfigRecord) else None
            yield reply.metadata.reply_to_message_id, value


@dataclass(frozen=True, kw_only=True)
class FlowerServing(Serving):
    """The connection of a server app to its clients (a `GridLink`), and the display of its run."""

    grid: "Grid"

    def link(self, folder: RunFolder, config: RunConfig) -> AbstractContextManager[Link]:
        return nullcontext(GridLink(self.grid, self.watch.note))


def server_app() -> "ServerApp":
    """Return a Flower server app that starts or resumes the run in the app's configuration.

    Raises:
        CoterieError: Flower is not installed, or is too old.
    """
    with _flower():
        from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: "Grid", context: "Context") -> None:
        with _errors(), Board(terminal.console) as board:
            values, folder = context.run_config, Path(str(context.run_config["folder"]))
            for plugin in str(values["plugins"]).split():
                load_plugin(plugin)
            config = load_deployment(read_yaml(str(values["run"])), ())
            serving = FlowerServing(board, grid=grid)
            if RunFolder(folder).is_run:
                serve_again(folder, serving, update=config)
            else:
                serve(config, folder, serving)

    return app


class NodeConfig(BaseModel):
    """The keys of a SuperNode's --node-config, which are options of `coterie client`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The client's name."""
    out: Annotated[Path, Field(alias="folder")]
    """The folder of this client's run folders, an absolute path."""
    data: str | None = None
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    base: str | None = None
    adapter: str | None = None
    public: str | None = None
    run: Path | None = None
    """The run file that this client agrees to."""
    yes: bool = False
    """Whether this client agrees to any run; needed if `run` is absent."""
    epsilon: float | None = None
    device: str = "auto"
    plugins: str = ""
    """The paths of plugin files, separated by spaces."""


def site_of(node: Mapping[str, Any]) -> Site:
    """Return the client that a SuperNode's --node-config describes.

    Raises:
        CoterieError: The configuration is incomplete or invalid.
    """
    if "partition-id" in node:
        raise CoterieError(
            "A Flower simulation gives its nodes a partition number, but no path of texts; use "
            "`coterie run`, with --engine ray for several GPUs, to simulate clients."
        )
    try:
        keys = NodeConfig.model_validate(dict(node))
        if not (keys.run or keys.yes):
            raise CoterieError("add `run` (the run file to agree to), or `yes=true` (for any run).")
        for plugin in keys.plugins.split():
            load_plugin(plugin)
        paths = {key: getattr(keys, key) for key in ("train", "validation", "test")}
        texts, device = deploy.validate_texts(keys.name, {"path": keys.data, **paths}, keys.device)
        agreed, limit = deploy.terms_of(keys.run, keys.name, keys.epsilon)
    except (ValidationError, CoterieError) as error:
        message = str(error).replace("--", "")
        if isinstance(error, ValidationError):
            wrong = error.errors()[0]
            message = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg'].lower()}."
        raise CoterieError(f"The SuperNode's --node-config is invalid: {message}") from None
    local: Any = {"adapter": keys.adapter, "agreed": agreed, "limit": limit, "device": device}
    return Site(keys.name, texts, keys.out, keys.base, keys.public, **local)


def client_app() -> "ClientApp":
    """Return a Flower client app that executes the server app's orders.

    Raises:
        CoterieError: Flower is not installed, or is too old.
    """
    with _flower():
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.clientapp import ClientApp

    app = ClientApp()

    def reply(message: "Message", key: str, value: str | bytes) -> "Message":
        return Message(RecordDict({key: ConfigRecord({key: value})}), reply_to=message)

    @app.query()
    def query(message: "Message", context: "Context") -> "Message":
        name = ""
        try:
            name = site_of(context.node_config).name
        except CoterieError as error:
            terminal.complain(f"Error: {error}")
        return reply(message, NAME, name)

    @app.train()
    def train(message: "Message", context: "Context") -> "Message":
        data: Any = message.content[ORDER]
        with _errors():
            return reply(message, ORDER, answer(site_of(context.node_config), data[ORDER]))

    return app


def answer(site: Site, data: bytes) -> bytes:
    """Execute an order, and return the reply.

    Flower executes each order in a new process. Therefore, the client's folder stores the most
    recent order of the kind `join`, which asks the client to join a run. Before an order of any
    other kind, the stored order is executed again, so that the client continues the run that it has
    joined.

    Args:
        site: The client's texts and settings.
        data: The order.

    Raises:
        MessageError: `data` is not an order.
    """
    site.out.mkdir(parents=True, exist_ok=True)
    file, order = f"join-{site.name}", unseal(Order, data)[0]
    log.setLevel(logging.INFO)
    worker = Worker(site, ClientBoard(terminal.console))
    with logged(site.out / f"client-{site.name}.log", log.name), closing(worker):
        if order.kind == "join":
            write_bytes(site.out / file, data)
        elif (site.out / file).exists():
            worker.answer(read_inside(site.out, file))
        return worker.answer(data)


@contextmanager
def _flower() -> Iterator[None]:
    """Raise CoterieError if an import from Flower fails inside the `with` block."""
    try:
        with imports_for("A Flower app", "flower"):
            import_module("flwr")
        yield
    except ImportError:
        raise CoterieError(
            "This version of Flower has no `flwr.app`; install flwr 1.23 or newer."
        ) from None


@contextmanager
def _errors() -> Iterator[None]:
    """Print a CoterieError from the `with` block as one sentence, and raise it again.

    Flower then prints a traceback. In addition, this context manager sets the umask: only the user
    who runs the process can read the files that the process creates. `coterie.cli.main` sets the
    same umask.
    """
    os.umask(0o077)
    try:
        yield
    except CoterieError as error:
        terminal.complain(f"Error: {error}")
        raise
