"""Settings with which a client of a run fits into the memory of a GPU."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

import yaml

from coterie.analysis.need import Need, need_from
from coterie.analysis.shapes import Shapes, shapes_of
from coterie.analysis.tables import Table
from coterie.bases import load_skeleton
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.training.context import ClientId

Weights = Literal["bf16", "int8", "nf4"]
UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
WINDOW = 1024
"""The window in tokens for which settings are found if only a base is given."""
CONTEXT = 2**30
"""The memory of a device that is set aside for libraries and a GPU's context, in bytes."""
SPARE = 0.1
"""The share of the remaining memory that is set aside for fragmentation."""
MARGIN = "1 GiB for CUDA and its libraries, and 10 % of the rest for fragmentation, are set aside."


def parsed_size(text: str) -> int:
    """Return the number of bytes of a size such as `24GB` (24 x 10^9 bytes) or `24GiB`.

    Raises:
        CoterieError: If the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)", text.strip(), re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise CoterieError(f"--fit {text}: {text!r} is not a size; give a size such as 24GB.")
    return int(float(match[1]) * unit)


def with_longest_window(config: RunConfig, most: int = WINDOW) -> RunConfig:
    """Return a run with windows of `most` tokens, but at most of the base's context length."""
    text: Any = load_skeleton(config.base, config.root).config.get_text_config()
    window = min(most, getattr(text, "max_position_embeddings", None) or most)
    return config.model_copy(update={"data": config.data.model_copy(update={"window": window})})


@dataclass(frozen=True)
class Candidate:
    """Settings of a run, and what a client needs with them."""

    config: RunConfig
    need: Need
    fits: bool


def fitting(config: RunConfig, client: ClientId, size: int) -> tuple[Table, str]:
    """Find the settings with which a client fits on a GPU.

    The base's weights are quantised, and activations are recomputed, only if nothing else fits.
    The numbers of samples at once are as large as possible. The window and `training.batch` do not
    change.

    Args:
        config: The run.
        client: The client's name.
        size: The memory of the GPU in bytes.

    Returns:
        A table of candidates, and the lines of a run file with the first one that fits.

    Raises:
        CoterieError: If the needs are unknown, or if nothing fits.
    """
    shapes = shapes_of(_with(config, client, "bf16", False), client)
    if shapes is None:
        raise CoterieError(
            f"There is no estimate for the method {config.method.name!r} with the base "
            f"{config.base_of(client).name}; choose another method or base, or omit --fit."
        )
    candidates = [*_candidates(config, client, shapes, get_args(Weights), size, "cuda")]
    best = _first(candidates, client, size)
    return _table(config, client, candidates, size), _lines(best.config, client)


def fitted(config: RunConfig, client: ClientId, size: int, device: str) -> RunConfig | None:
    """Return a run with as few changed settings as a client needs to fit into memory.

    The run's own format of the weights comes first, then the formats that `fitting` tries, as far
    as this machine can load them.

    Args:
        config: The run.
        client: The client's name.
        size: The memory of the device in bytes.
        device: The type of the device, such as `cuda`.

    Returns:
        The run with the first settings that fit, or None if the needs are unknown.

    Raises:
        CoterieError: If nothing fits.
    """
    formats = get_args(Weights) if find_spec("bitsandbytes") else ("bf16",)
    candidates: list[Candidate] = []
    for kinds in ((None,), formats):
        shapes = shapes_of(_with(config, client, kinds[0], False), client)
        if shapes is None:
            return None
        candidates += _candidates(config, client, shapes, kinds, size, device)
        if any(candidate.fits for candidate in candidates):
            break
    return _first(candidates, client, size).config


def _candidates(
    config: RunConfig,
    client: ClientId,
    shapes: Shapes,
    kinds: Sequence[Weights | None],
    size: int,
    device: str,
) -> Iterator[Candidate]:
    """Yield the largest candidate in each format, without and with checkpointing."""
    for kind in kinds:
        for checkpointing in (False, True):
            run = _with(config, client, kind, checkpointing)
            yield _largest(run, shapes, (size - CONTEXT) * (1 - SPARE), device)


def _first(candidates: Sequence[Candidate], client: ClientId, size: int) -> Candidate:
    """Return the first candidate that fits.

    Raises:
        CoterieError: If nothing fits.
    """
    best = next((candidate for candidate in candidates if candidate.fits), None)
    if best is not None:
        return best
    least = min(candidates, key=lambda candidate: candidate.need.memory)
    needed = least.need.memory / (1 - SPARE) + CONTEXT
    config = least.config
    raise CoterieError(
        f"Nothing fits {size / 1e9:,.1f} GB: a client of {config.label} on "
        f"{config.base_of(client).name} needs at least {needed / 1e9:,.1f} GB, in "
        f"{config.base_of(client).weights or 'its own format'} with one sample at once and "
        f"windows of {config.data.window} tokens. Choose a smaller base, or a smaller data.window."
    )


def _with(
    config: RunConfig, client: ClientId, weights: Weights | None, checkpointing: bool
) -> RunConfig:
    """Return a run with or without checkpointing, and with other weights of the client's base.

    Args:
        config: The run.
        client: The client's name.
        weights: The format of the weights; None keeps the run's own format and precision.
        checkpointing: Whether to recompute activations.
    """
    base = config.base_of(client)
    changes: dict[str, Any] = {"checkpointing": checkpointing}
    if weights is not None:
        base = base.model_copy(update={"weights": weights})
        changes["precision"] = "bf16"
    if checkpointing:
        changes["store_activations"] = False
    bases = {name: base if name == client else spec for name, spec in config.bases.items()}
    training = config.training.model_copy(update=changes)
    return config.model_copy(update={"base": base, "bases": bases, "training": training})


def _largest(config: RunConfig, shapes: Shapes, available: float, device: str) -> Candidate:
    """Return a candidate with the largest numbers of samples at once that fit.

    If nothing fits, the numbers of samples at once are 1.
    """
    for count in _halved(config.evaluation.batch):
        evaluation = config.evaluation.model_copy(update={"batch": count})
        config = config.model_copy(update={"evaluation": evaluation})
        need = need_from(shapes, config, device)
        if need.memory - need.work + need.scoring <= available:
            break
    candidate = config
    for count in _halved(config.training.batch):
        training = config.training.model_copy(update={"micro_batch": count})
        candidate = config.model_copy(update={"training": training})
        if need_from(shapes, candidate, device).memory <= available:
            break
    need = need_from(shapes, candidate, device)
    return Candidate(candidate, need, need.memory <= available)


def _halved(count: int) -> Iterator[int]:
    """Yield a number, and the powers of two below it in descending order."""
    yield count
    for exponent in reversed(range((count - 1).bit_length())):
        yield 2**exponent


def _table(config: RunConfig, client: ClientId, candidates: list[Candidate], size: int) -> Table:
    """Return a table of the candidates."""
    rows = [
        (
            str(c.config.base_of(client).weights),
            "yes" if c.config.training.checkpointing else "no",
            str(c.config.training.micro_batch) if c.fits else "-",
            str(c.config.evaluation.batch) if c.fits else "-",
            f"{(c.need.memory / (1 - SPARE) + CONTEXT) / 1e9:,.1f}",
            "yes" if c.fits else "no",
        )
        for c in candidates
    ]
    title = f"{config.label} on {config.base_of(client).name} with {size / 1e9:,.1f} GB"
    columns = ("weights", "checkpointing", "micro_batch", "evaluation.batch", "memory (GB)", "fits")
    note = f"Computed for windows of {config.data.window} tokens. {MARGIN}"
    return Table(title, columns, rows, note)


def _lines(config: RunConfig, client: ClientId) -> str:
    """Format a run's memory settings as lines of a run file."""
    spec, keys = config.base_of(client), ("batch", "micro_batch", "checkpointing")
    sections = {
        "base": {"name": spec.name, "weights": spec.weights},
        "data": {"window": config.data.window},
        "training": {key: getattr(config.training, key) for key in keys},
        "evaluation": {"batch": config.evaluation.batch},
    }
    return yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=1000)
