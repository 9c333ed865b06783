"""Texts routed by clients' models: each token with the expert that the router scores highest."""

from collections.abc import Iterator, Mapping, Sequence
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
from coterie.data.files import read_text
from coterie.data.split import Split
from coterie.errors import CoterieError
from coterie.federation.participants import gathered
from coterie.inference.finished import load, parse_recorded, tokenizer
from coterie.messages.names import ROUTING
from coterie.runs import RunFolder

LENGTH = 90
"""The maximum number of tokens per text."""


@dataclass(frozen=True)
class Coloured:
    """A text and, for each token, the expert chosen by one client's router at one layer.

    `model_of` is the name of the client whose model has the router. `text_of` is the name of the
    text.
    """

    model_of: str
    text_of: str
    layer: str
    experts: Sequence[str]
    pieces: Sequence[tuple[str, int]]
    """The pieces of the text (single or merged tokens), each with the index of its expert."""

    @property
    def generalists(self) -> float:
        """The share of the text's pieces (see `pieces`) that are routed to generalists.

        If there is no generalist, this is the share of pieces that are routed to the first expert.
        """
        numbers = [n for n, name in enumerate(self.experts) if name.startswith("generalist")] or [0]
        return fmean(expert in numbers for _, expert in self.pieces)


ColouredTexts = Mapping[str, Sequence[Coloured] | CoterieError]
"""For each label, the routed texts, or an error that says why no text was routed."""


def coloured_texts(
    experiment: Experiment, layer: str | None, folder: Path | None = None
) -> ColouredTexts:
    """Find the expert that every client's model chooses for each token of some texts.

    This is done for each label (method and settings) whose runs have routers. The texts are the
    clients' test texts, unless `folder` is given. A client's test text is routed only through
    models with this client's base, because another base may have another tokenizer.

    Args:
        experiment: The runs. For each label, only the run with the smallest seed is read.
        layer: "first", "middle", "last", or the number of a layer, counted from 1. None selects the
            first, the middle and the last layer.
        folder: A folder of files NAME.txt that are routed instead of the clients' test texts.

    Returns:
        For each label whose runs have routers, the routed texts, or an error that explains why no
        text was routed.
    """
    results: dict[str, Sequence[Coloured] | CoterieError] = {}
    for label, run in experiment.first:
        if run.has_routers:
            try:
                results[label] = list(_colour(run, layer, folder))
            except CoterieError as error:
                results[label] = error
    return results


def _colour(run: ReportedRun, layer: str | None, folder: Path | None) -> Iterator[Coloured]:
    if run.result is None:
        raise CoterieError("The run is not finished.")
    config = parse_recorded(RunFolder(run.path), {})
    participants = gathered(config, tokenizer(run.path)).clients if folder is None else []
    tests = {participant.name: participant.data.test for participant in participants}
    for client in sorted(run.clients):
        model, encoder = load(run.path, client), tokenizer(run.path, client)
        context = context_token(encoder)
        if folder is None:  # other bases may have other tokenizers
            alike = [n for n in tests if config.base_of(n) == config.base_of(client)]
            shown = {name: _beginning(tests[name], context) for name in alike}
        else:
            shown = _of_folder(folder, encoder, context)
        for text_of, beginning in shown.items():
            ids, chosen = _read(model, beginning)
            if not chosen:  # one expert, or the untrained base: there is no router
                break
            for number in chosen_layers(layer, len(chosen)):
                path = list(chosen)[number]
                count = run.by_client(ROUTING + path).loc[client].iloc[-1].count()
                title = f"layer {number + 1} of {len(chosen)}"
                names = run.expert_names(client, count)
                pieces = list(_pieces(encoder, ids.tolist(), chosen[path].tolist()))
                yield Coloured(client, text_of, title, names, pieces)


def _of_folder(folder: Path, encoder: Tokenizer, context: int) -> dict[str, list[Tensor]]:
    """Return the first LENGTH tokens of every .txt file in a folder.

    Args:
        folder: The folder.
        encoder: The tokenizer of the model that will route the texts.
        context: The id of the token that precedes every text.

    Returns:
        A mapping from the name of each file, without `.txt`, to a list with one sequence of token
        ids.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise CoterieError(f"{folder} has no .txt files; give a folder with one text per file.")
    beginnings = {}
    for file in files:
        ids = encoder.encode(read_text(file, "--texts-from"), add_special_tokens=False)[:LENGTH]
        beginnings[file.stem] = [torch.tensor([context, *ids])]
    return beginnings


def _beginning(text: Split, context: int) -> list[Tensor]:
    """Return the first LENGTH tokens of a text as a list of sequences of token ids.

    Plain text is one sequence. If the text consists of samples, each sample is a sequence of its
    own, as in training. For a preference pair, the sample is the prompt with the chosen answer.
    The first token of each sequence does not count towards LENGTH. It is the context token or, in a
    conversation, the first token of the chat template's output.
    """
    samples = text.beginnings
    if samples is None:
        return [torch.cat([torch.tensor([context]), text.ids[:LENGTH].long()])]
    sequences, remaining = [], LENGTH
    for start, end in pairwise(samples.starts.tolist()):
        if remaining > 0:
            sequences.append(samples.ids[start:end][: remaining + 1].long())
            remaining -= len(sequences[-1]) - 1
    return sequences


@torch.no_grad()
def _read(model: PreTrainedModel, texts: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a model on texts, and return the tokens with their highest-scoring experts.

    The first token of every text is the context token, which is omitted from the returned tokens.

    Returns:
        The token ids of all texts, and a mapping from each layer's path to the index of every
        token's expert. Ids and indices are shaped (tokens,).
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", LENGTH + 1)
    ids, chosen = [], []
    for text in texts:
        tokens = text[:longest]
        model(input_ids=tokens[None].to(model.device), use_cache=False)
        ids.append(tokens[1:])
        chosen.append({path: experts[1:].cpu() for path, experts in first_experts(model).items()})
    layers = {path: torch.cat([experts[path] for experts in chosen]) for path in chosen[0]}
    return torch.cat(ids), layers


def _pieces(encoder: Tokenizer, ids: list[int], experts: list[int]) -> Iterator[tuple[str, int]]:
    """Yield the pieces of a text, each with the index of an expert.

    A piece is usually the text of one token. However, if a character is split over several tokens,
    these tokens form one piece, with the expert of the last of these tokens.
    """
    shown = 0
    for end, expert in enumerate(experts, 1):
        text = str(encoder.decode(ids[:end], clean_up_tokenization_spaces=False))
        if not text.endswith("\ufffd") or end == len(experts):
            yield text[shown:], expert
            shown = len(text)
