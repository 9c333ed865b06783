"""`coterie server --check` and `coterie client --check`: what would go wrong, before a long run."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich.filesize import decimal as size

from coterie.analysis import trial
from coterie.cli import terminal
from coterie.config.deployed import load_with_any_text
from coterie.config.run import RunConfig
from coterie.deployment.orders import Orders
from coterie.deployment.site import Site, ledger_of, run_folder
from coterie.deployment.terms import (
    budget_excess,
    disagreement,
    extra_plugin,
    public_text_mismatch,
    version_mismatch,
)
from coterie.engines.session import Session
from coterie.errors import CoterieError, plural
from coterie.federation.participants import served
from coterie.network.door_process import listen
from coterie.network.flower import fleet
from coterie.network.keys import Keys, Kit

ASKED_WITHIN = 30.0
"""Seconds that a client waits for the server to ask it to join."""


def check_server(values: Mapping[str, Any], config: RunConfig, keys: Keys, address: str) -> None:
    """Check keys, address, models, and a step of the run with a text of the demo.

    values: the plain data of the run file.
    """
    names = [client.name for client in config.clients]
    with _checking("keys") as found:
        remarks = "".join(f"; {remark}" for remark in keys.remarks())
        hosts = ", ".join(keys.hosts())
        count = len(keys.clients())
        have = "1 client has a kit" if count == 1 else f"{count} clients have kits"
        found(f"{have}; the certificate is for {hosts}, until {keys.expires():%Y-%m-%d}{remarks}")
    with _checking("address") as found:
        listen(address).close()
        found(f"nobody else listens on {address}")
    with _checking("run") as found:
        found(
            f"{config.label}, {plural(config.rounds, 'round')} of "
            f"{plural(config.training.steps, 'step')}, for "
            f"{', '.join(names)}; a round needs {config.deployment.quorum or len(names)} of them"
        )
    if config.server is not None:
        with _checking("model") as found:
            served(config)
            found(f"the server's own: {config.server.base or config.base}")
    # What is wrong may be about that text, and not the clients' own.
    with _checking("messages", "not measured, as a text of the demo does not do") as found:
        short = load_with_any_text(values)
        step = trial.tried(Session(short), short)
        held = size(len(names) * (step.up + step.down))
        ways = f"{size(step.up)} up and {size(step.down)} down per client and round"
        found(f"{ways}; Flower may hold {held} of them at once")
    with _checking("disk") as found:
        found(f"{size(shutil.disk_usage(Path()).free)} free here")
    terminal.say("\nThe server can start.")


def check_client(server: str, kit: Kit, site: Site) -> None:
    """Kit, connection, and a step of the run that the server asks this client to join."""
    with _checking("kit") as found:
        found(f"{kit.name}, until {kit.expires:%Y-%m-%d}")
    with _checking("connection") as found:
        order = fleet.first_order(server, kit, ASKED_WITHIN)
        found(f"{server} lets {kit.name} in and asks it to join a run")
    with _checking("run") as found:
        if why := version_mismatch(order) or (site.agreed and disagreement(site.agreed, order)):
            raise CoterieError(f"The run {why}.")
        config = site.config(order)
        if why := extra_plugin(order, config):
            raise CoterieError(f"The run {why}.")
        spends = budget_excess(config.budgets, ledger_of(site, order.run))
        folder = run_folder(site, order.run, config)
        refused = Orders(site).refusal(order, config, folder)
        if why := spends or public_text_mismatch(order, config) or refused:
            raise CoterieError(f"The run {why}.")
        found(f"{config.name}: {config.label}, {plural(config.rounds, 'round')}")
    with _checking("texts") as found:
        session = Session(config)
        [own] = session.participants(config)
        train, validation, test = own.data.train, own.data.validation, own.data.test
        found(
            f"{len(train.ids):,} tokens or samples to train on, {len(validation.ids):,} for "
            f"validation, {len(test.ids):,} for the test"
        )
    # What is wrong may be about the run as a whole, of which this client knows its part.
    with _checking("step", "not tried, as it needs the other side, too"):
        step = trial.tried(session, config)
        _line("memory", "ok", f"{size(step.peak)} at most, in a step")
        fields = "; ".join(field.description for field in config.method.schema().up) or "nothing"
        _line("sent", "ok", f"{size(step.up)} a round ({fields}); {size(step.down)} come back")
        round = step.step * config.training.steps
        run = timedelta(seconds=int(round * config.exchanges))
        took = f"a step takes {step.step:.2f} s: a round {timedelta(seconds=int(round))}"
        _line("time", "ok", f"{took}, all {run}, without transfers and scores")
    terminal.say("\nThis client can take part; nothing of its own was sent. Now without --check.")


@contextmanager
def _checking(what: str, excuse: str = "") -> Iterator[Callable[[str], None]]:
    """A line for a thing that is checked; one that will not do is the last, with exit code 1,
    unless there is an excuse for it."""
    try:
        yield lambda text: _line(what, "ok", text)
    except (CoterieError, OSError) as error:
        if excuse and isinstance(error, CoterieError):
            _line(what, "-", f"{excuse} ({error})")
            return
        _line(what, "NOT OK", str(error))
        terminal.say("\nWhat comes after it was not checked.")
        raise typer.Exit(1) from None


def _line(what: str, mark: str, text: str) -> None:
    terminal.say(f"{what:<11} {mark:<6}  {text}")
