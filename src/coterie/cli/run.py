"""Commands that train: `coterie run` and `coterie compare`."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import FromRound, Out, RunFile, Settings, check_run, listed, require_resume
from coterie.errors import CoterieError

if TYPE_CHECKING:
    from coterie.api import Run
    from coterie.config.run import RunConfig
    from coterie.runs import Callback

Engine = Annotated[
    Literal["local", "ray"] | None,
    Option(
        help="Engine that executes the rounds. local: clients train one after another in this "
        "process. ray: clients train in parallel processes, on this machine or in a Ray cluster. "
        "Default: local, or the engine of the resumed run."
    ),
]
Address = Annotated[
    str | None,
    Option(
        metavar="HOST:PORT",
        help="Address of a running Ray cluster, for --engine ray. This machine must belong to the "
        "cluster. Default: start Ray on this machine.",
    ),
]
Gpus = Annotated[
    float | None,
    Option(
        metavar="NUMBER",
        help="Number of GPUs for each process of --engine ray; with a fraction, such as 0.25, "
        "several processes share a GPU. Default: the number of GPUs in the run file's key "
        "`device`. If `device` is auto, the default is 1, or 0 if there is no GPU.",
    ),
]
Jobs = Annotated[
    int,
    Option(
        min=1,
        help="Number of processes. With 3, for example, two baselines run at the same time as the "
        "method. The results do not change if the run file sets `threads`.",
    ),
]
METHODS: list[str] = ["pretrained", "local", "fedavg", "comigs-1g1s"]
"""The methods that `coterie compare` compares by default."""
MethodNames = Annotated[
    str | None,
    Option(
        help="Comma-separated names of methods (see `coterie methods`). "
        f"Default: {', '.join(METHODS)}."
    ),
]
Tune = Annotated[
    list[str] | None,
    Option(
        metavar="KEY=VALUES",
        help="Values to try for a key: training.learning_rate=1e-4,5e-4,2e-3. Each method runs "
        "with the values that score best on the validation text with the first seed. Repeatable: "
        "all combinations are tried.",
    ),
]
Against = Annotated[
    str | None,
    Option(
        metavar="METHOD",
        help="Method that all other methods are compared with. Default: the method with the best "
        "score.",
    ),
]


def run(
    file: RunFile = None,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[Path | None, Option(help="Folder of the interrupted run to resume.")] = None,
    from_round: FromRound = None,
    force: Annotated[bool, Option("--force", help="Overwrite an existing run in --out.")] = False,
    engine: Engine = None,
    address: Address = None,
    gpus: Gpus = None,
    jobs: Jobs = 1,
) -> None:
    """Train a method and its baselines, and show each client's results.

    Without a run file, the command runs the built-in demo, which takes a few minutes on two cores
    and downloads nothing. For your own data, write a run file, such as mine.yaml:

        method: auto
        rounds: 10
        clients:
          - {name: anna, path: anna.txt}
          - {name: ben, path: ben-notes/}

    Then run it; --set overrides any key:

        coterie run mine.yaml --set training.batch=8 --set seed=1

    docs/use/run-file-keys.md lists all keys; `coterie methods` lists all methods.
    """
    import coterie
    from coterie.config.read import load_here
    from coterie.config.values import read_values

    arguments = None
    options: dict[str, Any] = {"address": address, "gpus": gpus, "jobs": jobs}
    options |= {"engine": engine, "report": terminal.say}
    if resume is None:
        require_resume(from_round)
        arguments = _arguments(file, settings or ())
        config = load_here(read_values(file, settings or ()))
        _warn_of_unused_routers(config)
        if config.evaluation.questions is not None:
            from coterie.inference.asking import shown_questions

            shown_questions(config)  # reports a mistake before the training
        folder = out or Path("runs") / config.name
        with terminal.stoppable(folder):
            options["engine"] = engine or "local"
            finished = coterie.run(config, out=folder, force=force, callbacks=progress(), **options)
    else:
        if file is not None or settings or out is not None or force:
            raise CoterieError(
                "--resume uses the saved configuration; it takes no run file, --set, --out or "
                "--force."
            )
        check_run(resume)
        with terminal.stoppable(resume):
            options["from_round"] = from_round
            finished = coterie.resume(resume, callbacks=progress(), **options)
    _show(finished, arguments)


def compare(
    file: Annotated[
        Path | None, Argument(help="Run file (YAML). Default: the built-in demo.")
    ] = None,
    methods: MethodNames = None,
    seeds: Annotated[
        int, Option(min=1, help="Number of runs per method, with consecutive seeds.")
    ] = 1,
    tune: Tune = None,
    against: Against = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        Option(help="Folder of the runs. Default: runs/compare-NAME (NAME: the run file's name)."),
    ] = None,
) -> None:
    """Compare methods on the same data and base over several seeds.

    Finished runs are saved and reused. To continue after an interruption, or to add methods or
    seeds, run the command again.

    For example:

        coterie compare mine.yaml --methods local,fedavg,auto --seeds 3

        coterie compare mine.yaml --tune training.learning_rate=1e-4,5e-4,2e-3
    """
    import coterie
    from coterie.config.read import load_here
    from coterie.config.tune import read_tune
    from coterie.config.values import read_values

    values, trials = read_values(file, settings or ()), read_tune(tune or ())
    if {"rows", "shows"} & values.keys():
        raise CoterieError(
            f"{file} describes a table of results; run it with `python -m reproduce` in "
            "papers/ of the repository."
        )
    config = load_here(values, trials)
    folder = out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = coterie.compare(
            config,
            METHODS if methods is None else listed(methods),
            seeds=seeds,
            tune=trials,
            against=against,
            out=folder,
            callbacks=progress(),
            report=terminal.say,
        )
    terminal.console.print(*comparison.tables())
    terminal.say(
        f"\nSaved to {folder}/compare.md and compare.json.",
        "To add methods or seeds, run the command again with them; finished runs are reused.",
    )


def _arguments(file: Path | None, settings: Sequence[str]) -> str:
    """Format a run file and settings as command-line arguments."""
    files = [] if file is None else [f" {quote(str(file))}"]
    return "".join([*files, *(f" --set {quote(setting)}" for setting in settings)])


def _warn_of_unused_routers(config: "RunConfig") -> None:
    """Print a note if a run ends before its routers are first updated."""
    every = getattr(getattr(config.method, "router", None), "every", 0)
    steps = config.rounds * config.training.steps
    if every > steps:
        terminal.say(
            f"Note: the routers of {config.label} are first updated after {every} steps, but this "
            f"run has only {steps} steps. Set a smaller method.router.every, or more rounds."
        )


def _who_learns_with_whom(path: Path) -> list[str]:
    from coterie.analysis.experiments import experiments
    from coterie.analysis.peers import sentences

    runs = experiments([path])[0].all  # the run and its baselines
    return sentences(next(run for run in runs if run.path == path), runs)


def progress() -> "list[Callback]":
    """Return the callbacks that show the progress of runs on this terminal."""
    from coterie.cli.progress import ConsoleProgress

    return [ConsoleProgress()]


def _show_general(finished: "Run") -> None:
    """Print how well a run's models answer general questions, if the run trains assistants."""
    from coterie.analysis.benchmarks import general_table
    from coterie.bases import load_tokenizer
    from coterie.inference.general import is_assistant

    config, client = finished.config, min(next(iter(finished.results.values()))["trained"])
    if config.evaluation.general and is_assistant(
        config, lambda: load_tokenizer(config.base_of(client), config.root)
    ):
        with terminal.progress("Asking general questions") as show:
            table = general_table(finished.path, show)
        terminal.console.print(table)


def _show(finished: "Run", arguments: str | None) -> None:
    """Print answers, a run's scores, a comparison with `local`, and commands to try next.

    The answers are printed only if the run file has the key `evaluation.questions`.
    With the method `local`, each client trains alone. The comparison is printed only if `local` is
    one of the run's baselines.

    Args:
        finished: The run.
        arguments: The run file and settings as command-line arguments; None if unknown.
    """
    from coterie.data.templates import fields

    if finished.config.evaluation.questions is not None:
        from coterie.cli.ask import show_answers
        from coterie.inference.asking import shown_questions

        show_answers(finished.path, shown_questions(finished.config))
    _show_general(finished)
    client = min(next(iter(finished.results.values()))["trained"])
    terminal.console.print(finished.table())
    for method, result in finished.results.items():
        terminal.report_unhelped(method, result)
    if learned := _who_learns_with_whom(finished.path):
        terminal.say("", *learned)
    data, plugins = finished.config.data, terminal.plugin_options(finished.config.plugins)
    if gained := finished.gains():
        terminal.say(f"\n{gained}")
        if arguments is not None:
            methods = ",".join(finished.results)
            terminal.say(
                "To compare these methods over several seeds, or with other methods:",
                f"  coterie compare{arguments} --methods {methods} --seeds 3{plugins}",
            )
        terminal.say("To plot this run:", f"  coterie report {finished.path}{plugins}")
    model = f"{finished.path} --client {client}"
    terminal.say(f"\nThe run is saved in {finished.path}.")
    if data.chats:
        terminal.say("To chat with a client's model:", f"  coterie chat {model}{plugins}")
        return
    options = '--prompt "..."'
    if data.instructions is not None:
        options = " ".join(f'--field {name}="..."' for name in fields(data.instructions.template))
    terminal.say(
        "To generate text with a client's model:", f"  coterie generate {model} {options}{plugins}"
    )
