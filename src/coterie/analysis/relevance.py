"""Relevance of clients' samples to FedAMoLE's domain experts (arXiv 2411.19128, figure 8).

A sample's relevance to the domain experts of a layer is a vector with a value per expert. The
figure shows this vector as a point, after a reduction to two dimensions.
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
from coterie.exchanges.lazy import server_state
from coterie.federation.participants import gathered, server_context
from coterie.inference.finished import Loader, tokenizer
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.fedamole.experts import expert_name
from coterie.methods.fedamole.method import FedAMoLE
from coterie.methods.fedamole.server import Experts, FedAMoLEServer
from coterie.runs import RunFolder
from coterie.training.embeddings import token_embeddings

SAMPLES = 200
"""The maximum number of points per client."""
COMPONENTS = "principal component analysis"
NOT_INSTALLED = f"{COMPONENTS} (scikit-learn is not installed)"


@dataclass(frozen=True)
class LayerRelevance:
    """The relevance of clients' samples to one layer's experts.

    In FedAMoLE, experts choose their clients. The object also contains, for each client, the number
    of experts that would choose this client for the next round.
    """

    layer: str
    points: Mapping[str, np.ndarray]
    """For each client, the points of the client's samples, shaped (samples, 2)."""
    reduced_by: str
    """The name of the dimensionality reduction."""
    experts: Mapping[str, int]
    """For each client, the number of experts that would choose the client for the next round."""


Relevances = Mapping[str, Sequence[LayerRelevance] | CoterieError]
"""For each label, the relevance on each layer, or an error that says why it is unknown."""


def sample_relevance(experiment: Experiment, layer: str | None) -> Relevances:
    """Compute the relevance of clients' samples to the experts, for each method of an experiment.

    If the runs of a method differ in settings, each combination of settings is treated as a
    separate method. Each method has a label, which consists of the method's name and the settings
    that differ. The result contains only methods in which experts choose clients by relevance.

    Args:
        experiment: The runs. For each label, only the run with the smallest seed is read.
        layer: "first", "middle", "last", or the number of a layer, counted from 1. None selects the
            first, the middle and the last layer.

    Returns:
        For each label, the relevance on each layer, or an error that explains why the relevance is
        unknown.
    """
    results: dict[str, Sequence[LayerRelevance] | CoterieError] = {}
    for label, run in experiment.first:
        method = parse(run.config).method
        if isinstance(method, FedAMoLE) and method.chooses:
            try:
                results[label] = _layer_relevances(run, layer)
            except CoterieError as error:
                results[label] = error
    return results


def _layer_relevances(run: ReportedRun, layer: str | None) -> list[LayerRelevance]:
    if run.result is None:
        raise CoterieError("The run is not finished.")
    config, folder, loader = parse(run.config), RunFolder(run.path), Loader()
    server, names = _server(config, folder), sorted(folder.description["clients"])
    value, embeddings = server.initial().restored(server_state(folder)), {}
    assigned = server.choices(value, names, config.exchanges)  # for the round after the last
    for client in gathered(config, tokenizer(run.path)).clients:
        base, side = loader.side(folder, config, client.name)
        assert isinstance(side, FedAMoLEClient), "the run's method is FedAMoLE"
        samples = spaced_samples(client.data.train, config.data.window)
        at_once = config.training.at_once
        embeddings[client.name] = token_embeddings(base, side.adapter, samples, at_once)
    layers = []
    for number in chosen_layers(layer, len(server.paths)):
        path = server.paths[number]
        vectors = {
            name: relevance_to(server, value, path, e[path]) for name, e in embeddings.items()
        }
        experts = {name: len(held[path]) for name, held in assigned.items()}
        points, reduction = reduce_to_plane(vectors, config.seed)
        layers.append(LayerRelevance(path, points, reduction, experts))
    return layers


def _server(config: RunConfig, folder: RunFolder) -> FedAMoLEServer:
    names, skeleton = sorted(folder.description["clients"]), load_skeleton(config.base, config.root)
    server = config.method.server(server_context(config, skeleton, names, None, lambda *_: None))
    assert isinstance(server, FedAMoLEServer), "the run's method is FedAMoLE"
    return server


def spaced_samples(train: Split, window: int) -> AnyBatch:
    """Return at most SAMPLES samples of a training split, at evenly spaced positions.

    If the split is plain text, each sample consists of `window` + 1 consecutive tokens.
    """
    samples = train.samples(window, window + 1)
    count = len(samples)
    return samples.batch(torch.linspace(0, count - 1, min(SAMPLES, count)).round().long())


def relevance_to(server: FedAMoLEServer, value: Experts, path: str, tokens: Tensor) -> np.ndarray:
    """Compute the relevance of samples to a layer's experts (equation 20 of the FedAMoLE paper).

    Experts that no client has held yet have no embedding, so they have no column in the result.

    Args:
        server: The server.
        value: The server's value, with the experts' embeddings.
        path: The path of the layer.
        tokens: The mean token embedding of each sample, shaped (samples, r) for embeddings of
            width r.

    Returns:
        Relevances, shaped (samples, experts).
    """
    names = (expert_name(path, j) for j in range(server.count))
    means = [value.experts[name] for name in names if name in value.experts]
    if not means:
        raise CoterieError("No client has held an expert yet.")
    return (tokens @ torch.stack(means).T / server.relevance_dim(path) ** 0.5).double().numpy()


def reduce_to_plane(
    vectors: Mapping[str, np.ndarray], seed: int
) -> tuple[dict[str, np.ndarray], str]:
    """Reduce the vectors of all clients jointly to points in two dimensions.

    Args:
        vectors: For each client, the vectors of its samples, shaped (samples, experts).
        seed: The seed of t-SNE.

    Returns:
        A pair. The first element contains the points of each client, shaped (samples, 2). The
        second element is the name of the reduction.
    """
    stacked = np.concatenate(list(vectors.values()))
    ends = np.cumsum([len(rows) for rows in vectors.values()])[:-1]
    points, reduction = _reduced(stacked, seed)
    return dict(zip(vectors, np.split(points, ends), strict=True)), reduction


def _reduced(rows: np.ndarray, seed: int) -> tuple[np.ndarray, str]:
    """Reduce rows to two dimensions by t-SNE, and return the points and the reduction's name.

    Principal components are used instead of t-SNE if scikit-learn is missing, if there are fewer
    than four rows, or if there is a single column.
    """
    tsne = _tsne()
    if tsne is not None and len(rows) > 3 and rows.shape[1] > 1:
        perplexity = min(30.0, (len(rows) - 1) / 3)
        reduce = tsne(2, perplexity=perplexity, random_state=seed, init="pca")
        return reduce.fit_transform(rows), "t-SNE"
    left, sizes, _ = torch.linalg.svd(torch.from_numpy(rows - rows.mean(0)), full_matrices=False)
    two = (left * sizes)[:, :2].numpy()
    name = NOT_INSTALLED if tsne is None else COMPONENTS
    return np.pad(two, ((0, 0), (0, 2 - two.shape[1]))), name


def _tsne() -> Callable[..., Any] | None:
    """Return scikit-learn's class TSNE, or None if the optional dependency is not installed."""
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError:
        return None
    return TSNE
