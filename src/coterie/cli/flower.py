"""The command `coterie flower init`, which writes a Flower app."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from coterie.cli import options, terminal
from coterie.cli.options import Out, Settings
from coterie.errors import CoterieError

TEMPLATE = Path(__file__).parents[1] / "assets" / "flower-app"
app = options.group("Use Coterie in a Flower federation.")


@app.callback()
def flower() -> None:
    """Serve as the app's callback, so that Typer treats `init` as a subcommand.

    The callback has nothing to do, but it must exist. Without a callback, a Typer app that has only
    one command, and is not part of another app, executes the command without the command's name.
    """


@app.command(cls=options.Command)
def init(
    folder: Annotated[Path, Argument(help="Folder to create for the app.")],
    run: Annotated[Path, Option(help="Run file (YAML) that lists the clients by name.")],
    settings: Settings = None,
    out: Out = None,
) -> None:
    """Write a Flower app that executes a run in a Flower federation.

    Start it with `flwr run FOLDER`; start it again to resume the run. Coterie must be installed on
    the machines of the SuperLink and of all SuperNodes. The option --node-config of a SuperNode
    describes its client. docs/deploy/flower.md is a step-by-step guide.

    For example:

        coterie flower init app --run us.yaml --out /srv/coterie/us
    """
    import yaml

    from coterie.config.deployed import load_deployment
    from coterie.config.values import read_values
    from coterie.files import write_folder, write_text

    values = read_values(run, settings or ())
    if not values.get("clients"):
        raise CoterieError(f"{run} lists no clients; a Flower app needs their names.")
    config = load_deployment(values, ())
    if folder.exists():
        raise CoterieError(f"{folder} already exists; choose another folder.")
    texts = {"path", "train", "validation", "test"}  # clients' own paths are not sent to others
    values["clients"] = [
        {key: value for key, value in client.items() if key not in texts}
        for client in values["clients"]
    ]
    text = yaml.safe_dump(values, allow_unicode=True, sort_keys=False)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    place = json.dumps(str((out or Path("runs") / config.name).resolve()), ensure_ascii=False)

    def fill(temporary: Path) -> None:
        for path in (TEMPLATE / "coterie_app.py", TEMPLATE / "pyproject.toml"):
            content = path.read_text(encoding="utf-8").replace('"@folder@"', place)
            write_text(temporary / path.name, content.replace("@run@", escaped))

    write_folder(folder, fill)
    terminal.say(f"The app is in {folder}. Start it with `flwr run {folder}`.")
