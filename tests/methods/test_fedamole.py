"""FedAMoLE against naive versions: what clients tell of their samples, and what the server does."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from turns import nth

from coterie.config.run import parse
from coterie.engines.local import LocalRun
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch
from coterie.messages import Message, MessageError
from coterie.methods.contract import RunFacts
from coterie.methods.fedamole.assignment import assign_all
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.registry import method_from
from coterie.privacy.ledger import Ledger
from coterie.testing.rounds import close, down, joined, one_round, step

WRITERS = ("diarist", "poet", "whaler")
PATHS = ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn")
Start = Callable[..., LocalRun]


@pytest.fixture
def start(values) -> Start:
    """A run's sides, joined; keyword arguments are the method's."""

    def make(**method: object) -> LocalRun:
        settings = {"name": "fedamole", "experts": 6, "attention": {"rank": 4}, **method}
        return joined(parse(values(method=settings, rounds=5)))

    return make


def held(local: LocalRun, client: str, path: str) -> list[int]:
    tensors = down(local, client)["adapter"]
    return [j for j in range(6) if f"domain.{j}/{path}.A" in tensors]


def test_every_expert_chooses_its_clients_and_every_client_gets_some(start) -> None:
    local = start(clients_per_expert=2, min_experts=3, max_experts=5)
    for round in range(2):
        local.open(local.config.turn(round), list(WRITERS))
        for path in PATHS:
            of = {name: held(local, name, path) for name in WRITERS}
            assert all(3 <= len(experts) <= 5 for experts in of.values())
            assert all(sum(j in experts for experts in of.values()) == 2 for j in range(6))
        one_round(local, round)


def test_shared_parts_are_averaged_over_all_and_experts_over_their_holders(start) -> None:
    local = start()
    before = dict(local.value.adapter)
    uploads = one_round(local, 0)
    for name, value in local.value.adapter.items():
        sent = [up["adapter"][name] for up in uploads.values() if name in up["adapter"]]
        assert len(sent) == (2 if name.startswith("domain.") else 3)
        assert torch.allclose(value, torch.stack(sent).mean(0), atol=1e-7)
        assert name.startswith("projection/") or not torch.equal(value, before[name])


def test_an_expert_that_nobody_trained_keeps_its_value_and_embedding(start) -> None:
    local = start(clients_per_expert=1, min_experts=1)
    one_round(local, 0)
    before, embeddings = dict(local.value.adapter), dict(local.value.experts)
    local.open(local.config.turn(1), sorted(WRITERS))
    away = {f"domain.{j}/{path}" for path in PATHS for j in held(local, "poet", path)}
    uploads = {name: step(local, name, 1) for name in ("diarist", "whaler")}
    close(local, 1, uploads)  # the poet's upload is lost
    for name, value in local.value.adapter.items():
        if name.rpartition(".")[0] in away:
            assert torch.equal(value, before[name])
            part = local.server.parameters[name]
            mean = f"{part.path}.{part.expert}"
            assert torch.equal(local.value.experts[mean], embeddings[mean])
        elif name.startswith("domain."):
            assert not torch.equal(value, before[name])


def test_mean_embeddings_are_those_of_a_naive_loop(start) -> None:
    local = start()
    upload = one_round(local, 0)["poet"]
    client = local.clients["poet"]
    seen = {path: [] for path in PATHS}
    model = client.model()
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(
            lambda module, inputs, path=path: seen[path].append(inputs[0][0])
        )
        for path in PATHS
    ]
    with torch.no_grad():
        for row in client.samples.ids:
            model(row[None, :-1])
    for hook in hooks:
        hook.remove()
    for path in PATHS:
        tokens = torch.cat(seen[path])
        W = upload["adapter"][f"projection/{path}"]
        mean = torch.stack([W @ x for x in tokens]).mean(0)
        assert torch.allclose(upload["tokens"][path], mean, atol=1e-5)
        for j in (j for j in range(6) if f"domain.{j}/{path}.A" in upload["adapter"]):
            A = upload["adapter"][f"domain.{j}/{path}.A"]
            mean = torch.stack([A @ x for x in tokens]).mean(0)
            assert torch.allclose(upload["experts"][f"{path}.{j}"], mean, atol=1e-5)


@pytest.mark.parametrize(("score_scale", "dim"), [("rank", 4), ("dim", 32)])
def test_experts_choose_by_relevance(start, score_scale, dim, monkeypatch) -> None:
    """Against the best of all assignments, tried one by one."""
    router = {"top_k": 1, "score_scale": score_scale}
    local = start(experts=3, clients_per_expert=1, min_experts=1, max_experts=1, router=router)
    given = []
    monkeypatch.setattr(
        "coterie.methods.fedamole.server.assign_all",
        lambda scores, bounds: given.append(scores) or assign_all(scores, bounds),
    )
    one_round(local, 0)
    local.message("poet")
    for path in PATHS:
        scores = []
        for j in range(3):
            e = local.value.experts[f"{path}.{j}"].tolist()
            tokens = [local.value.tokens[name][path].tolist() for name in WRITERS]
            dots = [sum(a * b for a, b in zip(e, t, strict=True)) / math.sqrt(dim) for t in tokens]
            total = sum(math.exp(dot) for dot in dots)
            scores.append([math.exp(dot) / total for dot in dots])
        assert given[-1][path] == pytest.approx(np.array(scores))
        orders = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
        best = max(
            (order for order in orders if len(set(order)) == 3),
            key=lambda order: sum(scores[j][client] for j, client in enumerate(order)),
        )
        assert [held(local, name, path) for name in WRITERS] == [[best.index(i)] for i in range(3)]


def test_assignments_depend_on_round_and_participants_alone(start) -> None:
    one, other = start(), start()
    one_round(one, 0)
    one_round(other, 0)
    one.open(one.config.turn(1), list(WRITERS))
    other.open(nth(1), ["diarist", "poet"])  # too few uploads; the round is opened again
    other.open(other.config.turn(1), list(WRITERS))
    fresh = start()
    fresh.value = fresh.value.restored(one.value.state())
    fresh.open(fresh.config.turn(1), list(WRITERS))
    for name in WRITERS:
        messages = [run.message(name).encode() for run in (one, other, fresh)]
        assert messages[0] == messages[1] == messages[2]


def test_a_client_that_comes_after_the_last_round_changes_nothing_for_others(start) -> None:
    local = start()
    local.leave("whaler")
    one_round(local, 0, ["diarist", "poet"])
    before = {name: local.message(name).encode() for name in ("diarist", "poet")}
    local.join("whaler", Message())
    local.clients["whaler"].receive(down(local, "whaler"))
    assert before == {name: local.message(name).encode() for name in ("diarist", "poet")}
    alone = start()
    alone.value = alone.value.restored(local.value.state())
    for run in (local, alone):  # nor for what comes after a restart
        run.open(nth(1), list(WRITERS))
    assert local.message("poet").encode() == alone.message("poet").encode()


def test_bounds_relax_when_clients_are_missing(start) -> None:
    local = start(clients_per_expert=2, min_experts=2, max_experts=4)
    one_round(local, 0)
    local.open(local.config.turn(1), ["poet"])  # k_c falls to 1, and b rises to 6
    assert held(local, "poet", PATHS[0]) == list(range(6))
    one_round(local, 2)


@pytest.mark.parametrize(
    "method",
    [
        {"assignment": "random"},
        {"assignment": "random-once"},
        {"assignment": "homogeneous"},
        {"shared_expert": False},
        {"router": {"kind": "vanilla"}, "assignment": "random"},
    ],
)
def test_ablations(start, method) -> None:
    local = start(**method)
    first = {n: held(local, n, PATHS[0]) for n in WRITERS if not local.open(nth(0), [*WRITERS])}
    up = one_round(local, 0)["poet"]
    second = {name: held(local, name, PATHS[0]) for name in WRITERS}
    if method.get("assignment") == "random-once":
        assert first == second
    if method.get("assignment") == "random":
        assert first != second
    if method.get("assignment") == "homogeneous":
        assert all(len(experts) == 4 for experts in second.values())
    assert bool(up["experts"]) == bool(up["tokens"]) == local.config.method.chooses
    assert any(n.startswith("shared/") for n in up["adapter"]) == method.get("shared_expert", True)
    assert any(n.startswith("gate/") for n in up["adapter"]) == ("router" in method)


def noisy_with(**privacy: float) -> dict[str, object]:
    return {"privacy": {"epsilon": 1.0, **privacy}}


def whole(upload: Message) -> torch.Tensor:
    """All that a client tells of its samples."""
    groups = ("experts", "tokens")
    return torch.cat([mean for g in groups for _, mean in sorted(upload[g].items())])


def test_private_means_are_clipped_and_noisy(start) -> None:
    plain, private = start(), start(embeddings=noisy_with(epsilon=1e9, clip=1e-3))
    mean, hidden = (one_round(local, 0)["poet"] for local in (plain, private))
    assert mean["tokens"]
    assert whole(mean).norm() > 0.01
    assert whole(hidden).norm() < 1.1e-3  # of vectors no longer than 0.001
    same = torch.cosine_similarity(whole(mean), whole(hidden), dim=0)
    assert same > 0.5  # with this epsilon there is next to no noise
    noisy = one_round(start(embeddings=noisy_with(epsilon=0.1, clip=1e-3)), 0)["poet"]
    assert whole(noisy).norm() > 10 * whole(hidden).norm()
    again = one_round(start(embeddings=noisy_with(epsilon=0.1, clip=1e-3)), 0)["poet"]
    assert not torch.equal(whole(noisy), whole(again))  # the run's seed does not give it away


def test_one_sample_moves_what_is_told_of_it_by_its_bound_and_no_adapter(
    start, monkeypatch
) -> None:
    """Two adjacent data sets, the same downloads, five rounds: the bound that the noise assumes."""
    monkeypatch.setattr("coterie.methods.fedamole.client.noise_for", lambda *_: 1e-12)
    share, clip = 0.1, 0.5
    local = start(embeddings={"share": share, **noisy_with(clip=clip)})
    one: Any = local.clients["poet"]
    context, count = one.context, len(one.samples.ids)
    local_data = start(assignment="random").clients["poet"].context.data  # with the embedding set
    exchanged = local_data.train.ids.clone()
    size = context.window + 1
    pieces = exchanged.unfold(0, size, size)
    at = (pieces == one.samples.ids[0]).all(1).nonzero()[0, 0]
    pieces[at] = pieces[at].flip(0)  # one sample of the embedding set is another
    data = replace(context.data, train=replace(local_data.train, ids=exchanged))
    other = FedAMoLEClient(one.settings, replace(context, data=data, ledger=Ledger()))
    moved = []
    for round in range(5):
        local.open(local.config.turn(round), [*WRITERS])
        other.receive(down(local, "poet"))
        other.train(local.config.turn(round))
        turn = local.config.turn(round)
        theirs, uploads = other.upload(turn), {n: step(local, n, round) for n in WRITERS}
        mine = uploads["poet"]
        assert all(torch.equal(t, theirs["adapter"][n]) for n, t in mine["adapter"].items())
        moved.append((whole(mine) - whole(theirs)).norm().item())
        close(local, round, uploads)
    assert min(moved) > 0
    assert max(moved) <= 2 * clip / count


def test_nothing_is_trained_on_the_embedding_set(start) -> None:
    client: Any = start(embeddings={"share": 0.3}).clients["poet"]
    train, samples = client.context.data.train, client.samples
    whole_text = start(assignment="random").clients["poet"].context.data.train.ids
    assert len(train.ids) + samples.ids.numel() == len(whole_text)
    together = torch.cat([train.ids, samples.ids.flatten()])
    assert torch.equal(together.sort().values, whole_text.long().sort().values)


def test_a_restored_client_draws_the_noise_it_would_have_drawn(start) -> None:
    local = start(embeddings=noisy_with())
    local.open(local.config.turn(0), [*WRITERS])
    state, download = local.clients["poet"].state(), down(local, "poet")
    upload = step(local, "poet", 0)
    other = start(embeddings=noisy_with())
    other.clients["poet"].restore(state)
    assert step(other, "poet", 0, download).encode() == upload.encode()


def test_a_round_that_is_opened_again_is_told_of_with_other_noise(start) -> None:
    """With equal noise, the difference of the two uploads would have none."""
    local = start(embeddings=noisy_with(epsilon=1e-3, clip=1e-6))  # as good as nothing but noise
    client = local.clients["poet"]
    state, told = client.state(), []
    for names in (["diarist", "poet", "whaler"], ["poet", "whaler"]):
        local.open(local.config.turn(0), names)
        client.restore(state)
        upload = step(local, "poet", 0)
        told.append(torch.cat([upload["tokens"][path] for path in PATHS]))
    assert not torch.allclose(*told, rtol=0.1, atol=0)


def test_a_download_of_unknown_experts_is_refused(start) -> None:
    local = start()
    local.open(local.config.turn(0), [*WRITERS])
    good = down(local, "poet")
    client, tensors, values = local.clients["poet"], good["adapter"], good.values
    name = next(name for name in tensors if name.startswith("domain."))
    held = values["held"]
    for adapter, told in (
        (tensors, {}),
        (tensors, {"count": 6}),
        (tensors, {"held": held}),
        (tensors, {**values, "count": 10**9}),
        (tensors, {**values, "count": 1}),
        (tensors, {**values, "count": True}),
        (tensors, {**values, "held": {**held, PATHS[0]: [*held[PATHS[0]], 6]}}),
        (tensors, {**values, "held": {**held, PATHS[0]: held[PATHS[0]][::-1]}}),
        (tensors, {**values, "held": {**held, PATHS[0]: held[PATHS[0]][:-1]}}),
        (tensors, {**values, "held": {PATHS[0]: held[PATHS[0]]}}),
        (tensors, {**values, "held": {**held, "lm_head": [3]}}),
        ({**tensors, name: tensors[name][:1]}, values),
        ({**tensors, "domain.3/lm_head.A": tensors[name]}, values),
    ):
        with pytest.raises(CoterieError):
            client.receive(Message(0, {"adapter": adapter}, told))
    upload = step(local, "poet", 0, good)
    with pytest.raises(MessageError, match="was not expected"):
        close(local, 0, {"whaler": upload})


@pytest.mark.parametrize(
    ("settings", "clients", "sentence"),
    [
        ({"experts": 30}, 3, "30 experts"),
        ({"clients_per_expert": 5}, 3, "Each expert needs 5 clients, but the run has only 3"),
        ({"experts": 2}, 10, "2 experts"),
    ],
)
def test_what_cannot_be_assigned_is_refused_at_the_start(settings, clients, sentence) -> None:
    method = method_from({"name": "fedamole", **settings})
    with pytest.raises(CoterieError, match=sentence):
        method.check(RunFacts(tuple(map(str, range(clients))), public=False))


def test_more_experts_for_a_token_than_there_are_is_an_error() -> None:
    with pytest.raises(ValidationError, match="top_k is 9, but there are only 6 experts"):
        method_from({"name": "fedamole", "experts": 6, "router": {"top_k": 9}})
    with pytest.raises(ValidationError, match="vanilla router has no embeddings"):
        method_from({"name": "fedamole", "router": {"kind": "vanilla"}})


def test_padding_is_in_no_mean(values, questions) -> None:
    run = parse(
        values(
            method={"name": "fedamole", "experts": 6, "embeddings": {"share": 0.3}},
            data_root=str(questions),
            data={"window": 48, "instructions": {"template": "plain"}},
            clients=[{"name": name, "path": f"{name}.jsonl"} for name in WRITERS],
        )
    )
    local = joined(run)
    upload = one_round(local, 0)["poet"]
    client = local.clients["poet"]
    assert isinstance(client, FedAMoLEClient)
    samples = client.samples
    assert isinstance(samples, Batch)
    assert samples.real is not None
    assert not samples.real.all()
    model, seen = client.model(), []
    hook = model.get_submodule(PATHS[0]).register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0][0])
    )
    with torch.no_grad():
        for row, real in zip(samples.ids, samples.real, strict=True):
            model(row[None, : int(real.sum())])
    hook.remove()
    mean = (torch.cat(seen) @ upload["adapter"][f"projection/{PATHS[0]}"].t()).mean(0)
    assert torch.allclose(upload["tokens"][PATHS[0]], mean, atol=1e-5)
