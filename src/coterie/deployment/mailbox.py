"""Entry points of deployments whose server has a mailbox: the server's network, and the client."""

import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.deployment.start import Serving
from coterie.federation.sizes import MiB
from coterie.files import refuse_links
from coterie.network.address import listen
from coterie.network.client import keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.link import Link, Seen
from coterie.network.mailbox import Mailbox
from coterie.network.server import MailboxServer
from coterie.runs import RunFolder
from coterie.runs.progress import logged

log = logging.getLogger("coterie")


@dataclass(frozen=True, kw_only=True)
class MailboxServing(Serving):
    """The network of a server with a mailbox, and the callbacks that display the server's run.

    Clients connect to the server to fetch orders from the mailbox and to put replies into it.
    """

    keys: Keys
    """The keys of the server and the clients."""
    address: str
    """The address to listen on, HOST:PORT."""

    @contextmanager
    def link(self, folder: RunFolder, config: RunConfig) -> Iterator[Link]:
        refuse_links(folder.path, "mailbox")
        mailbox = Mailbox(folder.path / "mailbox")
        largest = config.deployment.largest_message * MiB
        with MailboxServer(mailbox, self.keys, listen(self.address), largest):
            yield mailbox

    def clients(self) -> Collection[str]:
        return self.keys.clients().keys()

    def remarks(self) -> Sequence[str]:
        return self.keys.remarks()


def take_part(
    server: str, credentials: Credentials, site: Site, seen: Seen, stop: threading.Event
) -> Worker:
    """Take part in a run as a client until the run ends.

    Args:
        server: The server's address, HOST:PORT.
        credentials: The client's name, certificate and private key.
        site: The client's texts and settings.
        seen: A function that is called with each event that the user should see.
        stop: An event that ends the client early when it is set.

    Returns:
        The object that has executed the server's orders. If the client left without the run's
        result, the reason is in the object's attribute `error`.
    """
    log.setLevel(logging.INFO)
    site.out.mkdir(parents=True, exist_ok=True)
    file = site.out / f"client-{site.name}.log"
    with logged(file, log.name), closing(Worker(site, seen)) as worker:
        keep_serving(server, credentials, worker, stop, seen)
    return worker
