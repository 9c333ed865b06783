"""Figure 8 of FedAMoLE: samples by their relevance to experts, against the equations one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.analysis import relevance
from coterie.analysis.experiments import experiments
from coterie.analysis.relevance import SAMPLES, sample_relevance, spaced_samples
from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.exchanges.lazy import server_state
from coterie.federation.participants import gathered
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.report import page
from coterie.report.figures import FIGURES
from coterie.report.page import write_report
from coterie.report.relevance import relevance as pictures
from coterie.report.style import LeftOut
from coterie.runs import RunFolder
from coterie.training.embeddings import token_embeddings


@pytest.fixture(scope="module")
def run(values, tmp_path_factory) -> Path:
    """One round in which three clients train the experts that they hold."""
    folder = tmp_path_factory.mktemp("relevance") / "run"
    method = {"name": "fedamole", "experts": 5, "router": {"top_k": 1}, "min_experts": 1}
    coterie.run(values(method=method, rounds=1, evaluation={"keep": "last"}), out=folder)
    return folder


@pytest.mark.slow
def test_a_samples_relevance_is_that_of_its_mean_token_embedding(run: Path) -> None:
    """Check equations 17 to 20, with one sample as the embedding set."""
    folder = RunFolder(run)
    config = parse(folder.description["config"])
    server, path = relevance._server(config, folder), "transformer.h.1.attn.c_attn"
    assert path in server.paths
    state, window = server_state(folder), config.data.window
    value = server.initial().restored(state)
    for client in gathered(config, coterie.tokenizer(run)).clients:
        samples = spaced_samples(client.data.train, window)
        text = client.data.train
        assert isinstance(text, Tokens)
        pieces = text.ids[: len(samples.ids) * (window + 1)].view(-1, window + 1).long()
        assert torch.equal(samples.ids, pieces)  # there are fewer than SAMPLES: all of them
        base, side = relevance.Loader().side(folder, config, client.name)
        assert isinstance(side, FedAMoLEClient)
        embeddings = token_embeddings(base, side.adapter, samples, 2)[path]
        model, router = side.model(), side.state()["adapter"][f"projection/{path}"]
        for piece, embedding in zip(pieces[:3], embeddings[:3], strict=True):
            read: list[Any] = []
            module = model.get_submodule(path)

            def keep(module: Any, args: Any, to: list[Any] = read) -> None:
                to.append(args[0])

            hook = module.register_forward_pre_hook(keep)
            with torch.no_grad():
                model(input_ids=piece[None, :-1])
            hook.remove()
            mean = torch.stack([router @ x for x in read[0][0]]).mean(0)
            torch.testing.assert_close(embedding, mean, rtol=1e-4, atol=1e-5)
            known = [state["experts"][f"{path}.{j}"] for j in range(5)]
            expected = [float(mean @ expert) / mean.numel() ** 0.5 for expert in known]
            scores = relevance.relevance_to(server, value, path, embedding[None])
            assert scores[0].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assigned = server.choices(value, sorted(folder.description["clients"]), config.exchanges)
    for held in assigned.values():  # each of five experts has chosen two clients
        assert all(1 <= len(experts) <= 5 for experts in held.values())
    assert sum(len(held[path]) for held in assigned.values()) == 10


@pytest.mark.slow
def test_points_of_samples_are_shown_only_where_asked_for(run, values, tmp_path, monkeypatch):
    monkeypatch.setattr(FIGURES, "builtin", {})
    monkeypatch.setattr(relevance, "_tsne", lambda: None)
    report = write_report([run], tmp_path / "with", layer="first", with_samples=True)
    ((picture,),) = (section.pictures for section in report.sections)
    assert picture.name == "relevance-fedamole"
    assert "scikit-learn is not installed" in picture.caption
    assert list(report.figures.glob("relevance-fedamole-*"))
    assert page.SINGLE in report.page.read_text(encoding="utf-8")
    without = write_report([run], tmp_path / "with")
    assert page.SINGLE not in without.page.read_text(encoding="utf-8")
    assert not list(without.figures.glob("relevance-*"))  # those of before are gone
    coterie.run(values(method="fedavg", rounds=1), out=tmp_path / "fedavg")
    (experiment,) = experiments([tmp_path / "fedavg"])
    (item,) = pictures(sample_relevance(experiment, None))
    assert isinstance(item, LeftOut)
    assert "no run uses a method whose experts choose" in item.why


def test_without_scikit_learn_points_are_principal_components(monkeypatch) -> None:
    monkeypatch.setattr(relevance, "_tsne", lambda: None)
    rows = np.random.default_rng(0).normal(size=(30, 5)) * [5, 3, 1, 0.1, 0.1]
    planes, name = relevance.reduce_to_plane({"ada": rows[:10], "ben": rows[10:]}, 0)
    assert name == relevance.NOT_INSTALLED
    assert [len(points) for points in planes.values()] == [10, 20]
    points, centred = np.concatenate(list(planes.values())), rows - rows.mean(0)
    sizes, axes = np.linalg.eigh(centred.T @ centred)
    for n, axis in enumerate(axes.T[np.argsort(-sizes)][:2]):
        assert abs(points[:, n]) == pytest.approx(abs(centred @ axis))


@pytest.mark.parametrize(("rows", "name"), [(3, relevance.COMPONENTS), (8, "t-SNE")])
def test_the_reduction_that_was_used_is_named(rows, name) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    points = {"ada": np.random.default_rng(0).normal(size=(rows, 5))}
    assert relevance.reduce_to_plane(points, 0)[1] == name


def test_a_long_text_gives_evenly_spaced_samples() -> None:
    pieces = spaced_samples(Tokens(torch.arange(9 * 1000, dtype=torch.int32), 9), 8).ids
    assert (pieces.shape, pieces[0, 0], pieces[-1, -1]) == ((SAMPLES, 9), 0, 8999)
