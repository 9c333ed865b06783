"""The command `coterie evaluate`, which scores trained models on general tasks."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import check_run, listed
from coterie.errors import CoterieError


def evaluate(
    run: Annotated[Path, Argument(help="Run folder.")],
    client: Annotated[list[str], Option(help="Client whose models are scored. Repeatable.")],
    tasks: Annotated[
        str,
        Option(
            metavar="TASKS",
            help="Comma-separated: `general` for Coterie's general questions, names of tasks or "
            "groups of lm-eval (`lm-eval ls tasks` lists them), and YAML files that define tasks.",
        ),
    ],
    limit: Annotated[
        int | None, Option(min=1, help="Number of samples of each task. Default: all samples.")
    ] = None,
) -> None:
    """Score the base and a client's models on general questions and tasks of lm-eval.

    The table shows what a client has gained on its own test text, and what it has lost or gained on
    other tasks. The base is scored first, then the models that the baselines and the run's own
    method trained for the client. Scores are written to the folder `evaluations` of the run, and
    existing scores are reused, so an interrupted command can be repeated. `coterie report` shows
    them, too.

    For example:

        coterie evaluate runs/mine --client anna --tasks general

        coterie evaluate runs/mine --client anna --tasks arc_easy,piqa --limit 200

        coterie evaluate runs/mine --client anna --client ben --tasks capitals.yaml
    """
    check_run(run)
    names = listed(tasks)
    if not names:
        raise CoterieError("--tasks names no task; give names of tasks, or files.")
    from coterie.analysis.benchmarks import evaluate

    def step(model: str, done: int, total: int) -> None:
        terminal.complain(f"Model {done + 1} of {total}: {model}")

    try:
        tables = evaluate(run, client, names, limit=limit, step=step)
    except KeyboardInterrupt:
        terminal.exit_stopped("Finished tasks are saved; repeat the command to continue.")
    terminal.console.print(*tables)
    terminal.say(f"\nSaved in {run}/evaluations.")
