"""The checks of `coterie server --check` and `coterie client --check` before a long run."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.filesize import decimal as size
from typer import Exit

from coterie.analysis import trial
from coterie.bases import load_skeleton
from coterie.cli import terminal
from coterie.config.deployed import load_with_any_text
from coterie.config.run import RunConfig
from coterie.deployment import terms
from coterie.deployment.orders import Orders
from coterie.deployment.site import Site, ledger_of, run_folder
from coterie.engines.session import Session
from coterie.errors import CoterieError, plural
from coterie.federation.participants import served
from coterie.federation.pipeline import budgets_of
from coterie.federation.sizes import MiB, check_run
from coterie.federation.statements import protection
from coterie.network.address import listen
from coterie.network.client import first_order
from coterie.network.keys import Credentials, Keys

JOIN_TIMEOUT = 30.0
"""Timeout in seconds for the server's order to join a run."""


def check_server(
    values: Mapping[str, Any], config: RunConfig, keys: Keys, address: str, metrics: str | None
) -> None:
    """Check a server's keys, address, models and disk, and run one training step on a demo text.

    Args:
        values: The content of the run file as plain data.
        config: The configuration that results from `values`.
        keys: The server's keys.
        address: The address to listen on, HOST:PORT.
        metrics: The address for monitoring, HOST:PORT; None if there is none.
    """
    names = [client.name for client in config.clients]
    with _checking("keys") as report:
        remarks = "".join(f"; {remark}" for remark in keys.remarks())
        hosts = ", ".join(keys.hosts())
        count = len(keys.clients())
        registered = "1 client has a key" if count == 1 else f"{count} clients have keys"
        until = f"{keys.expires():%Y-%m-%d}"
        report(f"{registered}; the certificate is valid for {hosts}, until {until}{remarks}")
    with _checking("address") as report:
        listen(address).close()
        if metrics is not None:
            listen(metrics, "--metrics").close()
        report(f"{address} is free" if metrics is None else f"{address} and {metrics} are free")
    with _checking("run") as report:
        skeleton = load_skeleton(config.base, config.root)
        check_run(config, skeleton, names, Path(), config.deployment.largest_message * MiB)
        report(
            f"{config.label}, {plural(config.rounds, 'round')} of "
            f"{plural(config.training.steps, 'step')}; clients: {', '.join(names)}; "
            f"quorum: {config.deployment.quorum or len(names)}"
        )
    if config.server is not None:
        with _checking("model") as report:
            served(config)
            report(f"the server's own model: {config.server.base or config.base}")
    # An error may concern the demo's text only, and not the clients' texts.
    with _checking(
        "messages",
        "not measured: this run cannot be tried with the built-in demo text in place of clients' "
        "texts",
    ) as report:
        short = load_with_any_text(values)
        step = trial.run_trial(Session(short), short)
        total = size(len(names) * (step.up + step.down))
        each = f"{size(step.up)} up and {size(step.down)} down per client and round"
        report(f"{each}; orders and replies may need {total} on disk")
    with _checking("disk") as report:
        report(f"{size(shutil.disk_usage(Path()).free)} free in the current folder")
    terminal.say("\nThe server can start.")


def check_client(server: str, credentials: Credentials, site: Site) -> None:
    """Check a client's key, connection and texts, and run one training step of the server's run."""
    with _checking("key") as report:
        report(f"{credentials.name}, valid until {credentials.expires:%Y-%m-%d}")
    with _checking("connection") as report:
        order = first_order(server, credentials, JOIN_TIMEOUT)
        report(f"{server} accepts {credentials.name} and asks it to join a run")
    with _checking("run") as report:
        reason = terms.version_mismatch(order)
        if reason := reason or (site.agreed and terms.disagreement(site.agreed, order)):
            raise CoterieError(f"The run {reason}.")
        config = site.config(order)
        if reason := terms.extra_plugin(order, config):
            raise CoterieError(f"The run {reason}.")
        excess = terms.budget_excess(budgets_of(config), ledger_of(site, order.run))
        refused = Orders(site).refusal(order, config, run_folder(site, order.run))
        if reason := excess or terms.public_text_mismatch(order, config) or refused:
            raise CoterieError(f"The run {reason}.")
        report(f"{config.name}: {config.label}, {plural(config.rounds, 'round')}")
    with _checking("texts") as report:
        session = Session(config)
        [participant] = session.participants(config)
        data = participant.data
        report(
            f"{len(data.train.ids):,} tokens for training, {len(data.validation.ids):,} for "
            f"validation, {len(data.test.ids):,} for testing"
        )
    # An error may concern the whole run, of which this client knows only a part.
    with _checking("step", "not measured: the step needs the server or other clients"):
        step = trial.run_trial(session, config)
        _line("memory", "ok", f"at most {size(step.peak)} during a step")
        texts = dict.fromkeys(field.description for field in config.method.schema().up)
        fields = "; ".join(texts) or "nothing"
        _line("sent", "ok", f"{size(step.up)} up per round ({fields}), {size(step.down)} down")
        for subject, text in protection(config):
            _line("", "-", f"{subject}: {text}")
        seconds = step.step * config.training.steps
        round, run = (timedelta(seconds=int(s)) for s in (seconds, seconds * config.turns))
        estimate = f"{step.step:.2f} s per step, {round} per round, {run} in all"
        _line("time", "ok", f"{estimate}, without transfers and evaluation")
    terminal.say(
        "\nThis client can take part; none of its data was sent. To take part, run the command "
        "again without --check."
    )


@contextmanager
def _checking(subject: str, excuse: str = "") -> Iterator[Callable[[str], None]]:
    """Run the body of the `with` statement as a check.

    If the body raises an OSError, or a CoterieError without an excuse, the check has failed: a line
    with the error is printed, and the command exits with code 1.

    Args:
        subject: A word for the subject of the check. Each line about the check begins with it.
        excuse: A text that says why a CoterieError in the body does not count as a failure. If the
            body raises a CoterieError, the text and the error are printed, and the command
            continues. If the text is empty, a CoterieError counts as a failure.

    Yields:
        A function that the body can call when the check has passed. The function takes a text about
        the check's result, and prints a line with this text.
    """
    try:
        yield lambda text: _line(subject, "ok", text)
    except (CoterieError, OSError) as error:
        if excuse and isinstance(error, CoterieError):
            _line(subject, "-", f"{excuse} ({error})")
            return
        _line(subject, "NOT OK", str(error))
        terminal.say("\nThe remaining checks were skipped.")
        raise Exit(1) from None


def _line(subject: str, mark: str, text: str) -> None:
    terminal.say(f"{subject:<11} {mark:<6}  {text}")
