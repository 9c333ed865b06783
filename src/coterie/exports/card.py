"""The model card of an exported folder: README.md with metadata that the hub reads.

The card contains no text of the training data and no path of this machine.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load

from coterie.bases import is_shipped
from coterie.errors import plural
from coterie.exports.format import Format
from coterie.exports.parity import Parity
from coterie.exports.source import Source
from coterie.federation.statements import protection
from coterie.methods.contract import SERVER

UNKNOWN = "unknown"
COUNTS = ("tokens", "bytes", "samples")
"""Entries of a client's scores that count test text."""


def model_card(source: Source, format: Format, parity: Parity | None, name: str) -> str:
    """Return the content of README.md for an exported folder.

    Args:
        source: The exported model.
        format: The format of the folder.
        parity: The comparison of the exported model with the trained model, if there was one.
        name: The folder's name, which the example uses.
    """
    config, base = source.config, source.public
    licence = licence_of(source)
    metadata: dict[str, Any] = {
        "license": licence,
        "library_name": format.library,
        "pipeline_tag": "text-generation",
        "tags": ["coterie", "federated-learning", config.label],
    }
    if "/" in base.name:
        metadata["base_model"] = base.name
    clients = plural(len(_clients(source)), "client")
    statements = [] if config.pooled else protection(config)
    facts = [
        f"- Method: `{config.label}`, with {clients} and {plural(config.rounds, 'round')}.",
        f"- Base: {base}; licence of the base: {licence}.",
        "- Training data: the clients' own texts, which this folder does not contain; each record "
        f"is {config.data.declared.summary}.",
        *(f"- {subject.capitalize()}: {text}." for subject, text in statements),
        f"- Exactness: {_exactness(parity)}",
        *(f"- {note}" for note in format.remarks(source)),
    ]
    paragraphs = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {name}",
        f"This folder contains {format.content}: {_owner(source)}, trained with Coterie, a "
        "library for federated fine-tuning of language models.",
        "\n".join(facts),
        *_scores(source),
        f"## Use\n\n```python\n{format.usage(source, name, base.name)}```",
    ]
    return "\n\n".join(paragraphs) + "\n"


def _owner(source: Source) -> str:
    if source.config.pooled:
        return "one model, trained on the texts of all clients together"
    return "the server's model" if source.client == SERVER else "the model of one client"


def _clients(source: Source) -> Collection[str]:
    """Return the names of the clients of the run, or of the clients whose texts were pooled."""
    scored = (source.folder.result or {}).get(source.config.method.reports, {})
    return scored if source.config.pooled else source.folder.description["clients"]


def _exactness(parity: Parity | None) -> str:
    """Return a sentence on the comparison with the trained model."""
    if parity is None:
        return "the outputs of this folder were not compared with those of the trained model."
    return (
        f"the largest difference between the logits of this folder, loaded with {parity.tool}, and "
        f"of the trained model is {parity.difference:.2g} on {parity.tokens} tokens, of logits up "
        f"to {parity.largest:.3g}."
    )


def _scores(source: Source) -> list[str]:
    """Return the section with the model's scores, or nothing if the model was not scored."""
    result = source.folder.result or {}
    if source.client == SERVER:
        scores = result.get("server", {})
    else:
        scores = result.get(source.config.method.reports, {}).get(source.client, {})
    values = {k: v for k, v in scores.items() if k not in COUNTS and v is not None}
    if not values:
        return []
    split = source.config.evaluation.split
    counts = ", ".join(f"{scores[name]:,} {name}" for name in COUNTS if scores.get(name))
    rows = [f"| {name} | {value:.4g} |" for name, value in values.items()]
    head = f"## Scores\n\nOn the owner's own {split} text ({counts}):"
    return ["\n".join([head, "", "| metric | value |", "| --- | --- |", *rows])]


def licence_of(source: Source) -> str:
    """Return the licence of the base as its model card names it, or "unknown"."""
    name = source.spec.name
    if is_shipped(name):
        return "apache-2.0"
    place = Path(source.place)
    card = place / "README.md"
    if not place.is_dir():
        cached = try_to_load_from_cache(name, "README.md", revision=source.spec.revision)
        card = Path(cached) if isinstance(cached, str) else card
    try:
        if card.is_file():
            return str((metadata_load(card) or {}).get("license") or UNKNOWN)
        if place.is_dir() or os.environ.get("HF_HUB_OFFLINE") == "1":
            return UNKNOWN
        data = HfApi().model_info(name, revision=source.spec.revision, timeout=10).card_data
        return str((data and data.get("license")) or UNKNOWN)
    except Exception:  # neither a damaged card nor the network must stop the export
        return UNKNOWN
