"""Clients with bases of their own and a server with a model: scores, engines, who knows what."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from looped import NAMES, StopAfter, result_of

import coterie
from coterie.bases import BaseSpec, Tokenizer, load_base, load_skeleton, load_tokenizer
from coterie.config.run import RunConfig
from coterie.data.examples import Examples
from coterie.data.split import Split
from coterie.data.texts import client_texts, whole_text
from coterie.data.tokens import encoded, tokenise
from coterie.deployment.server import ServerRun
from coterie.deployment.status import ServerWatch
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import evaluate
from coterie.federation.participants import EVERYONE, gathered, served
from coterie.methods.contract import RunFacts
from coterie.methods.pretrained import Pretrained
from coterie.runs import RunFolder, describe
from coterie.testing.loop import Loop, assert_as_local, folder, workers

Config = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def mixed(config: Config, other: str) -> Config:
    """A run in which the poet has another base than the rest."""
    small = {"mlp": {"sets": 1, "rank": 2}, "attention": {"rank": 2}}

    def make(**changes: Any) -> RunConfig:
        local = {"name": "local", **small}
        return config(**{"method": local, "rounds": 2, "bases": {"poet": other}} | changes)

    return make


@pytest.fixture(scope="session")
def with_server(mixed: Config, other: str, texts: Path) -> Config:
    """Runs in which the server has a model, a public text and a text to be scored on."""
    data = {"window": 16, "limits": {"train": 2000, "validation": 400, "test": 400, "public": 300}}

    def make(**changes: Any) -> RunConfig:
        server = {"base": other, "test": "whaler.txt"}
        named = {"data": {**data, "public": "diarist.txt"}, "server": server}
        return mixed(**{"method": "pretrained", **named} | changes)

    return make


def text_of(split: Split, tokenizer: Tokenizer) -> str:
    """Decode the tokens of a split."""
    return str(tokenizer.decode(split.ids.tolist()))


@pytest.mark.parametrize("method", ["local", "pretrained"])
def test_every_client_is_scored_in_the_tokens_of_its_own_base(method, mixed, tmp_path) -> None:
    run = mixed(method=method, rounds=1)
    done = coterie.run(run, out=tmp_path / "run")
    for client in run.clients:
        name = client.name
        base = load_base(run.base_of(name), "fp32", run.data.window)
        words = coterie.tokenizer(done.path, name)
        assert words.get_vocab() == base.tokenizer.get_vocab()
        data = tokenise(client_texts(client, run.data, run.root, run.seed), words, run.data, name)
        score = evaluate(base, coterie.load(done.path, name), data.test, run.data.window)
        recorded = done.results[method]["trained"][name]
        assert score.perplexity == pytest.approx(recorded["perplexity"], rel=1e-5)
        assert (score.tokens, score.bytes) == (recorded["tokens"], recorded["bytes"])
    sizes = {n: coterie.load(done.path, n).config.vocab_size for n in NAMES}
    assert sizes["poet"] == 400 < sizes["diarist"] == sizes["whaler"]


def test_a_method_that_averages_refuses_different_bases(mixed, other, tmp_path) -> None:
    with pytest.raises(CoterieError, match=f"needs the run's base .*poet: {other}.* `bases`"):
        coterie.run(mixed(method="fedavg"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    same = mixed(method="fedavg", base=other)  # by a mapping that changes nothing
    Session(same).check(same)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"bases": {"peot": "tiny-gpt2"}},
            "bases names the unknown client 'peot'.*diarist, poet, whaler",
        ),
        ({"bases": {"server": "tiny-gpt2"}}, "bases names the unknown client 'server'"),
        (
            {"training": {"learning_rates": {"server": 0.1}}},
            "training.learning_rates names the unknown client 'server'",
        ),
        (
            {"server": {}, "clients": [{"name": "server", "path": "poet.txt"}], "bases": {}},
            "A client is named 'server'",
        ),
    ],
)
def test_a_name_that_takes_no_part_is_refused(changes, sentence, mixed) -> None:
    run = mixed(**changes)
    with pytest.raises(CoterieError, match=sentence):
        Session(run).check(run)


def test_methods_are_told_of_bases_and_of_the_server(with_server, other) -> None:
    seen: list[RunFacts] = []

    class Curious(Pretrained):
        name = "curious"

        def check(self, run: RunFacts) -> None:
            seen.append(run)

    run = with_server().model_copy(update={"method": Curious()})
    Session(run).check(run)
    bases = {"diarist": run.base, "poet": BaseSpec(name=other), "whaler": run.base}
    assert seen == [
        RunFacts(NAMES, True, bases, server=True, instructions=False, optimiser="adamw")
    ]


def test_the_public_text_is_tokenised_once_for_each_base(with_server, monkeypatch) -> None:
    import coterie.federation.participants as module

    read: list[str] = []

    def counted(path: str, *rest: Any) -> list[Any]:
        read.append(path)
        return whole_text(path, *rest)

    monkeypatch.setattr(module, "whole_text", counted)
    run = with_server()
    words = load_tokenizer(run.base)
    federation = gathered(run, words)
    assert sorted(read) == ["diarist.txt", "whaler.txt"]
    public = {client.name: client.public for client in federation.clients}
    assert public["diarist"] is public["whaler"]
    assert federation.server is not None
    assert public["poet"] is federation.server.public is federation.server.data.train
    text = (run.root / "diarist.txt").read_text(encoding="utf-8")
    tokenizers = dict.fromkeys(NAMES, words) | {"poet": load_tokenizer(run.base_of("poet"))}
    for name, tokens in public.items():
        assert tokens is not None
        assert len(tokens.ids) <= 300
        assert text.startswith(text_of(tokens, tokenizers[name]))


def test_the_servers_model_is_scored_as_by_hand(with_server, other, tmp_path) -> None:
    run = with_server(evaluation={"every": 1})
    done = coterie.run(run, out=tmp_path / "run")
    base = load_base(other, "fp32", 16)
    items = whole_text("whaler.txt", run.data, run.root, "The test")
    tokens = encoded(items, base.tokenizer, run.data, "test", "The test")
    score = evaluate(base, base.model, tokens, 16).as_dict()
    result = done.results["pretrained"]
    assert result["server"] == pytest.approx(score, rel=1e-6)
    assert set(result["trained"]) == set(NAMES)
    lines = [m for m in RunFolder(done.path).metrics() if m["name"] == "server/aggregated"]
    assert [(line["round"], line["client"]) for line in lines] == [(0, None), (1, None)]
    assert coterie.load(done.path, "server").config.vocab_size == 400
    assert coterie.tokenizer(done.path, "server").get_vocab() == base.tokenizer.get_vocab()


def test_without_a_model_of_the_server_none_is_scored(with_server, mixed, tmp_path) -> None:
    done = coterie.run(with_server(method="local", rounds=1), out=tmp_path / "local")
    assert "server" not in done.results["local"]
    with pytest.raises(CoterieError, match="local does not train a model on the server"):
        coterie.load(done.path, "server")
    done = coterie.run(mixed(method="pretrained", rounds=1), out=tmp_path / "pretrained")
    with pytest.raises(CoterieError, match="no client 'server'"):
        coterie.load(done.path, "server")
    untold = coterie.run(with_server(server={}, rounds=1), out=tmp_path / "untold")
    assert "server" not in untold.results["pretrained"]


def test_a_changed_text_of_the_server_is_noticed(with_server, texts, tmp_path) -> None:
    own = tmp_path / "test.txt"
    own.write_text((texts / "poet.txt").read_text(encoding="utf-8"), encoding="utf-8")
    run = with_server(server={"test": str(own)})
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "run", callbacks=[StopAfter()])
    own.write_text("Another text. " + own.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(CoterieError, match="The text of the server has changed"):
        coterie.resume(tmp_path / "run")


@pytest.fixture
def divided(config: Config, other: str, questions: Path) -> Config:
    """Questions of one writer, dealt to two clients with a base each, and to the public."""

    def make(**changes: Any) -> RunConfig:
        run = {
            "data_root": str(questions),
            "data": {"window": 60, "instructions": {"template": "plain"}},
            "clients": (),
            "divide": {"source": "poet.jsonl", "by": "even", "clients": 2, "public": True},
            "bases": {"client-2": other},
            "server": {"base": other},
            "method": "pretrained",
        }
        return config(**run | changes)

    return make


def test_a_division_sets_a_public_text_and_the_servers_test_aside(divided, tmp_path) -> None:
    run = divided(rounds=1)
    federation = Session(run).federation(run)
    assert federation.server is not None
    parts = [
        federation.clients[0].data.train,
        federation.clients[1].data.train,
        federation.server.data.train,
    ]
    items = []
    for part in parts:
        assert isinstance(part, Examples)
        items.append({(item.prompt, item.answer) for item in part.instructions})
    assert not items[0] & items[1]
    assert not items[2] & (items[0] | items[1])
    for side in (*federation.clients, federation.server):
        assert isinstance(side.public, Examples)
        assert {(item.prompt, item.answer) for item in side.public.instructions} == items[2]
    assert federation.server.tests == {"server": federation.server.data.test}
    result = coterie.run(run, out=tmp_path / "run").results["pretrained"]
    # The same base on the same questions.
    assert result["server"] == result["trained"]["client-2"] != result["trained"]["client-1"]


def test_a_pooled_client_has_the_servers_base_and_the_public_part_too(divided) -> None:
    rates = {"training": {"steps": 1, "learning_rates": {"server": 0.5}}}
    run, pooled = divided(**rates), divided(method="centralized", **rates)
    session = Session(pooled)
    federation, [everyone] = gathered(run, session.base.tokenizer), session.participants(pooled)
    assert everyone.base is session.bases[run.base_of("server")]
    assert federation.server is not None
    samples = [
        len(p.data.train.items)
        for p in (*federation.clients, federation.server)
        if isinstance(p.data.train, Examples)
    ]
    assert isinstance(everyone.data.train, Examples)
    assert len(everyone.data.train) == sum(samples)
    assert torch.equal(everyone.tests["client-2"].ids, federation.clients[1].data.test.ids)
    assert list(everyone.tests) == ["client-1", "client-2"]
    assert pooled.training_of(EVERYONE).learning_rate == 0.5
    session.check(pooled)


def test_two_public_texts_are_refused(divided) -> None:
    with pytest.raises(CoterieError, match="both define a public set"):
        divided(data={"window": 60, "instructions": {}, "public": "poet.jsonl"})


def deployed(run: RunConfig, out: Path) -> Loop:
    """Run a deployment in one process with a server that has a model."""
    loop = Loop(workers(run, out))
    names: dict[str, Any] = {client.name: {} for client in run.clients}
    described = describe(run.as_dict(), names, run.plugins, run="0123456789abcdef")
    folder = RunFolder.create(out / "server", described)
    skeleton = load_skeleton(run.base, run.root)
    ServerRun(run, skeleton, folder, loop, ServerWatch(), served(run)).rounds()
    return loop


@pytest.mark.parametrize("method", ["local", "pretrained"])
def test_a_deployment_tells_no_client_of_others(method, with_server, other, tmp_path) -> None:
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rates": {"poet": 0.001}}
    common = tmp_path / "common.txt"
    common.write_text("What everybody may see. " * 20, encoding="utf-8")
    data = with_server().data.model_copy(update={"public": str(common)})
    run = with_server(method=method, training=training, data=data)
    local = coterie.run(run, out=tmp_path / "local")
    loop = deployed(run, tmp_path)
    assert_as_local(run, tmp_path, RunFolder(local.path))
    result = result_of(RunFolder(tmp_path / "server"))
    assert result.get("server") == local.results[method].get("server")
    assert ("server" in result) == (method == "pretrained")
    for name, order in loop.orders:
        if order.config is not None:
            visible = json.dumps(order.config)
            assert not [n for n in NAMES if n in visible]
            assert (other in visible) == (name == "poet")
            assert (run.base.name in visible) == (name != "poet")
            assert order.config["training"]["learning_rates"] == {}
            assert order.config["training"]["learning_rate"] == (0.001 if name == "poet" else 0.002)
    assert RunFolder(folder(run, tmp_path, "poet").path).result
