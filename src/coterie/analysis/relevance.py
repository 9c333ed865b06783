"""How near clients' samples are to FedAMoLE's domain experts (arXiv 2411.19128, figure 8).

A point is one sample: its relevance to all domain experts of a layer, (E,), reduced to two
dimensions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.analysis.experiments import Experiment, ReportedRun, chosen_layers
from coterie.bases import load_skeleton
from coterie.config.run import RunConfig, parse
from coterie.data.split import AnyBatch, Split
from coterie.errors import CoterieError
from coterie.federation.participants import participants_of, server_context
from coterie.inference.finished import Loader, tokenizer
from coterie.messages import Message
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.fedamole.experts import expert_name
from coterie.methods.fedamole.method import FedAMoLE
from coterie.methods.fedamole.server import FedAMoLEServer
from coterie.runs import RunFolder
from coterie.training.embeddings import token_embeddings

SAMPLES = 200
"""Points of each client, at most."""
COMPONENTS = "the two principal components (scikit-learn is not installed)"


@dataclass(frozen=True)
class LayerRelevance:
    """Where the samples stand on one layer, and how many of its experts the clients get."""

    layer: str
    points: Mapping[str, np.ndarray]
    """By client: (samples, 2)."""
    reduced_by: str
    """How relevances became points."""
    experts: Mapping[str, int]
    """By client, of the round that would come next."""


def sample_relevance(
    experiment: Experiment, layer: str | None
) -> dict[str, Sequence[LayerRelevance] | CoterieError]:
    """Compute the relevance of samples for each label whose experts choose by it, or say why not.

    Args:
        experiment: the run with the first seed of each label is read.
        layer: "first", "middle", "last", or a number from 1; None is all three.
    """
    found: dict[str, Sequence[LayerRelevance] | CoterieError] = {}
    for label, run in experiment.first:
        method = parse(run.config).method
        if isinstance(method, FedAMoLE) and method.chooses:
            try:
                found[label] = _seen(run, layer)
            except CoterieError as error:
                found[label] = error
    return found


def _seen(run: ReportedRun, layer: str | None) -> list[LayerRelevance]:
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
    how = "t-SNE" if _tsne() else COMPONENTS
    seen = []
    for number in chosen_layers(layer, len(server.paths)):
        path = server.paths[number]
        vectors = {name: relevance_to(server, path, of[path]) for name, of in tokens.items()}
        experts = {name: len(held[path]) for name, held in server.assigned.items()}
        seen.append(LayerRelevance(path, in_the_plane(vectors, config.seed), how, experts))
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
    samples = train.samples(window, window + 1)
    count = len(samples)
    return samples.batch(torch.linspace(0, count - 1, min(SAMPLES, count)).round().long())


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
