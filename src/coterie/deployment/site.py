"""What a client brings to a deployed run, and the run as this client sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.bases import is_folder
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
    """What a client brings to any run: where its text, its base and its folders are."""

    name: str
    texts: dict[str, str]
    """`path`, or `train`, `validation` and `test`, as in a run file."""
    out: Path
    base: str | None = None
    """The base to load; None: the one that the run names, which cannot be a folder."""
    public: str | None = None
    """This machine's copy of the run's public text."""
    agreed: Terms | None = None
    """The terms that were agreed to beforehand; None: `agrees` decides."""
    agrees: Callable[[Order, RunConfig], bool] = lambda *_: True
    """Asks somebody, once for each run."""
    asks: bool = False
    """Whether `agrees` asks a person, who can be asked again after several new runs."""
    limit: Budget | None = None
    """The most that all runs together may spend of its texts; None: each what it says."""
    device: Device = "auto"
    """Where its base is computed, as in a run file."""

    def config(self, order: Order) -> RunConfig:
        """The run that an order to join asks for, as this client sees it: with its own text and
        nobody else's, and with no path that is not its own.

        Raises CoterieError, or MessageError for what no server of ours would send.
        """
        described = dict(order.config or {})
        data, told = described.get("data"), described.get("base")
        base = {"name": told} if isinstance(told, str) else told
        if (
            not isinstance(data, dict)
            or not isinstance(base, dict)
            or not isinstance(name := base.get("name"), str)
            or not described.keys().isdisjoint(HIDDEN_KEYS)
        ):
            raise MessageError("The server sent no run.")
        if order.public is not None and self.public is None:
            raise CoterieError("The run has a public text; give this machine's copy with --public.")
        match data.get("instructions"):
            case {"template": str(template)} if template not in SHIPPED and not is_text(template):
                raise MessageError("The server named a file of this machine as the template.")
        match data.get("chat_template"):
            case str(template) if not is_text(template):
                raise MessageError("The server named a file of this machine as the template.")
        match described.get("training"):
            case {"dpo": {"reference": reference}} if reference != "base":
                raise MessageError("The server named a run of this machine as the reference.")
        if self.base is None and is_folder(name):
            raise CoterieError(
                f"The run's base {name!r} is a folder on this machine, too; if it is the one that "
                "is meant, give it with --base."
            )
        return parse(
            {
                **described,
                "clients": [{"name": self.name, **self.texts}],
                "base": {**base, "name": self.base or name},
                "data": {**data, "public": None if order.public is None else self.public},
                "data_root": "",
                "device": self.device,
            }
        )


def ledger_of(site: Site, run: str) -> Ledger:
    """What a client has told under noise, in all its runs."""
    return Ledger(site.out / f"privacy-{site.name}.json", run, site.limit)


def run_folder(site: Site, id: str, config: RunConfig) -> RunFolder:
    """Where a client keeps its part of a run."""
    return RunFolder(site.out / f"{config.name}-{site.name}-{id[:8]}")
