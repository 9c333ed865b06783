"""The commands for the operator of a server: `coterie status`, `expel` and `forget`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from coterie.cli import terminal
from coterie.cli.options import check_run
from coterie.errors import imports_for, plural

ServersRun = Annotated[Path, Argument(help="The server's run folder.")]
ClientName = Annotated[str, Option(help="Name of the client.")]


def status(
    run: ServersRun,
    as_json: Annotated[bool, Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show the round and the clients of a server's run.

    The server writes its status every two seconds. If the server has stopped, the command shows the
    last status and exits with code 1.

    For example:

        coterie status runs/us
    """
    check_run(run)
    with imports_for("A deployment", "deployment"):
        from coterie.cli.console import status_table, time_of_day
        from coterie.deployment.status import Status, is_running
    from coterie.runs import RunFolder

    folder = RunFolder(run)
    about, is_running = Status.read(folder), is_running(folder)
    if as_json:
        terminal.console.print_json(data={**about.model_dump(), "running": is_running})
    else:
        terminal.console.print(status_table(about), soft_wrap=True)
        if not is_running:
            end = "The run has ended" if about.ended else "The server is not running"
            terminal.say(f"{end}; this is the status of {time_of_day(about.updated)}.")
    raise Exit(0 if is_running or about.ended else 1)


def expel(run: ServersRun, client: ClientName) -> None:
    """Expel a client from a deployed run, even while the server is running.

    The round in progress is repeated without the client, and the run continues. In a run whose
    rounds need all clients, the repeated round and all later rounds need all clients except the
    expelled clients. The server discards the method's state for this client; `coterie forget`
    deletes the client's other data.

    For example:

        coterie expel runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import check_participant, participants, quorum_change
    from coterie.runs import RunFolder

    folder = RunFolder(run)
    check_participant(folder, client)
    is_known = client in participants(folder)
    folder.expel(client)
    terminal.say(f"{client} is expelled from {run}.")
    if not is_known:
        terminal.say(f"No client called {client} has joined this run so far; check the name.")
    if change := quorum_change(folder):
        terminal.say(change)
    terminal.say(
        f"{client} can still connect; to revoke the key: `coterie keys remove {client}`",
        f"To delete the client's data on the server: `coterie forget {run} --client {client}`",
    )


def forget(run: ServersRun, client: ClientName) -> None:
    """Delete a client's state, metrics and log lines from a server's run folder.

    Stop the server first, and resume it afterwards. The client's uploads cannot be removed from
    the averages that contain them. The command therefore prints in how many rounds these uploads
    were used, and how to train again without the client.

    For example:

        coterie forget runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import forget as forget_in
    from coterie.runs import RunFolder

    forgotten = forget_in(RunFolder(run), client)
    terminal.say(
        f"Deleted from {run}: all checkpoints except the last, the state of {client} in the last "
        f"checkpoint, and {plural(forgotten.metrics, 'metric')} and "
        f"{plural(forgotten.log_lines, 'log line')} about this client. The client's name is still "
        "in run.json and without.json."
    )
    if forgotten.rounds:
        terminal.say(
            f"Uploads from {client} were used in {plural(len(forgotten.rounds), 'round')}, most "
            f"recently in round {forgotten.rounds[-1]}. Their effect on the shared parameters and "
            "on the other clients' models cannot be removed.",
            f"To train again without {client}, start a new run:",
            f"  coterie server FILE --without {client} --out FOLDER",
        )
    terminal.say(f"{client} can still connect; to revoke the key: `coterie keys remove {client}`")
