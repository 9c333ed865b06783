"""Run files of deployments, whose clients keep their texts on their own machines."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.config.errors import validated
from coterie.config.read import bind
from coterie.config.sections import RunFile
from coterie.config.values import DEMO, apply_setting, read_values
from coterie.errors import CoterieError, plural

if TYPE_CHECKING:
    from coterie.config.run import RunConfig

DEMO_TEXT = DEMO.parent / "demo-writers" / "poet.txt"
RECORD_KEYS = {
    "data": ("instructions", "messages", "preferences", "kind", "chat_template"),
    "training": ("dpo",),
    "evaluation": ("generate", "metric", "questions"),
}
"""For each section, the keys that require structured records; the demo's text is plain."""


def load_deployment(values: Mapping[str, Any], registered: Sequence[str]) -> "RunConfig":
    """Create the run of a deployment from a run file that need not say where clients' texts are.

    Each client's text stays on the client's own machine.

    Args:
        values: The plain data of the run file.
        registered: The names of all clients that have a key with which they can connect to the
            server. If the run file lists no clients, all of these clients take part in the run.

    Raises:
        CoterieError: The run file is invalid or cannot be deployed.
    """
    if values.get("divide") is not None:
        raise CoterieError(
            "`divide` cannot be used in a deployment, where every client has its own text; write "
            "the clients' texts and a run file for them with `coterie divide`."
        )
    values = dict(values)
    if not values.get("clients"):
        if not registered:
            raise CoterieError("No client has a key yet; create one with `coterie keys add NAME`.")
        values["clients"] = [{"name": name} for name in registered]
        apply_setting(values, "deployment.anyone=true")
    config = bind(validated(RunFile, {**_with_text(values, "-"), "baselines": []}))
    evaluation = config.evaluation.model_copy(update={"questions": None})
    config = config.model_copy(update={"evaluation": evaluation, "trackers": ()})
    if (dpo := config.training.dpo) is not None and dpo.reference != "base":
        raise CoterieError(
            "training.dpo.reference names the folder of a run, which clients of a deployment do "
            "not have; set `training.dpo.reference: base`."
        )
    if config.checkpoint.every > 1:
        raise CoterieError(
            f"checkpoint.every is {config.checkpoint.every}, but the server and the clients of a "
            "deployment write a checkpoint in every round; remove `checkpoint`."
        )
    if config.pooled:
        raise CoterieError(
            "A run that trains one client on the texts of all clients cannot be deployed; choose "
            "a method other than `centralized`, and remove `pooled`."
        )
    return config


def leave_out(config: "RunConfig", without: Collection[str]) -> "RunConfig":
    """Return a new run without some of its clients.

    Args:
        config: The run.
        without: The names of the clients to leave out.

    Raises:
        CoterieError: The run has no such client, or no other clients.
    """
    names = {client.name for client in config.clients}
    if (unknown := set(without) - names) and not config.deployment.anyone:
        raise CoterieError(
            f"The run has no client {min(unknown)!r} (clients: {', '.join(sorted(names))})."
        )
    clients = tuple(client for client in config.clients if client.name not in without)
    if not clients:
        raise CoterieError("The run has no clients left: --without excludes all of them.")
    return config.model_copy(update={"clients": clients})


def check_start(config: "RunConfig", registered: Collection[str]) -> None:
    """Check that a new run has enough clients for its quorum, and that each client has a key.

    Args:
        config: The run.
        registered: The names of all clients that have a key with which they can connect to the
            server.

    Raises:
        CoterieError: The run has too few clients, or a client has no key.
    """
    quorum, count = config.deployment.quorum, len(config.clients)
    if quorum is not None and quorum > count and not config.deployment.anyone:
        raise CoterieError(
            f"deployment.quorum is {quorum}, but the run has only {plural(count, 'client')}."
        )
    for client in config.clients:
        if client.name not in registered:
            raise CoterieError(
                f"The client {client.name!r} has no key; create one with `coterie keys add "
                f"{client.name}`, or leave the client out with --without {client.name}."
            )


def load_agreed(path: Path, client: str) -> "RunConfig":
    """Read a client's copy of the server's run file.

    By providing this copy, the client agrees to the run that the file describes.
    """
    return load_deployment(read_values(path), [client])


def load_with_any_text(values: Mapping[str, Any]) -> "RunConfig":
    """Return a run in which every client that has no text gets the demo's text.

    The run file of a deployment need not say where the clients' texts are. With the demo's text in
    their place, the rest of this run file can be checked on any machine. If any client gets the
    demo's text, the settings that require structured records are removed, because the demo's text
    is plain.

    Args:
        values: The plain data of the run file.
    """
    filled = _with_text(values, str(DEMO_TEXT))
    if filled != values and isinstance(filled.get("data"), dict):
        for name, keys in RECORD_KEYS.items():
            if isinstance(section := filled.get(name), dict):
                filled[name] = {k: v for k, v in section.items() if k not in keys}
    return bind(validated(RunFile, filled))


def _with_text(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of a run file's data in which clients without a text get the text at `path`."""
    listed = values.get("clients")
    if not isinstance(listed, list):
        return dict(values)
    lacks_text = [isinstance(c, dict) and not {"path", "train"} & c.keys() for c in listed]
    clients = [
        {**client, "path": path} if lacking else client
        for client, lacking in zip(listed, lacks_text, strict=True)
    ]
    return {**values, "clients": clients}
