"""The command `coterie serve`."""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import check_run
from coterie.errors import CoterieError, imports_for


def serve(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Folders of finished runs.")],
    address: Annotated[str, Option(help="IP address and port to listen on.")] = "127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="File with one API key per line, of which each request must present one. Required "
            "unless --address is a loopback address.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens of a prompt.")
    ] = 4096,
    answer_tokens: Annotated[
        int, Option(min=1, help="Maximum number of tokens of an answer.")
    ] = 1024,
    queue: Annotated[
        int, Option(min=1, help="Maximum number of requests that are running or waiting.")
    ] = 64,
    seconds: Annotated[
        float, Option(min=0.1, help="Maximum time for answering a request, in seconds.")
    ] = 300.0,
) -> None:
    """Serve the models of finished runs to programs and to a web page, until Ctrl-C.

    Programs use the interface of OpenAI's API, with METHOD:CLIENT, CLIENT or `base` as the name of
    the model. Open the address in a browser to compare the models. Requests and answers are never
    logged. docs/use/serve.md explains the details.

    For example:

        coterie serve runs/mine
    """
    for run in runs:
        check_run(run)
    keys = [] if key_file is None else read_keys(key_file)
    from coterie.network.address import listen

    with listen(address) as listening:
        host = listening.getsockname()[0]
        if not keys and not ip_address(host).is_loopback:
            raise CoterieError(
                f"--address {address} is reachable from other machines; add --key-file FILE, with "
                "one key per line."
            )
        with imports_for("A server", "serve"):
            from coterie.serve.app import Limits
            from coterie.serve.app import serve as start
        from coterie.serve.models import Models

        with terminal.progress("loading") as show:
            models = Models(runs, show)
        shown = f"[{host}]" if ":" in host else host
        terminal.say(
            f"Models: {', '.join(models.names)}",
            f"Serving http://{shown}:{listening.getsockname()[1]} (API: /v1); Ctrl-C stops.",
        )
        start(models, listening, keys, Limits(prompt_tokens, answer_tokens, queue, seconds))
    terminal.say("Stopped.")


def read_keys(file: Path) -> list[str]:
    """Read the API keys of a file, one per line.

    Raises:
        CoterieError: The file cannot be read or contains no key.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CoterieError(f"--key-file: {file} cannot be read ({reason}).") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise CoterieError(f"--key-file: {file} contains no key; write one key per line.")
    return keys
