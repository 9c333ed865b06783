"""FedMKT: what its two sides tell each other, and what they refuse."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.adapters import Adapter, detach
from coterie.alignment import Vocabulary, vocabulary_map
from coterie.alignment.knowledge import Knowledge, sample_keys
from coterie.bases import load_tokenizer
from coterie.data import Examples
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.exchange import Message, MessageError
from coterie.methods.fedmkt import FedMKTClient, FedMKTServer, _read, _spelt
from coterie.runs import RunFolder, Watch


def sides(run: coterie.RunConfig) -> tuple[FedMKTServer, dict[str, FedMKTClient]]:
    """A run's sides, joined, before its first round."""
    session = Session(run)
    session.check(run)
    who = session.federation(run)
    local = LocalRun(run, session.base, who.clients, RunFolder(Path()), Watch(), who.server)
    clients: dict[str, Any] = dict(local.clients)
    assert isinstance(local.server, FedMKTServer)
    return local.server, clients


def a_round(server: FedMKTServer, clients: dict[str, FedMKTClient]) -> dict[str, Message]:
    """One round; the uploads."""
    server.open(server.round, sorted(clients))
    uploads = {name: clients[name].step(server.download(name)) for name in sorted(clients)}
    for name, upload in uploads.items():
        server.receive(name, upload)
    server.close()
    return uploads


def values_of(side: FedMKTServer | FedMKTClient) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in side.adapter.parameters().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_server_learns_of_each_sample_from_the_client_that_knows_it_best(teachers) -> None:
    server, clients = sides(teachers())
    own = server.pupil.knowledge()
    uploads = a_round(server, clients)
    names = sorted(clients)
    told = {name: Knowledge.of(upload.tensors) for name, upload in uploads.items()}
    for place, key in enumerate(server.pupil.positions.samples.tolist()):
        mine = own.losses[own.samples == key].item()
        losses = [told[name].losses[told[name].samples == key].item() for name in names]
        best = min(range(len(names)), key=lambda n: losses[n])
        wanted = best if losses[best] < mine else -1
        assert server.pupil.teachers[place] == wanted
    assert (server.pupil.teachers >= 0).any()


def test_losses_are_nats_per_byte_of_the_answer(teachers) -> None:
    _, clients = sides(teachers())
    for client in clients.values():
        knowledge, samples = client.pupil.knowledge(), client.pupil.samples
        model = client.model()
        for n, item in enumerate(samples.items):
            batch = samples.batch(range(n, n + 1))
            assert batch.counted is not None
            logits = model(batch.ids[:, :-1]).logits[0].float().log_softmax(-1)
            nats = -logits.gather(1, batch.ids[0, 1:, None])[batch.counted[0]].sum()
            assert knowledge.losses[n].item() == pytest.approx(
                nats.item() / len(item.answer.encode()), rel=1e-4
            )


def test_clients_are_told_in_their_own_tokens(teachers) -> None:
    server, clients = sides(teachers())
    assert not server.download("poet").tensors  # before the first round there is nothing to tell
    a_round(server, clients)
    assert server.known is not None
    source = Vocabulary.of(server.own.base.tokenizer)
    for name, client in clients.items():
        target = Vocabulary.of(client.context.base.tokenizer)
        ids = vocabulary_map(source, target).ids
        told = server.download(name).tensors["knowledge.tokens"]
        assert torch.equal(told, ids[server.known.tokens.long()])
    assert len(server.own.base.tokenizer) != len(clients["diarist"].context.base.tokenizer)


def test_a_client_learns_from_the_server_before_it_trains(teachers) -> None:
    server, clients = sides(teachers())
    a_round(server, clients)
    client = clients["diarist"]
    before = client.state()
    download = server.download("diarist")
    client.finish(download)
    taught = values_of(client)
    assert not equal(taught, {n: before.tensors[f"adapter/{n}"] for n in taught})
    client.restore(before)
    client.step(download)  # begins with the same
    client.restore(before)
    client.finish(download)
    assert equal(taught, values_of(client))


def test_no_prediction_of_a_private_sample_travels(teachers, questions, tmp_path, caplog) -> None:
    lines = (questions / "poet.jsonl").read_text().splitlines()
    public = (questions / "whaler.jsonl").read_text().splitlines()
    (tmp_path / "public.jsonl").write_text("\n".join([*public[:6], *lines[:4]]))
    run = teachers()
    data = run.data.model_copy(update={"public": str(tmp_path / "public.jsonl")})
    server, clients = sides(run.model_copy(update={"data": data}))
    with caplog.at_level(logging.WARNING):
        uploads = a_round(server, clients)
    private = clients["poet"].context.data
    keys = [
        sample_keys(split.items)
        for split in (private.train, private.validation, private.test)
        if isinstance(split, Examples)
    ]
    both = torch.isin(clients["poet"].pupil.positions.samples, torch.cat(keys))
    assert both.any()
    assert f"poet holds {int(both.sum())} of the public samples itself" in caplog.text
    told = uploads["poet"].tensors["knowledge.samples"]
    assert not torch.isin(told, torch.cat(keys)).any()
    assert len(told) == int((~both).sum())
    assert len(uploads["diarist"].tensors["knowledge.samples"]) == len(both)


def test_llm2slm_s_server_teaches_and_stays_as_it_is(teachers) -> None:
    server, clients = sides(teachers(method={"name": "llm2slm"}))
    before = values_of(server)
    uploads = a_round(server, clients)
    told = server.download("poet").tensors
    assert told
    a_round(server, clients)
    assert equal(before, values_of(server))
    assert all(torch.equal(t, told[n]) for n, t in server.download("poet").tensors.items())
    assert all(not upload.tensors for upload in uploads.values())


def test_in_the_homogeneous_setting_adapters_are_averaged(teachers) -> None:
    server, clients = sides(teachers(method={"name": "fedmkt-fedavg"}))
    uploads = a_round(server, clients)
    down = server.download("poet").tensors
    pairs = [name for name in down if name.startswith("dense/")]
    assert pairs
    for name in pairs:
        mean = torch.stack([upload.tensors[name] for upload in uploads.values()]).mean(0)
        torch.testing.assert_close(down[name], mean)
    assert "knowledge.tokens" in down


def test_labels_alone_take_nothing_from_others(teachers) -> None:
    """With lambda 1 what others know makes no difference."""
    server, clients = sides(teachers(method={"name": "fedmkt", "task_weight": 1}))
    a_round(server, clients)
    poet = clients["poet"]
    before, download = poet.state(), server.download("poet")
    poet.finish(download)
    alone = values_of(poet)
    poet.restore(before)
    tensors = dict(download.tensors)
    tensors["knowledge.tokens"] = torch.full_like(tensors["knowledge.tokens"], 3)
    poet.finish(Message(download.round, tensors))
    assert equal(alone, values_of(poet))


def test_a_run_scores_and_keeps_the_server_s_model(teachers, tmp_path) -> None:
    run = teachers(
        evaluation={"generate": 3, "every": 1}, method={"name": "fedmkt", "align": "warping"}
    )
    done = coterie.run(run, out=tmp_path / "run")
    result = done.results["fedmkt"]
    assert {"exact_match", "rouge_l"} <= result["server"].keys()
    assert result["server"]["samples"] == 4
    server = coterie.load(done.path, "server")
    state = RunFolder(done.path).load("server").tensors
    own = [name for name in state if name.startswith("own/")]
    assert own
    assert any(state[name].any() for name in own if name.endswith(".B"))
    detach(server)
    lines = (done.path / "metrics.jsonl").read_text().splitlines()
    taught = [line for line in map(json.loads, lines) if line["name"] == "taught"]
    assert {line["client"] for line in taught} == {None, "diarist", "poet"}
    for line in taught:
        assert 0 <= line["value"]["positions"] <= 1
        assert 0 <= line["value"]["mass"] <= 1.001


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"server": None}, "a model of the server's own: set server.base"),
        ({"data": {"window": 48, "instructions": {"template": "{{ instruction }}"}}}, "public"),
        ({"data": {"window": 8, "public": "whaler.jsonl", "text": "output"}}, "instructions"),
    ],
)
def test_what_is_missing_is_said(teachers, changes, wanted, tmp_path) -> None:
    with pytest.raises(CoterieError, match=f"The method 'fedmkt' needs .*{wanted}"):
        coterie.run(teachers(**changes), out=tmp_path / "run")


def test_a_client_s_base_that_is_not_there_is_named(teachers, tmp_path) -> None:
    run = teachers(bases={"poet": str(tmp_path / "nowhere")})
    with pytest.raises(CoterieError, match=r"The base of poet: .*nowhere"):
        coterie.run(run, out=tmp_path / "run")


def test_other_bases_cannot_average_their_adapters(teachers, other, tmp_path) -> None:
    run = teachers(method={"name": "fedmkt-fedavg"}, bases={"poet": other})
    with pytest.raises(CoterieError, match="one base for all clients"):
        coterie.run(run, out=tmp_path / "run")


def test_a_common_base_must_be_the_run_s_to_be_averaged(teachers, other, tmp_path) -> None:
    bases = {"poet": other, "diarist": other}
    run = teachers(method={"name": "fedmkt-fedavg"}, bases=bases)
    with pytest.raises(CoterieError, match="set `base` and leave out `bases`"):
        coterie.run(run, out=tmp_path / "run")


def test_everybody_may_have_a_rank_of_its_own(teachers) -> None:
    ranks = {"server": 4, "poet": 1, "others": 2}
    settings = {"generalists": 1, "rank": ranks, "attention_rank": 0}
    server, clients = sides(teachers(method={"name": "fedmkt", **settings}))
    found = {}
    for name, side in {"server": server, **clients}.items():
        assert isinstance(side.adapter, Adapter)
        found[name] = side.adapter.layout.rank
    assert found == {"server": 4, "poet": 1, "diarist": 2}


def test_tokens_that_the_model_has_no_row_for_are_not_learnt(teachers) -> None:
    """Fine-tunes often add a token to the tokenizer and not to the head."""
    server, clients = sides(teachers())
    a_round(server, clients)
    download = server.download("poet")
    tensors = dict(download.tensors)
    rows = clients["poet"].pupil.words
    tensors["knowledge.tokens"][:, 0] = rows
    tensors["knowledge.losses"] = torch.zeros_like(tensors["knowledge.losses"])
    clients["poet"].words = rows + 1  # its tokenizer has one more
    clients["poet"].finish(Message(download.round, tensors))
    assert (clients["poet"].pupil.teachers == 0).all()


def test_another_public_text_is_noticed(teachers, caplog) -> None:
    server, clients = sides(teachers())
    a_round(server, clients)
    download = server.download("poet")
    samples = {"knowledge.samples": download.tensors["knowledge.samples"] ^ 1}
    with caplog.at_level(logging.WARNING):
        clients["poet"].finish(Message(download.round, {**download.tensors, **samples}))
    assert "has none of them: is the public text the same?" in caplog.text


def test_a_server_that_learns_what_it_is_scored_on_is_told_so(teachers, caplog) -> None:
    server, _ = sides(teachers())  # whose test text is the public one
    with caplog.at_level(logging.WARNING):
        server.open(0, ["poet"])
    assert "the server learns 4 of the samples that it is scored on" in caplog.text


def test_a_vocabulary_survives_its_message() -> None:
    vocabulary = Vocabulary.of(load_tokenizer("tiny-gpt2"))
    assert _read(_spelt(vocabulary), dict(vocabulary.roles)) == vocabulary
    odd = Vocabulary((b"", None, b"\xff\0"), {"eos": 1})
    assert _read(_spelt(odd), {"eos": 1}) == odd


LENGTHS = {"vocabulary.lengths": torch.tensor([1, -1], dtype=torch.int32)}
SPELLING = {"vocabulary.spelling": torch.tensor([97], dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("tensors", "roles"),
    [
        ({}, {}),
        (LENGTHS, {}),
        (SPELLING, {}),
        (LENGTHS | SPELLING, None),
        (LENGTHS | SPELLING, {"eos": 2}),
        (LENGTHS | SPELLING, {"eos": "1"}),
        (LENGTHS | {"vocabulary.spelling": torch.tensor([97, 98], dtype=torch.uint8)}, {}),
        ({"vocabulary.lengths": LENGTHS["vocabulary.lengths"][None]} | SPELLING, {}),
        (
            {
                "vocabulary.lengths": torch.tensor([2000], dtype=torch.int32),
                "vocabulary.spelling": torch.zeros(2000, dtype=torch.uint8),
            },
            {},
        ),
    ],
)
def test_what_is_no_vocabulary_is_refused(tensors, roles) -> None:
    with pytest.raises(MessageError):
        _read(tensors, roles)
