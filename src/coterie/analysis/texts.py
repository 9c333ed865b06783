"""Texts as clients' models route them: each token with the expert that its router ranks first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import first_experts
from coterie.analysis.experiments import Experiment, ReportedRun, chosen_layers
from coterie.bases import Tokenizer, context_token
from coterie.config.run import parse
from coterie.data.files import read_text
from coterie.data.split import Split
from coterie.errors import CoterieError
from coterie.federation.participants import participants_of
from coterie.inference.finished import load, tokenizer
from coterie.messages.names import ROUTING

LENGTH = 90
"""Tokens of each text, at most."""


@dataclass(frozen=True)
class Coloured:
    """A text as one client's model routes it at one layer."""

    model_of: str
    text_of: str
    layer: str
    experts: Sequence[str]
    pieces: Sequence[tuple[str, int]]
    """Pieces of the text, each with its expert's number."""

    @property
    def generalists(self) -> float:
        """The share of the pieces that goes to generalists, or to expert 1 if there are none."""
        asked = [n for n, name in enumerate(self.experts) if name.startswith("generalist")] or [0]
        return fmean(expert in asked for _, expert in self.pieces)


def coloured_texts(
    experiment: Experiment, layer: str | None, folder: Path | None = None
) -> dict[str, Sequence[Coloured] | CoterieError]:
    """Route all texts by all models, for each label with routers; an error says why there is none.

    Args:
        experiment: the run with the first seed of each label is read.
        layer: "first", "middle", "last", or a number from 1; None is all three.
        folder: texts to read, NAME.txt, in place of the clients' test texts.
    """
    found: dict[str, Sequence[Coloured] | CoterieError] = {}
    for label, run in experiment.first:
        if run.has_routers:
            try:
                found[label] = list(_colour(run, layer, folder))
            except CoterieError as error:
                found[label] = error
    return found


def _colour(run: ReportedRun, layer: str | None, folder: Path | None) -> Iterator[Coloured]:
    if run.result is None:
        raise CoterieError("The run is not finished.")
    config = parse(run.config)
    participants = participants_of(config, tokenizer(run.path)) if folder is None else []
    tests = {one.name: one.data.test for one in participants}
    for client in sorted(run.clients):
        model, encoder = load(run.path, client), tokenizer(run.path, client)
        context = context_token(encoder)
        if folder is None:  # another's text is in this model's tokens only if the base is the same
            base = config.base_of(client)
            shown = {
                n: _beginning(t, context) for n, t in tests.items() if config.base_of(n) == base
            }
        else:
            shown = _of_folder(folder, encoder, context)
        for text_of, beginning in shown.items():
            ids, chosen = _read(model, beginning)
            if not chosen:  # no router: one expert, or the base as it came
                break
            for number in chosen_layers(layer, len(chosen)):
                path = list(chosen)[number]
                count = run.by_client(ROUTING + path).loc[client].iloc[-1].count()
                yield Coloured(
                    client,
                    text_of,
                    f"layer {number + 1} of {len(chosen)}",
                    run.expert_names(client, count),
                    list(_pieces(encoder, ids.tolist(), chosen[path].tolist())),
                )


def _of_folder(folder: Path, encoder: Tokenizer, context: int) -> dict[str, list[Tensor]]:
    """The beginnings of the .txt files of a folder, in a model's tokens."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise CoterieError(f"{folder} has no .txt files; give a folder with a text per file.")
    found = {}
    for file in files:
        ids = encoder.encode(read_text(file, "--texts-from"), add_special_tokens=False)[:LENGTH]
        found[file.stem] = [torch.tensor([context, *ids])]
    return found


def _beginning(text: Split, context: int) -> list[Tensor]:
    """The first LENGTH tokens of a text, as the model reads them: after a token that begins it.

    Prompts with their answers (of pairs, the chosen ones) are read one by one, as in training.
    """
    samples = text.beginnings
    if samples is None:
        return [torch.cat([torch.tensor([context]), text.ids[:LENGTH].long()])]
    found, left = [], LENGTH
    for start, end in pairwise(samples.starts.tolist()):
        if left > 0:
            found.append(samples.ids[start:end][: left + 1].long())
            left -= len(found[-1]) - 1
    return found


@torch.no_grad()
def _read(model: PreTrainedModel, texts: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """All texts' tokens, their first ones left out, and the best-scored expert of each by layer."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", LENGTH + 1)
    ids, chosen = [], []
    for text in texts:
        read = text[:longest]
        model(input_ids=read[None].to(model.device), use_cache=False)
        ids.append(read[1:])
        chosen.append({path: experts[1:].cpu() for path, experts in first_experts(model).items()})
    return torch.cat(ids), {path: torch.cat([one[path] for one in chosen]) for path in chosen[0]}


def _pieces(encoder: Tokenizer, ids: list[int], experts: list[int]) -> Iterator[tuple[str, int]]:
    """Each token's text and expert; tokens that only together are a character are one piece."""
    shown = 0
    for end, expert in enumerate(experts, 1):
        text = str(encoder.decode(ids[:end], clean_up_tokenization_spaces=False))
        if not text.endswith("\ufffd") or end == len(experts):
            yield text[shown:], expert
            shown = len(text)
