"""FedAMoLE against naive versions: what clients tell of their samples, and what the server does."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tensors import close_to, mean_of
from turns import nth

from coterie.config.run import parse
from coterie.engines.local import LocalRun
from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.methods.contract import RunFacts
from coterie.methods.fedamole.assignment import Bounds, assign, assign_all, relevance
from coterie.methods.fedamole.client import FedAMoLEClient
from coterie.methods.registry import method_from
from coterie.privacy.ledger import Ledger
from coterie.testing.rounds import close, down, joined, one_round, step

WRITERS = ("diarist", "poet", "whaler")
PATHS = ("transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn")
Start = Callable[..., LocalRun]


@pytest.fixture
def start(values) -> Start:
    """A run's sides, joined; keyword arguments are the method's, except those in `changes`."""

    def make(changes: Any = None, **method: object) -> LocalRun:
        settings = {"name": "fedamole", "experts": 6, "attention": {"rank": 4}, **method}
        return joined(parse(values(method=settings, rounds=5, **changes or {})))

    return make


def held(local: LocalRun, client: str, path: str) -> list[int]:
    tensors = down(local, client)["adapter"]
    return [j for j in range(6) if f"domain.{j}/{path}.A" in tensors]


def test_shared_parts_are_averaged_over_all_and_experts_over_their_holders(start) -> None:
    local = start()
    before = dict(local.value.adapter)
    uploads = [upload["adapter"] for upload in one_round(local, 0).values()]
    assert close_to(local.value.adapter, mean_of(uploads), atol=1e-7)
    for name, value in local.value.adapter.items():
        holders = sum(name in upload for upload in uploads)
        assert holders == (2 if name.startswith("domain.") else 3)
        assert name.startswith("projection/") or not torch.equal(value, before[name])


def inputs(client: Any, path: str, rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the inputs of a layer for rows that are computed one by one."""
    model, seen = client.model(), []
    layer = model.get_submodule(path)
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        for row in rows:
            model(row[None])
    hook.remove()
    return torch.cat(seen)


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


def test_mean_embeddings_are_those_of_a_naive_loop(start, questions) -> None:
    # Padding is in no mean.
    data = {"window": 48, "instructions": {"template": "plain"}}
    clients = [{"name": name, "path": f"{name}.jsonl"} for name in WRITERS]
    local = start({"data_root": str(questions), "data": data, "clients": clients})
    upload, client = one_round(local, 0)["poet"], local.clients["poet"]
    samples = client.samples
    assert not samples.real.all()
    for path in PATHS:
        rows = zip(samples.ids, samples.real, strict=True)
        tokens = inputs(client, path, (row[: int(real.sum())] for row, real in rows))
        matrices = {path: upload["adapter"][f"projection/{path}"]}
        for j in (j for j in range(6) if f"domain.{j}/{path}.A" in upload["adapter"]):
            matrices[f"{path}.{j}"] = upload["adapter"][f"domain.{j}/{path}.A"]
        means = {n: torch.stack([M @ x for x in tokens]).mean(0) for n, M in matrices.items()}
        sent = {**upload["tokens"], **upload["experts"]}
        assert close_to({name: sent[name] for name in means}, means, atol=1e-5)


@pytest.mark.parametrize(("score_scale", "dim"), [("rank", 4), ("dim", 32)])
def test_experts_choose_by_relevance(start, score_scale, dim, monkeypatch) -> None:
    # Relevance and assignments are compared with naive versions in test_assignment.py.
    router = {"top_k": 1, "score_scale": score_scale}
    local = start(experts=3, clients_per_expert=2, min_experts=1, max_experts=3, router=router)
    given = []
    monkeypatch.setattr(
        "coterie.methods.fedamole.server.assign_all",
        lambda scores, bounds: given.append(scores) or assign_all(scores, bounds),
    )
    one_round(local, 0)
    local.message("poet")
    for path in PATHS:
        experts = np.stack([local.value.experts[f"{path}.{j}"] for j in range(3)])
        scores = relevance(experts, np.stack([local.value.tokens[n][path] for n in WRITERS]), dim)
        assert given[-1][path] == pytest.approx(scores)
        best = assign(scores, Bounds(2, 1, 3))
        assert [held(local, name, path) for name in WRITERS] == [
            np.flatnonzero(column).tolist() for column in best.T
        ]


def test_assignments_depend_on_round_and_participants_alone(start) -> None:
    first, other = start(), start()
    one_round(first, 0)
    one_round(other, 0)
    first.open(first.config.turn(1), list(WRITERS))
    other.open(nth(1), ["diarist", "poet"])  # too few uploads; the round is opened again
    other.open(other.config.turn(1), list(WRITERS))
    fresh = start()
    fresh.value = fresh.value.restored(first.value.state())
    fresh.open(fresh.config.turn(1), list(WRITERS))
    for name in WRITERS:
        messages = [run.message(name).encode() for run in (first, other, fresh)]
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


@pytest.mark.parametrize(
    "method",
    [
        *({"assignment": name} for name in ("random", "random-once", "homogeneous")),
        {"shared_expert": False},
        {"router": {"kind": "vanilla"}, "assignment": "random"},
    ],
)
def test_ablations(start, method) -> None:
    local, assignment = start(**method), method.get("assignment")
    first = {n: held(local, n, PATHS[0]) for n in WRITERS if not local.open(nth(0), [*WRITERS])}
    up = one_round(local, 0)["poet"]
    second = {name: held(local, name, PATHS[0]) for name in WRITERS}
    assert (first == second) == (assignment == "random-once") or assignment in (None, "homogeneous")
    assert assignment != "homogeneous" or {len(experts) for experts in second.values()} == {4}
    assert bool(up["experts"]) == bool(up["tokens"]) == local.config.method.chooses
    assert any(n.startswith("shared/") for n in up["adapter"]) == method.get("shared_expert", True)
    assert any(n.startswith("gate/") for n in up["adapter"]) == ("router" in method)


def noisy_with(**privacy: float) -> dict[str, object]:
    return {"privacy": {"epsilon": 1.0, **privacy}}


def whole(upload: Message) -> torch.Tensor:
    """Return all values in an upload that describe a client's samples."""
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


def test_one_sample_changes_uploads_by_its_bound_and_no_adapter(start, monkeypatch) -> None:
    # The two data sets are adjacent; the noise is calibrated to this bound.
    monkeypatch.setattr("coterie.methods.fedamole.client.noise_for", lambda *_: 1e-12)
    share, clip = 0.1, 0.5
    local = start(embeddings={"share": share, **noisy_with(clip=clip)})
    poet: Any = local.clients["poet"]
    context, count = poet.context, len(poet.samples.ids)
    local_data = start(assignment="random").clients["poet"].context.data  # with the embedding set
    exchanged = local_data.train.ids.clone()
    size = context.window + 1
    pieces = exchanged.unfold(0, size, size)
    at = (pieces == poet.samples.ids[0]).all(1).nonzero()[0, 0]
    pieces[at] = pieces[at].flip(0)  # one sample of the embedding set is another
    data = replace(context.data, train=replace(local_data.train, ids=exchanged))
    other = FedAMoLEClient(poet.settings, replace(context, data=data, ledger=Ledger()))
    moved = []
    for round in range(5):
        local.open(local.config.turn(round), [*WRITERS])
        other.receive(down(local, "poet"))
        other.train(local.config.turn(round))
        turn = local.config.turn(round)
        adjacent, uploads = other.upload(turn), {n: step(local, n, round) for n in WRITERS}
        own = uploads["poet"]
        assert all(torch.equal(t, adjacent["adapter"][n]) for n, t in own["adapter"].items())
        moved.append((whole(own) - whole(adjacent)).norm().item())
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


def test_a_round_that_is_opened_again_is_told_of_with_other_noise(start) -> None:
    # With equal noise, the difference of the two uploads would have no noise.
    local = start(embeddings=noisy_with(epsilon=1e-3, clip=1e-6))  # as good as nothing but noise
    client = local.clients["poet"]
    state, vectors = client.state(), []
    for names in (["diarist", "poet", "whaler"], ["poet", "whaler"]):
        local.open(local.config.turn(0), names)
        client.restore(state)
        upload = step(local, "poet", 0)
        vectors.append(torch.cat([upload["tokens"][path] for path in PATHS]))
    assert not torch.allclose(*vectors, rtol=0.1, atol=0)


def test_a_download_of_unknown_experts_is_refused(start) -> None:
    local = start()
    local.open(local.config.turn(0), [*WRITERS])
    good = down(local, "poet")
    client, tensors, values = local.clients["poet"], good["adapter"], good.values
    name = next(name for name in tensors if name.startswith("domain."))
    held = values["held"]
    first = held[PATHS[0]]
    wrong = [{}, {"count": 6}, {"held": held}]
    wrong += [{**values, "count": count} for count in (10**9, 1, True)]
    experts = [{PATHS[0]: each} for each in ([*first, 6], first[::-1], first[:-1])]
    wrong += [{**values, "held": {**held, **other}} for other in (*experts, {"lm_head": [3]})]
    messages = [(tensors, placed) for placed in (*wrong, {**values, "held": {PATHS[0]: first}})]
    messages.append(({**tensors, name: tensors[name][:1]}, values))
    messages.append(({**tensors, "domain.3/lm_head.A": tensors[name]}, values))
    for adapter, placed in messages:
        with pytest.raises(CoterieError):
            client.receive(Message(0, {"adapter": adapter}, placed))
    upload = step(local, "poet", 0, good)
    with pytest.raises(MessageError, match="was not expected"):
        close(local, 0, {"whaler": upload})


@pytest.mark.parametrize(
    ("settings", "clients", "sentence"),
    [
        ({"experts": 30}, 3, "30 experts"),
        ({"clients_per_expert": 5}, 3, "Each expert needs 5 clients, but the run has only 3"),
        ({"experts": 2}, 10, "2 experts"),
        ({"experts": 6, "router": {"top_k": 9}}, 3, "top_k is 9, but there are only 6 experts"),
        ({"router": {"kind": "vanilla"}}, 3, "vanilla router has no embeddings"),
    ],
)
def test_what_cannot_be_assigned_is_refused_at_the_start(settings, clients, sentence) -> None:
    with pytest.raises((CoterieError, ValidationError), match=sentence):
        method_from({"name": "fedamole", **settings}).check(
            RunFacts(tuple(map(str, range(clients))), public=False)
        )
