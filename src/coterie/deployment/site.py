"""A client's machine in a deployment: its texts, base and folders, and its view of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.bases import is_local
from coterie.bases.devices import Device
from coterie.config.run import HIDDEN_KEYS, RunConfig, parse
from coterie.data.templates import SHIPPED, is_text
from coterie.deployment.terms import Terms
from coterie.errors import CoterieError
from coterie.messages import MessageError
from coterie.messages.envelope import Order
from coterie.privacy.ledger import Budget, Ledger
from coterie.runs import RunFolder


@dataclass(frozen=True)
class Site:
    """A client's texts, base, folders and consent, for all runs that the client joins."""

    name: str
    texts: dict[str, str]
    """The paths of the texts. The keys are the same as in a run file: `path`, or `train`,
    `validation` and `test`."""
    out: Path
    """The folder that contains the client's run folders."""
    base: str | None = None
    """The base to load; None loads the base that the run names, which must not be a local folder.
    """
    public: str | None = None
    """The path of this machine's copy of the run's public text; None if there is no copy."""
    agreed: Terms | None = None
    """The terms that the user agreed to in advance; if None, `agrees` decides."""
    agrees: Callable[[Order, RunConfig], bool] = lambda *_: True
    """A function that returns whether the user agrees to a run; called once for each run."""
    asks: bool = False
    """Whether `agrees` asks a person, who can be asked again after several new runs."""
    limit: Budget | None = None
    """The privacy budget for all runs together; None: only each run's own budget is a limit."""
    device: Device = "auto"
    """The device that the base runs on, as in a run file."""
    adapter: str | None = None
    """The folder of this machine's copy of the LoRA adapter that the run merges into its base; None
    if there is no copy."""

    def config(self, order: Order) -> RunConfig:
        """Return the run that an order to join describes, after adapting the run to this client.

        This client is the only client in the returned run. Every path in the returned run was set
        on this machine, not by the server.

        Raises:
            CoterieError: The run is invalid, or needs a path that this client has not set.
            MessageError: The order is not from a Coterie server, or is malicious.
        """
        described = dict(order.config or {})
        data, named = described.get("data"), described.get("base")
        base = {"name": named} if isinstance(named, str) else named
        if (
            not isinstance(data, dict)
            or not isinstance(base, dict)
            or not isinstance(name := base.get("name"), str)
            or not described.keys().isdisjoint(HIDDEN_KEYS)
        ):
            raise MessageError("The server's order to join contains no valid run.")
        if order.public is not None and self.public is None:
            raise CoterieError("The run has a public text; give this machine's copy with --public.")
        match data.get("instructions"):
            case {"template": str(template)} if template not in SHIPPED and not is_text(template):
                raise MessageError(
                    "The server's run names a file on this machine as its template, which is not "
                    "allowed."
                )
        match data.get("chat_template"):
            case str(template) if not is_text(template):
                raise MessageError(
                    "The server's run names a file on this machine as its template, which is not "
                    "allowed."
                )
        match described.get("training"):
            case {"dpo": {"reference": reference}} if reference != "base":
                raise MessageError(
                    "The server's run sets training.dpo.reference to a run folder; in a "
                    "deployment, only the reference 'base' is allowed."
                )
        has_adapter = base.get("adapter") is not None
        if has_adapter and self.adapter is None:
            raise CoterieError(
                "The run merges a LoRA adapter into its base; give this machine's copy of the "
                "adapter with --adapter."
            )
        if self.base is None and is_local(name):
            raise CoterieError(
                f"The run's base is called {name!r}, and so is a folder or file on this machine; "
                "if this contains the base, give it with --base."
            )
        return parse(
            {
                **described,
                "clients": [{"name": self.name, **self.texts}],
                "base": {
                    **base,
                    "name": self.base or name,
                    "adapter": self.adapter if has_adapter else None,
                },
                "data": {**data, "public": None if order.public is None else self.public},
                "data_root": "",
                "device": self.device,
            }
        )


def ledger_of(site: Site, run: str) -> Ledger:
    """Return the ledger of the privacy budget that a client has spent in all its runs.

    Args:
        site: The client's site.
        run: The id of the current run. The ledger records new spending under this id.
    """
    return Ledger(site.out / f"privacy-{site.name}.json", run, site.limit)


def run_folder(site: Site, id: str, name: str) -> RunFolder:
    """Return the folder of a client's part of a run.

    Args:
        site: The client's site.
        id: The id of the run.
        name: The run's name, or a pattern of names.
    """
    return RunFolder(site.out / f"{name}-{site.name}-{id[:8]}")


def begun(site: Site, id: str) -> list[RunFolder]:
    """Return the folders of a run that a client has begun, whatever the run's name.

    There is at most one, unless the server has changed the run's name.
    """
    pattern = run_folder(site, id, "*").path.name
    folders = [RunFolder(path) for path in sorted(site.out.glob(pattern))]
    return [f for f in folders if f.is_run and site.name in f.description["clients"]]
