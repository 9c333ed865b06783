"""A client leaves a deployed run: `coterie expel` and `coterie forget`, on the server's machine."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import check_run
from coterie.errors import plural

Run = Annotated[Path, typer.Argument(help="The server's run folder.")]
Client = Annotated[str, typer.Option(help="The client's name.")]


def expel(run: Run, client: Client) -> None:
    """Expel a client from a deployed run, also while the server is working.

    The round in progress begins anew, and the run continues without it: with a quorum of all
    clients, all others are enough. The server drops what the method keeps of this client alone.

        coterie expel runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import known
    from coterie.runs import RunFolder

    folder = RunFolder(run)
    known(folder, client)
    folder.expel(client)
    terminal.say(f"{client} takes no further part in {run}.")
    terminal.say(f"Its kit can still connect; `coterie keys remove {client}` ends that.")
    terminal.say(f"To delete what the server keeps of it: `coterie forget {run} --client {client}`")


def forget(run: Run, client: Client) -> None:
    """Delete what a server keeps of a client that leaves: its state, figures and log lines.

    The server must have stopped; resume it afterwards. What was averaged into the model cannot be
    taken out again: this says in which rounds, and how to train without the client.

        coterie forget runs/us --client mallory
    """
    check_run(run)
    from coterie.deployment.forgetting import forget as forget_in
    from coterie.runs import RunFolder

    done = forget_in(RunFolder(run), client)
    terminal.say(
        f"Deleted what {run} kept of {client}: what the last checkpoint had of it, all earlier "
        f"checkpoints, {plural(done.figures, 'figure')} and {plural(done.lines, 'line')} of logs. "
        "The name itself is still in run.json and without.json."
    )
    if done.rounds:
        terminal.say(
            f"Its uploads counted in {plural(len(done.rounds), 'round')}, the last time in round "
            f"{done.rounds[-1]}. What they changed in the shared parameters, and in the models of "
            "the other clients, cannot be taken back."
        )
        terminal.say("To train again without it, begin a new run:")
        terminal.say(f"  coterie server FILE --without {client} --out FOLDER")
    terminal.say(f"Its kit can still connect; `coterie keys remove {client}` ends that.")
