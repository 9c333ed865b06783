"""The command `coterie export`."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from coterie.cli import terminal
from coterie.cli.options import check_run
from coterie.errors import CoterieError

FORMATS = ("auto", "peft", "merged", "moe", "bundle", "gguf")


def export(
    run: Annotated[Path, Argument(help="Run folder.")],
    client: Annotated[
        str,
        Option(
            metavar="NAME", help="Client whose model is exported, or `server` for the server's own."
        ),
    ],
    to: Annotated[Path, Option(metavar="FOLDER", help="Folder to create.")],
    format: Annotated[
        str,
        Option(
            metavar="|".join(FORMATS),
            help="Format of the folder. peft: adapter for PEFT. merged: transformers model with "
            "the update added to its weights. moe: mixture-of-experts checkpoint (Mixtral or "
            "Qwen-MoE) for transformers, vLLM and others. bundle: any adapter, loaded by "
            "coterie.load without the run. gguf: file for llama.cpp and Ollama, written by "
            "llama.cpp's own converter, whose folder the environment variable LLAMA_CPP names. "
            "auto: the first of them that is exact.",
        ),
    ] = "auto",
    push: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Repository on the Hugging Face hub, such as anna/model, to which the folder is "
            "uploaded. A new repository is private.",
        ),
    ] = None,
    force: Annotated[
        bool, Option("--force", help="Replace an earlier export in the folder.")
    ] = False,
) -> None:
    """Export a client's model for use outside Coterie, or on another machine.

    The exported folder is loaded again, and its logits are compared with those of the trained
    model; if they differ by more than rounding error, nothing is exported. README.md in the folder
    is a model card, with the code that loads the model.

    For example:

        coterie export runs/us --client anna --to models/anna

        coterie export runs/us --client anna --to models/anna --format bundle --push anna/mine
    """
    check_run(run)
    if format not in FORMATS:
        raise CoterieError(f"--format {format}: choose one of {', '.join(FORMATS)}.")
    from coterie.exports import export

    done = export(run, client, to, format=format, force=force, push=push)
    reason = "" if done.reason is None else f" ({done.reason})"
    compared = (
        "Its outputs were not compared with those of the trained model; to compare them, install "
        "llama-cpp-python."
        if done.difference is None
        else f"The logits differ from the trained model's by at most {done.difference:.2g} "
        f"(largest logit: {done.largest:.3g}), as computed with {done.tool}."
    )
    terminal.say(
        f"{to} contains {done.content}{reason}.",
        compared,
        *done.notes,
        f"{to / 'README.md'} shows how to load it.",
    )
    if done.url is not None:
        terminal.say(f"It was uploaded to {done.url}")
