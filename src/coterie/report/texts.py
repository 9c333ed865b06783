"""Texts with every token coloured by the expert that its router scores highest.

Rows are texts, columns are clients' models (CoMiGS, figures 2, 14-19). Clients' texts are private,
so a report holds them only where it is asked for.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import first_experts
from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.tables import Table
from coterie.bases import Tokenizer, context_token
from coterie.config import parse
from coterie.data.files import read_text
from coterie.data.kinds.preferences import Pairs
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import Split
from coterie.errors import CoterieError
from coterie.federation import participants_of
from coterie.files import path_part
from coterie.inference.finished import load, tokenizer
from coterie.report.routing import PREFIX, expert_names, has_routers
from coterie.report.style import Canvas, LeftOut, Picture

LENGTH = 90
"""Tokens of each text, at most."""
TINTS = {
    "light": ("#ffd0a8", "#bcdcf5", "#bfe8d2", "#f3cbe5", "#f2e3a0", "#d9d2f5", "#d7dade"),
    "dark": ("#7d4213", "#1d4e79", "#17604a", "#74345c", "#665300", "#4b3c86", "#4a525d"),
}
"""Backgrounds by expert, on which the page's ink is read well; the first is the paper's orange."""


@dataclass(frozen=True)
class Coloured:
    """A text as one client's model routes it at one layer."""

    model_of: str
    text_of: str
    layer: str
    experts: Sequence[str]
    pieces: Sequence[tuple[str, int]]
    """Pieces of the text, each with its expert's number."""

    def shares(self) -> dict[str, float]:
        """The share of the pieces that goes to each expert."""
        chosen = [expert for _, expert in self.pieces]
        return {name: chosen.count(n) / len(chosen) for n, name in enumerate(self.experts)}


@dataclass(frozen=True, eq=False)
class TextPicture(Picture):
    """Texts by models, at one layer, which a page shows as text."""

    texts: Sequence[Coloured] = ()

    @property
    def rows(self) -> list[str]:
        """Whose texts."""
        return list(dict.fromkeys(one.text_of for one in self.texts))

    @property
    def columns(self) -> list[str]:
        """Whose models."""
        return list(dict.fromkeys(one.model_of for one in self.texts))

    @property
    def experts(self) -> Sequence[str]:
        """Of the client with the most."""
        return max((one.experts for one in self.texts), key=len)

    def cell(self, text_of: str, model_of: str) -> Coloured | None:
        """A text as a model routes it; None where the model cannot read it."""
        found = (t for t in self.texts if (t.text_of, t.model_of) == (text_of, model_of))
        return next(found, None)


def texts(
    experiment: Experiment, layer: str | None, folder: Path | None = None
) -> Iterator[TextPicture | LeftOut]:
    """For each label with routers, and each layer that is shown: all texts by all models.

    layer: "first", "middle", "last", or a number from 1; None is all three. folder: texts to show,
    NAME.txt, in place of the clients' test texts.
    """
    found = False
    for label, run in experiment.first:
        if not has_routers(run):
            continue
        found = True
        title = f"Experts of each token, {label}"
        try:
            coloured = list(_coloured(run, layer, folder))
        except CoterieError as error:
            yield LeftOut(title, str(error))
            continue
        if not coloured:
            yield LeftOut(title, "every client keeps the base as it came, which has no experts")
        for place in dict.fromkeys(one.layer for one in coloured):
            yield _picture(label, place, [one for one in coloured if one.layer == place])
    if not found:
        yield LeftOut("Experts of each token", "no run has routers over a fixed set of experts")


def _picture(label: str, place: str, coloured: Sequence[Coloured]) -> TextPicture:
    grid = TextPicture(
        f"texts-{path_part(label)}-{path_part(place)}",
        f"Experts of each token, {label}, {place}",
        f"The first {LENGTH} tokens (approximately) of each text, as each client's model reads "
        "them. The background colour shows the expert with the highest router score.",
        "Texts with coloured tokens, by the clients whose models read them.",
        lambda canvas: _draw(canvas, grid),
        _shares(place, coloured),
        texts=coloured,
    )
    return grid


def _shares(place: str, coloured: Sequence[Coloured]) -> Table:
    """A row per text, a column per model."""
    models = list(dict.fromkeys(one.model_of for one in coloured))
    rows: dict[str, dict[str, str]] = {}
    for one in coloured:
        share = sum(v for name, v in one.shares().items() if name.startswith("generalist"))
        if not any(name.startswith("generalist") for name in one.experts):
            share = one.shares()[one.experts[0]]
        rows.setdefault(one.text_of, {})[one.model_of] = f"{share:.0%}"
    return Table(
        f"Share of tokens whose first expert is a generalist, {place}",
        ["text", *models],
        [[name, *(cells.get(model, "") for model in models)] for name, cells in rows.items()],
        "Columns: whose model. Of clients without generalists, the share of expert 1.",
    )


def _coloured(run: ReportedRun, layer: str | None, folder: Path | None) -> Iterator[Coloured]:
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
                count = run.by_client(PREFIX + path).loc[client].iloc[-1].count()
                yield Coloured(
                    client,
                    text_of,
                    f"layer {number + 1} of {len(chosen)}",
                    expert_names(run, client, count),
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
    named = {"first": 0, "middle": (count - 1) // 2, "last": count - 1}
    if layer is None:
        return sorted(set(named.values()))
    if layer in named:
        return [named[layer]]
    if not (layer.isdecimal() and 1 <= int(layer) <= count):
        raise CoterieError(f"--layer takes first, middle, last, or a number from 1 to {count}.")
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


PANEL, SIDE = 2.6, 0.45
"""Inches of a panel's width, and of what stands left of all panels."""


def _draw(canvas: Canvas, grid: TextPicture) -> Figure:
    """As many panels as there are texts by models; wider than the page if there are many."""
    tints = TINTS[canvas.theme.name]
    across = int((PANEL - 0.15) / WIDE)
    laid = {(one.text_of, one.model_of): list(_lay_out(one.pieces, across)) for one in grid.texts}
    tall = {
        row: max(
            2 + max(cells[-1][0] for (text, _), cells in laid.items() if text == row and cells),
            ceil(0.09 * len(row) / HIGH) + 1,  # its name stands beside it, turned
        )
        for row in grid.rows
    }
    wide, high = SIDE + PANEL * len(grid.columns), HIGH * (sum(tall.values()) + 3)
    figure = canvas.figure(high)
    figure.set_figwidth(wide)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, wide)
    axis.set_ylim(high, -0.05)
    axis.axis("off")
    plain = {"va": "center", "fontsize": SIZE + 0.5, "weight": "bold", "parse_math": False}
    left = SIDE
    for n, name in enumerate(grid.experts):
        _cell(axis, 0, left, f" {name} ", tints[n % len(tints)])
        left += (len(name) + 4) * WIDE
    for n, model in enumerate(grid.columns):
        axis.text(SIDE + n * PANEL, 2 * HIGH, f"{model}'s model", **plain)
    top = 3 * HIGH
    for row in grid.rows:
        middle = top + (tall[row] - 1) * HIGH / 2
        axis.text(SIDE / 2, middle, row, rotation=90, ha="center", **plain)
        for n, model in enumerate(grid.columns):
            for line, column, text, expert in laid.get((row, model), ()):
                where = top + line * HIGH, SIDE + n * PANEL + column * WIDE
                _cell(axis, *where, text, tints[expert % len(tints)])
        top += tall[row] * HIGH
    return figure


def _cell(axis: Axes, top: float, left: float, text: str, tint: str) -> None:
    """Tinted text; top and left in inches."""
    wide, high = len(text) * WIDE, HIGH * 0.92
    axis.add_patch(Rectangle((left, top), wide, high, color=tint, lw=0))
    axis.text(
        left, top + HIGH / 2, text, va="center", fontsize=SIZE,
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
