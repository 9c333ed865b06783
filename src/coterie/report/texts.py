"""Clients' texts with every token coloured by the expert that its router scores highest.

This shows private text, so a report holds it only where it is asked for (CoMiGS, figures 2, 14-19).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import first_experts
from coterie.bases import Tokenizer, context_token
from coterie.config import parse
from coterie.data.pairs import Pairs
from coterie.data.tokens import Split, Tokens
from coterie.engines.finished import load, tokenizer
from coterie.errors import CoterieError
from coterie.federation import participants_of
from coterie.files import path_part
from coterie.report.routing import PREFIX, expert_names, has_routers
from coterie.report.style import Canvas, LeftOut, Picture
from coterie.results.experiments import Experiment, ReportedRun

LENGTH = 120
"""Tokens of each text, at most."""
TINTS = {
    "light": ("#bcdcf5", "#ffd0a8", "#bfe8d2", "#f3cbe5", "#f2e3a0", "#d9d2f5", "#d7dade"),
    "dark": ("#1d4e79", "#7d4213", "#17604a", "#74345c", "#665300", "#4b3c86", "#4a525d"),
}
"""Backgrounds by expert, on which the page's ink is read well."""


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
    def title(self) -> str:
        """Whose text, read by whose model, and where."""
        whose = "its own" if self.model_of == self.text_of else f"{self.text_of}'s"
        return f"{self.model_of}'s model on {whose} test text, {self.layer}"

    def shares(self) -> dict[str, float]:
        """The share of the pieces that goes to each expert."""
        chosen = [expert for _, expert in self.pieces]
        return {name: chosen.count(n) / len(chosen) for n, name in enumerate(self.experts)}


@dataclass(frozen=True, eq=False)
class TextPicture(Picture):
    """Coloured texts, which a page shows as text."""

    texts: Sequence[Coloured] = ()


def texts(experiment: Experiment, layer: str | None) -> Iterator[TextPicture | LeftOut]:
    """For each label with routers: every client's own text, and its model on another client's.

    layer: "first", "last", or a number from 1; None is first and last.
    """
    found = False
    for label, run in experiment.first:
        if not has_routers(run):
            continue
        found = True
        title = f"Experts of each token, {label}"
        try:
            coloured = list(_coloured(run, layer))
        except CoterieError as error:
            yield LeftOut(title, str(error))
            continue
        if not coloured:
            yield LeftOut(title, "every client keeps the base as it came, which has no experts")
        for client in dict.fromkeys(one.model_of for one in coloured):
            yield _picture(label, client, [one for one in coloured if one.model_of == client])
    if not found:
        yield LeftOut("Experts of each token", "no run has routers over a fixed set of experts")


def _picture(label: str, client: str, coloured: Sequence[Coloured]) -> TextPicture:
    return TextPicture(
        f"texts-{path_part(label)}-{path_part(client)}",
        f"Experts of each token, {label}, {client}",
        f"The first {LENGTH} tokens (approximately) of test texts. The background colour "
        "shows the expert with the highest router score.",
        "Test texts with coloured tokens.",
        lambda canvas: _draw(canvas, coloured),
        texts=coloured,
    )


def _coloured(run: ReportedRun, layer: str | None) -> Iterator[Coloured]:
    if run.result is None:
        raise CoterieError("The run is not finished.")
    config = parse(run.config)
    participants = participants_of(config, tokenizer(run.path))
    tests = {one.name: one.data.test for one in participants}
    for client in tests:
        model, encoder = load(run.path, client), tokenizer(run.path, client)
        # Another's text is in this model's tokens only if it was made with the same base.
        alike = [name for name in tests if config.base_of(name) == config.base_of(client)]
        for text_of in dict.fromkeys((client, alike[(alike.index(client) + 1) % len(alike)])):
            ids, chosen = _read(model, _beginning(tests[text_of], context_token(encoder)))
            if not chosen:  # it keeps the base as it came, which has no experts
                break
            for number in chosen_layers(layer, len(chosen)):
                path = list(chosen)[number]
                count = run.by_client(PREFIX + path).loc[client].iloc[-1].count()
                yield Coloured(
                    client,
                    text_of,
                    f"layer {number + 1} of {len(chosen)}",
                    expert_names(run, client, count),
                    list(_pieces(encoder, ids.tolist(), chosen[path].tolist())),
                )


def _beginning(text: Split, context: int) -> list[Tensor]:
    """The first LENGTH tokens of a text, as the model reads them: after a token that begins it.

    Prompts with their answers (of pairs, the chosen ones) are read one by one, as in training.
    """
    if isinstance(text, Tokens):
        return [torch.cat([torch.tensor([context]), text.ids[:LENGTH].long()])]
    text = text.chosen if isinstance(text, Pairs) else text
    found, left = [], LENGTH
    for start, end in pairwise(text.starts.tolist()):
        if left > 0:
            found.append(text.ids[start:end][: left + 1].long())
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


def chosen_layers(layer: str | None, count: int) -> list[int]:
    """Which of so many layers are shown, from 0; raises CoterieError if there is no such layer."""
    if not count:
        return []  # a client with one expert has no router
    if layer is None:
        return sorted({0, count - 1})
    if layer in ("first", "last"):
        return [0 if layer == "first" else count - 1]
    if not (layer.isdecimal() and 1 <= int(layer) <= count):
        raise CoterieError(f"--layer takes first, last, or a number from 1 to {count}.")
    return [int(layer) - 1]


def _pieces(encoder: Tokenizer, ids: list[int], experts: list[int]) -> Iterator[tuple[str, int]]:
    """Each token's text and expert; tokens that only together are a character are one piece."""
    shown = 0
    for end, expert in enumerate(experts, 1):
        text = str(encoder.decode(ids[:end], clean_up_tokenization_spaces=False))
        if not text.endswith("\ufffd") or end == len(experts):
            yield text[shown:], expert
            shown = len(text)


SIZE = 8.5
"""Points of the type in a picture of texts."""
WIDE = 0.602 * SIZE / 72
"""Inches of a character of DejaVu Sans Mono."""
HIGH = 1.65 * SIZE / 72
"""Inches from line to line."""


def _draw(canvas: Canvas, coloured: Sequence[Coloured]) -> Figure:
    tints = TINTS[canvas.theme.name]
    across = int((canvas.width - 0.3) / WIDE)
    laid = [list(_lay_out(one.pieces, across)) for one in coloured]
    lines = sum(cells[-1][0] + 4 for cells in laid if cells)
    figure = canvas.figure(lines * HIGH + 0.1)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(-0.15, canvas.width - 0.15)
    axis.set_ylim(lines * HIGH, -0.1)
    axis.axis("off")
    row = 0
    for one, cells in zip(coloured, laid, strict=True):
        plain = {"va": "center", "fontsize": SIZE + 0.5, "parse_math": False}
        axis.text(0, (row + 0.5) * HIGH, one.title, weight="bold", **plain)
        left = 0.0
        for n, (name, share) in enumerate(one.shares().items()):
            word = f" {name} {share:.0%} "
            _cell(axis, row + 1.2, left, word, tints[n % len(tints)])
            left += len(word) + 2
        for line, column, text, expert in cells:
            _cell(axis, row + 2.5 + line, column, text, tints[expert % len(tints)])
        row += cells[-1][0] + 4
    return figure


def _cell(axis: Axes, row: float, column: float, text: str, tint: str) -> None:
    place = column * WIDE, row * HIGH
    axis.add_patch(Rectangle(place, len(text) * WIDE, HIGH * 0.92, color=tint, lw=0))
    axis.text(
        place[0], place[1] + HIGH / 2, text, va="center", fontsize=SIZE,
        family="DejaVu Sans Mono", parse_math=False,
    )  # fmt: skip


def _lay_out(pieces: Iterable[tuple[str, int]], across: int) -> Iterator[tuple[int, int, str, int]]:
    """Line, column, text and expert of every cell of a text that is `across` characters wide."""
    line = column = 0
    for piece, expert in pieces:
        for text in piece.replace("\t", " ").replace("\n", "↵\n").splitlines(keepends=True):
            word = text.rstrip("\n")
            if column and column + len(word) > across:
                line, column = line + 1, 0
            yield line, column, word, expert
            column += len(word)
            if text.endswith("\n"):
                line, column = line + 1, 0
