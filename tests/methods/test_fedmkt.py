"""FedMKT: what its two sides tell each other, and what they refuse."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensors import close_to, equal, mean_of
from torch import Tensor

import coterie
from coterie.adapters import detach
from coterie.alignment import Vocabulary, vocabulary_map
from coterie.alignment.knowledge import Knowledge, sample_keys
from coterie.bases import load_tokenizer
from coterie.data.examples import Examples
from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.methods.fedmkt.method import FedMKTClient, FedMKTServer
from coterie.methods.fedmkt.vocabulary import decode_vocabulary, encode_vocabulary
from coterie.methods.tensors import copied
from coterie.runs import RunFolder
from coterie.testing.rounds import down, joined, one_round, step

AVERAGED, PLAIN = {"name": "fedmkt-fedavg"}, {"template": "{{ instruction }}"}
TEXT = {"window": 8, "public": "whaler.jsonl", "text": "output"}
OTHERS = {"poet": "OTHER", "diarist": "OTHER"}


def a_round(local: Any) -> dict[str, Message]:
    """Execute the next exchange, and return the uploads."""
    return one_round(local, local.exchange.turn.number)


def knowing(download: Message, **changes: Tensor) -> Message:
    """Return a download with other knowledge."""
    knowledge = {**download["knowledge"], **changes}
    return replace(download, groups={**download.groups, "knowledge": knowledge})


def values_of(side: FedMKTServer | FedMKTClient) -> dict[str, Tensor]:
    return copied(side.adapter.tensors())


def test_the_server_learns_each_sample_from_the_client_with_least_loss(teachers) -> None:
    local: Any = joined(teachers())
    server, clients = local.server, local.clients
    own = server.distiller.knowledge()
    uploads = a_round(local)
    names = sorted(clients)
    offers = {name: Knowledge.of(upload["knowledge"]) for name, upload in uploads.items()}
    for place, key in enumerate(server.distiller.positions.samples.tolist()):
        own_loss = own.losses[own.samples == key].item()
        losses = [offers[name].losses[offers[name].samples == key].item() for name in names]
        best = min(range(len(names)), key=lambda n: losses[n])
        wanted = best if losses[best] < own_loss else -1
        assert server.distiller.teachers[place] == wanted
    assert (server.distiller.teachers >= 0).any()


def test_clients_are_told_in_their_own_tokens(teachers) -> None:
    local: Any = joined(teachers())
    server, clients = local.server, local.clients
    assert not local.message("poet")["knowledge"]  # there is nothing to tell yet
    a_round(local)
    source = Vocabulary.of(server.own.base.tokenizer)
    for name, client in clients.items():
        target = Vocabulary.of(client.context.base.tokenizer)
        ids = vocabulary_map(source, target).ids
        tokens = local.message(name)["knowledge"]["tokens"]
        assert torch.equal(tokens, ids[local.value.knowledge["tokens"].long()])
    assert len(server.own.base.tokenizer) != len(clients["diarist"].context.base.tokenizer)


def test_a_client_learns_from_the_server_before_it_trains(teachers, monkeypatch) -> None:
    local: Any = joined(teachers())
    a_round(local)
    client = local.clients["diarist"]
    before = client.state()
    download = local.message("diarist")
    client.receive(download)
    taught = values_of(client)
    assert not equal(taught, before["adapter"])
    client.restore(before)
    begun = {}
    monkeypatch.setattr(client.training, "run", lambda round: begun.update(values_of(client)))
    step(local, "diarist", 1, download)  # begins with the same
    assert equal(taught, begun)
    client.restore(before)
    client.receive(download)
    assert equal(taught, values_of(client))


def test_no_prediction_of_a_private_sample_travels(teachers, questions, tmp_path, caplog) -> None:
    lines = (questions / "poet.jsonl").read_text().splitlines()
    public = (questions / "whaler.jsonl").read_text().splitlines()
    (tmp_path / "public.jsonl").write_text("\n".join([*public[:6], *lines[:4]]))
    run = teachers()
    data = run.data.model_copy(update={"public": str(tmp_path / "public.jsonl")})
    local: Any = joined(run.model_copy(update={"data": data}))
    with caplog.at_level(logging.WARNING):
        uploads = a_round(local)
    private = local.clients["poet"].context.data
    keys = [
        sample_keys(split.instructions)
        for split in (private.train, private.validation, private.test)
        if isinstance(split, Examples)
    ]
    shared = torch.isin(local.clients["poet"].distiller.positions.samples, torch.cat(keys))
    assert shared.any()
    assert f"poet has {int(shared.sum())} of the public samples in its own data" in caplog.text
    sent = uploads["poet"]["knowledge"]["samples"]
    assert not torch.isin(sent, torch.cat(keys)).any()
    assert len(sent) == int((~shared).sum())
    assert len(uploads["diarist"]["knowledge"]["samples"]) == len(shared)


def test_llm2slm_s_server_teaches_and_stays_as_it_is(teachers) -> None:
    local: Any = joined(teachers(method={"name": "llm2slm"}))
    before = local.value.own
    uploads = a_round(local)
    knowledge = local.message("poet")["knowledge"]
    assert knowledge
    a_round(local)
    assert equal(before, local.value.own)
    assert equal(local.message("poet")["knowledge"], knowledge)
    assert all(not list(upload.tensors()) for upload in uploads.values())


def test_adapters_are_averaged_after_clients_have_learnt(teachers) -> None:
    # A round has two exchanges: one of predictions after training, and one of adapters after
    # distillation.
    local: Any = joined(teachers(method=AVERAGED))
    trained, learnt = {}, {}
    assert {name for u in a_round(local).values() for name in u.groups} == {"knowledge"}
    for name, client in local.clients.items():
        before, trained[name] = client.state(), values_of(client)
        client.receive(down(local, name))
        learnt[name] = values_of(client)
        client.restore(before)
    for name, upload in a_round(local).items():
        assert not equal(learnt[name], trained[name])
        assert equal(learnt[name], upload["adapter"])
        assert upload.groups.keys() == {"adapter"}
    download = down(local, "poet")
    assert download.groups.keys() == {"adapter"}
    assert close_to(download["adapter"], mean_of(learnt.values()))


def test_clients_train_once_a_round_however_many_exchanges_it_has(teachers, monkeypatch) -> None:
    run = teachers(method=AVERAGED)
    client: Any = joined(run).clients["poet"]
    trained: list[int] = []
    monkeypatch.setattr(client.training, "run", trained.append)
    for exchange in range(4):
        client.train(run.turn(exchange))
    assert trained == [0, 1]


def test_labels_alone_take_nothing_from_others(teachers) -> None:
    # If lambda is 1, other sides' knowledge makes no difference.
    local: Any = joined(teachers(method={"name": "fedmkt", "task_weight": 1}))
    a_round(local)
    poet = local.clients["poet"]
    before, download = poet.state(), local.message("poet")
    poet.receive(download)
    alone = values_of(poet)
    poet.restore(before)
    poet.receive(knowing(download, tokens=torch.full_like(download["knowledge"]["tokens"], 3)))
    assert equal(alone, values_of(poet))


def test_a_run_scores_and_keeps_the_server_s_model(teachers, tmp_path) -> None:
    evaluation, method = {"generate": 3, "every": 1}, {"name": "fedmkt", "align": "warping"}
    done = coterie.run(teachers(evaluation=evaluation, method=method), out=tmp_path / "run")
    result = done.results["fedmkt"]
    assert {"exact_match", "rouge_l"} <= result["server"].keys()
    assert result["server"]["samples"] == 4
    server = coterie.load(done.path, "server")
    own = RunFolder(done.path).load("server")["own"]
    assert own
    assert any(tensor.any() for name, tensor in own.items() if name.endswith(".B"))
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
        ({"server": None}, "fedmkt' needs .*a server that has its own model: set server.base"),
        ({"data": {"window": 48, "instructions": PLAIN}}, "'fedmkt' needs .*public"),
        ({"data": TEXT}, "'fedmkt' needs .*instructions"),
        ({"bases": {"poet": "NOWHERE"}}, r"The base of poet: .*NOWHERE"),
        ({"method": AVERAGED, "bases": {"poet": "OTHER"}}, r"the run's base \(.*\) on all clients"),
        ({"method": AVERAGED, "bases": OTHERS}, "set `base` and remove `bases`"),
    ],
)
def test_what_is_missing_is_said(teachers, changes, wanted, other, tmp_path) -> None:
    # OTHER stands for a base, and NOWHERE for a folder that does not exist.
    paths = {"OTHER": other, "NOWHERE": str(tmp_path / "NOWHERE")}
    bases = {name: paths[base] for name, base in changes.get("bases", {}).items()}
    with pytest.raises(CoterieError, match=wanted):
        coterie.run(teachers(**changes | ({"bases": bases} if bases else {})), out=tmp_path / "run")


def test_tokens_that_the_model_has_no_row_for_are_not_learnt(teachers) -> None:
    # Some fine-tuned models have a tokenizer with more tokens than the head.
    local: Any = joined(teachers())
    a_round(local)
    download = local.message("poet")
    known, poet = dict(download["knowledge"]), local.clients["poet"]
    rows = poet.distiller.vocabulary_size
    known["tokens"][:, 0] = rows
    known["losses"] = torch.zeros_like(known["losses"])
    vocabulary = poet.vocabulary  # its tokenizer has one more
    poet.vocabulary = replace(vocabulary, tokens=(*vocabulary.tokens, b"another"))
    poet.receive(knowing(download, **known))
    assert (local.clients["poet"].distiller.teachers == 0).all()


def test_another_public_text_is_noticed(teachers, caplog) -> None:
    local: Any = joined(teachers())
    a_round(local)
    download = local.message("poet")
    others = knowing(download, samples=download["knowledge"]["samples"] ^ 1)
    with caplog.at_level(logging.WARNING):
        local.clients["poet"].receive(others)
    assert "none of which is in its public set" in caplog.text


def test_a_server_that_learns_what_it_is_scored_on_is_told_so(teachers, caplog) -> None:
    local: Any = joined(teachers())  # whose server's test text is the public one
    with caplog.at_level(logging.WARNING):
        a_round(local)
    assert "the server is trained on 4 of the samples that it is scored on" in caplog.text


def test_a_vocabulary_survives_its_message() -> None:
    vocabulary = Vocabulary.of(load_tokenizer("tiny-gpt2"))
    assert decode_vocabulary(encode_vocabulary(vocabulary), dict(vocabulary.roles)) == vocabulary
    odd = Vocabulary((b"", None, b"\xff\0"), {"eos": 1})
    assert decode_vocabulary(encode_vocabulary(odd), {"eos": 1}) == odd


def spelt(lengths: list[int], spelling: list[int]) -> dict[str, Tensor]:
    """Return the tensors of a vocabulary."""
    letters = torch.tensor(spelling, dtype=torch.uint8)
    return {"lengths": torch.tensor(lengths, dtype=torch.int32), "spelling": letters}


GOOD = spelt([1, -1], [97])


@pytest.mark.parametrize(
    ("tensors", "roles"),
    [
        ({}, {}),
        *(({name: tensor}, {}) for name, tensor in GOOD.items()),
        *((GOOD, roles) for roles in (None, {"eos": 2}, {"eos": "1"})),
        (spelt([1, -1], [97, 98]), {}),
        (GOOD | {"lengths": GOOD["lengths"][None]}, {}),
        (spelt([2000], [0] * 2000), {}),
    ],
)
def test_what_is_no_vocabulary_is_refused(tensors, roles) -> None:
    with pytest.raises(MessageError):
        decode_vocabulary(tensors, roles)


def test_predictions_are_bounded_by_their_norm(teachers) -> None:
    # An empty reference would make predictions a change of parameters.
    run = joined(teachers(method=AVERAGED))
    groups = ({"knowledge"}, {"adapter"})  # of the two exchanges of a round
    for turn, uploaded in enumerate(groups):
        upload = one_round(run, turn)["poet"]
        assert upload.groups.keys() == uploaded
        reference = run.server.reference(run.value, "poet", upload, run.exchange)
        assert reference.keys() <= {"adapter"}
