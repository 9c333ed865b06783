"""The command that looks at a base before it is loaded."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, Settings


def base(
    what: Annotated[
        str,
        typer.Argument(
            metavar="NAME|RUN.yaml",
            help="A base (built-in, a folder, or a name on the Hugging Face hub), or a run file.",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Show a base, where adapters stand in it and, for a run file, the memory that a client needs.

    Only the base's configuration, its tokenizer and, in a folder, the headers of its weights are
    read: no weights are downloaded or loaded.

    Example:

        coterie base us.yaml --set base.weights=nf4
    """
    from coterie.config.deployed import load_with_any_text
    from coterie.config.values import located, read_values

    file = located(Path(what))
    is_run = file.suffix in (".yaml", ".yml")
    if is_run:
        config = load_with_any_text(read_values(file, settings or ()))
    else:
        here = [f"data_root={Path.cwd()}", f"base={what}", *(settings or ())]
        config = load_with_any_text(read_values(None, here))
    from coterie.analysis.need import base_table, need_tables, stands_table

    clients = [client.name for client in config.clients] or ["a client"]
    for spec, name in {config.base_of(name): name for name in reversed(clients)}.items():
        terminal.console.print(base_table(spec, config))
        terminal.console.print(stands_table(spec, config, name if is_run else None))
    if is_run:
        for table in need_tables(config):
            terminal.console.print(table)
