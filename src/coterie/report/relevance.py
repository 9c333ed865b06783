"""How near clients' samples are to the domain experts, beside how many experts each client gets.

FedAMoLE (arXiv 2411.19128), figure 8: a point is one sample, that is its relevance to all domain
experts of a layer, (E,), reduced to two dimensions. A point tells something of a private sample, so
a report holds it only where it is asked for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.tables import Table, listed
from coterie.bases import load_skeleton
from coterie.config import RunConfig, parse
from coterie.data.batch import Batch
from coterie.data.kinds.preferences import AnyBatch
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import Split
from coterie.errors import CoterieError
from coterie.federation import participants_of, server_context
from coterie.files import path_part
from coterie.inference.finished import Loader, tokenizer
from coterie.messages import Message
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.fedamole.experts import expert_name
from coterie.methods.fedamole.method import FedAMoLE
from coterie.methods.fedamole.server import FedAMoLEServer
from coterie.report.style import MARKERS, Canvas, LeftOut, Picture
from coterie.report.texts import chosen_layers
from coterie.runs import RunFolder
from coterie.training.embeddings import token_embeddings

SAMPLES = 200
"""Points of each client, at most."""
TITLE = "Samples and experts"


@dataclass(frozen=True)
class Seen:
    """One layer: where the samples stand, and how many experts the clients get."""

    layer: str
    points: Mapping[str, np.ndarray]
    """By client: (samples, 2)."""
    experts: Mapping[str, int]
    """By client, of the round that would come next."""


def relevance(experiment: Experiment, layer: str | None) -> Iterator[Picture | LeftOut]:
    """A picture for each label whose experts choose by relevance, of the run with the first seed.

    layer: "first", "last", or a number from 1; None is first, middle and last.
    """
    found = False
    for label, run in experiment.first:
        method = parse(run.config).method
        if not (isinstance(method, FedAMoLE) and method.chooses):
            continue
        found = True
        try:
            yield _picture(label, _seen(run, layer))
        except CoterieError as error:
            yield LeftOut(f"{TITLE}, {label}", str(error))
    if not found:
        yield LeftOut(TITLE, "no run uses a method whose experts choose clients by relevance")


def _seen(run: ReportedRun, layer: str | None) -> list[Seen]:
    if run.result is None:
        raise CoterieError("The run is not finished.")
    config, folder, loader = parse(run.config), RunFolder(run.path), Loader()
    server, tokens = _server(config, folder), {}
    for one in participants_of(config, tokenizer(run.path)):
        base, side = loader.side(folder, config, one.name)
        assert isinstance(side, FedAMoLEClient), "only FedAMoLE's clients are asked"
        samples = some_of(one.data.train, config.data.window)
        at_once = config.training.at_once
        tokens[one.name] = token_embeddings(base, side.adapter, samples, at_once)
    seen = []
    for number in chosen_layers(layer, len(server.paths)):
        path = server.paths[number]
        vectors = {name: relevance_to(server, path, of[path]) for name, of in tokens.items()}
        experts = {name: len(held[path]) for name, held in server.assigned.items()}
        seen.append(Seen(path, in_the_plane(vectors, config.seed), experts))
    return seen


def _server(config: RunConfig, folder: RunFolder) -> FedAMoLEServer:
    """As the last round left it, with the experts assigned for the next."""
    names = sorted(folder.description["clients"])
    skeleton = load_skeleton(config.base, config.root)
    context = server_context(config, skeleton, names, None, lambda name, value: None)
    server = config.method.server(context)
    assert isinstance(server, FedAMoLEServer), "only FedAMoLE's server is asked"
    for name in names:
        server.join(name, Message(0))
    server.restore(folder.load("server"))
    return server


def some_of(train: Split, window: int) -> AnyBatch:
    """Samples evenly spaced over a text, SAMPLES at most; of a stream, pieces of window + 1."""
    pieces = train.ids.unfold(0, window + 1, window + 1) if isinstance(train, Tokens) else train
    count = len(pieces)
    places = torch.linspace(0, count - 1, min(SAMPLES, count)).round().long()
    return Batch(pieces[places].long()) if isinstance(pieces, Tensor) else pieces.batch(places)


def relevance_to(server: FedAMoLEServer, path: str, tokens: Tensor) -> np.ndarray:
    """Equation 20: (samples, experts) of samples' token embeddings, (samples, r).

    Experts that nobody has held yet have no embedding, and are left out.
    """
    names = (expert_name(path, j) for j in range(server.experts))
    means = [server.expert_means[name] for name in names if name in server.expert_means]
    if not means:
        raise CoterieError("No expert has been held by a client yet.")
    return (tokens @ torch.stack(means).T / server.relevance_dim(path) ** 0.5).double().numpy()


def in_the_plane(vectors: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """All clients' vectors, (samples, experts), reduced together: (samples, 2)."""
    every = np.concatenate(list(vectors.values()))
    ends = np.cumsum([len(rows) for rows in vectors.values()])[:-1]
    return dict(zip(vectors, np.split(_reduced(every, seed), ends), strict=True))


def _reduced(rows: np.ndarray, seed: int) -> np.ndarray:
    """By t-SNE; without scikit-learn, the two principal components."""
    tsne = _tsne()
    if tsne is not None and len(rows) > 3 and rows.shape[1] > 1:
        perplexity = min(30.0, (len(rows) - 1) / 3)
        return tsne(2, perplexity=perplexity, random_state=seed, init="pca").fit_transform(rows)
    centred = torch.from_numpy(rows - rows.mean(0))
    left, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    two = (left * sizes)[:, :2].numpy()
    return np.pad(two, ((0, 0), (0, 2 - two.shape[1])))


def _tsne() -> Callable[..., Any] | None:
    """The class, or None where scikit-learn, which is no dependency, is not installed."""
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError:
        return None
    return TSNE


def _picture(label: str, seen: Sequence[Seen]) -> Picture:
    clients = list(seen[0].points)
    how = "t-SNE" if _tsne() else "the two principal components (scikit-learn is not installed)"

    def draw(canvas: Canvas) -> Figure:
        across = 1 if canvas.narrow else 2
        figure, axes = canvas.panels(2 * len(seen), 3.4, across)
        colours = canvas.theme.colours[2:]
        for n, one in enumerate(seen):
            points, bars = axes[2 * n : 2 * n + 2]
            for i, (client, at) in enumerate(one.points.items()):
                points.scatter(
                    *at.T, s=9, color=colours[i % len(colours)], linewidths=0, alpha=0.75,
                    marker=MARKERS[i // len(colours) % len(MARKERS)], label=client,
                )  # fmt: skip
            points.set_title(one.layer, loc="left", fontsize=9)
            points.set_xticks([])
            points.set_yticks([])
            given = [one.experts.get(client, 0) for client in clients]
            bars.barh(range(len(clients)), given, color=[
                colours[i % len(colours)] for i in range(len(clients))
            ])  # fmt: skip
            bars.set_yticks(range(len(clients)), clients)
            bars.invert_yaxis()
            bars.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            bars.set_title("experts in the next round", loc="left", fontsize=9)
        canvas.legend(figure, axes[0], max(map(len, clients)))
        return figure

    rows = [[client, *(str(one.experts.get(client, 0)) for one in seen)] for client in clients]
    return Picture(
        f"relevance-{path_part(label)}",
        f"{TITLE}, {label}",
        f"A point is one training sample, by its relevance to all domain experts of the layer "
        f"(equation 20), reduced by {how}; up to {SAMPLES} samples per client, with the experts as "
        "the last round left them. Bars: experts that would choose the client for the next round. "
        "First seed only.",
        f"Scatter plots of samples of {listed(clients)}, and bar charts of their numbers of "
        "experts; the table has these.",
        draw,
        Table("Experts in the next round", ["client", *(one.layer for one in seen)], rows),
    )
