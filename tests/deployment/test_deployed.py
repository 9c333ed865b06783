"""Server and workers over a network that loses, repeats and delays: the bits of one process, and
no round twice."""

import contextlib
import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looped import NAMES, Killed, Notes, Spoilt, assert_private, kill, narrow, result_of, steps

import coterie
from coterie.config.run import parse
from coterie.deployment.client import Worker
from coterie.deployment.status import ServerWatch
from coterie.errors import CoterieError
from coterie.messages import Message
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_as_local, deploy, folder, server, site, workers


@pytest.fixture(scope="module")
def run(config):
    return config(evaluation={"every": 1}, deployment={"quorum": 3, "deadline": 60})


@pytest.fixture(scope="module")
def local(run, tmp_path_factory) -> RunFolder:
    return RunFolder(coterie.run(run, out=tmp_path_factory.mktemp("local") / "run").path)


def deployed(run: coterie.RunConfig, **settings: Any) -> coterie.RunConfig:
    """Return the run with other settings of its deployment."""
    return run.model_copy(update={"deployment": run.deployment.model_copy(update=settings)})


def test_the_server_learns_no_figure_unless_the_run_shares_them(run, tmp_path) -> None:
    deploy(run, tmp_path / "kept")
    names = {m["name"].split("/")[0] for m in RunFolder(tmp_path / "kept/server").metrics()}
    assert names == {"bytes", "change", "seconds"}  # `change` is the server's own measure
    deploy(deployed(run, share_metrics=True), tmp_path / "shared")
    server_folder = RunFolder(tmp_path / "shared/server")
    assert server_folder.result is not None
    assert set(server_folder.result["trained"]) == set(NAMES)
    assert not (server_folder.path / "scores").exists()  # of windows it learns none
    assert {m["client"] for m in server_folder.metrics() if "loss" in m["name"]} == set(NAMES)


@pytest.mark.slow
def test_prompts_with_answers_over_a_network(values, questions, tmp_path) -> None:
    """Use a template that clients do not have."""
    template = tmp_path / "ask.jinja"
    template.write_text("{{ instruction }}? Yes or no:\n")
    instructions = {"template": str(template), "choices": ["yes", "no"]}
    texts = {
        "data_root": str(questions),
        "data": {"window": 48, "instructions": instructions},
        "clients": [{"name": name, "path": f"{name}.jsonl"} for name in NAMES],
    }
    method = {"name": "fedamole", "experts": 6}
    run = parse(values(method=method, rounds=2, evaluation={"generate": 3}, **texts))
    template.unlink()
    local = coterie.run(run, out=tmp_path / "local")
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, RunFolder(local.path))
    deploy(deployed(run, share_metrics=True), tmp_path / "shared")
    result = result_of(RunFolder(tmp_path / "shared" / "server"))
    for name in NAMES:
        score = result["trained"][name]
        assert score == local.results["fedamole"]["trained"][name]
        assert {"accuracy", "exact_match", "rouge_l", "perplexity"} <= score.keys()


def test_lost_replies_are_answered_from_store(run, local, tmp_path) -> None:
    lost = set()

    def lose(name: str, order: Order) -> bool:
        first = (name, order.kind, order.turn) not in lost
        lost.add((name, order.kind, order.turn))
        return first and order.kind != "join"

    def reconnect(loop: Loop) -> None:
        for name in NAMES:
            loop.reconnect(name)

    loop = deploy(run, tmp_path, lose=lose, events=dict.fromkeys(range(3, 100, 3), reconnect))
    assert max(steps(loop).values()) > 1  # orders were repeated
    assert_as_local(run, tmp_path, local)  # and not obeyed twice


class Hasty(Loop):
    """Clients do at once what they are told, and leave with the last reply."""

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        ticket = super().send(client, data, turn, seconds)
        self.pending[ticket] = client, self.workers[client].answer(data)
        if unseal(Order, data)[0].kind == "finish":
            self.away.add(client)
        return ticket

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        for ticket in list(tickets):
            if ticket in self.pending:
                yield ticket, self.pending.pop(ticket)[1]


def test_a_client_that_leaves_with_its_reply_has_replied(run, local, tmp_path) -> None:
    loop = Hasty(workers(run, tmp_path))
    server(run, tmp_path / "server", loop).rounds()
    assert not loop.pending
    assert len([o for _, o in loop.orders if o.kind == "finish"]) == len(NAMES)
    assert_as_local(run, tmp_path, local)


def test_an_upload_that_did_not_count_is_undone(run, tmp_path) -> None:
    """Let the poet be late in the second of three rounds, with a quorum of two."""
    quorum = deployed(run, quorum=2, deadline=0.001)
    loop = deploy(quorum, tmp_path, lose=lambda name, order: (name, order.turn) == ("poet", 1))
    counted = {o.turn: o.counted for n, o in loop.orders if n == "poet" and o.kind == "step"}
    assert counted == {0: None, 1: 0, 2: 0}
    losses = [m for m in folder(run, tmp_path, "poet").metrics() if m["name"] == "loss/experts"]
    assert {m["round"] for m in losses} == {0, 2}


def test_a_client_that_joins_late_takes_part_from_the_next_round(run, tmp_path) -> None:
    quorum = deployed(run, quorum=2)
    loop = deploy(
        quorum, tmp_path, away={"whaler"}, events={1: lambda network: network.reconnect("whaler")}
    )
    rounds = sorted(r for name, r in steps(loop) if name == "whaler")
    assert rounds
    assert rounds[0] > 0
    assert folder(run, tmp_path, "whaler").result is not None


def not_a_number(reply: Reply, body: bytes) -> bytes:
    message = Message.decode(body)
    tensors = {n: torch.full_like(t, torch.nan) for n, t in message["adapter"].items()}
    return seal(reply, Message(message.exchange, {"adapter": tensors}).encode())


def with_entries(reply: Reply, body: bytes) -> bytes:
    """Return a reply with a score that is no number; only JSON can hold it."""
    entry = {"round": 1, "name": "test/trained", "value": "x"}
    text = json.dumps(reply.model_dump(exclude_none=True) | {"entries": [entry]}).encode()
    return len(text).to_bytes(4, "big") + text + body


SPOILED: dict[str, Callable[[Reply, bytes], bytes]] = {
    "nan": not_a_number,
    "shape": narrow,
    "bytes": lambda _, body: np.random.default_rng(0).bytes(len(body)),
    "other run": lambda reply, body: seal(reply.model_copy(update={"run": "f" * 16}), body),
    "other client": lambda reply, body: seal(reply.model_copy(update={"client": "diarist"}), body),
    "none": lambda reply, _: seal(reply),
    "entries": with_entries,
}


@pytest.mark.parametrize("fault", SPOILED)
def test_an_invalid_upload_is_refused_and_the_run_continues(fault, run, tmp_path) -> None:
    quorum, notes = deployed(run, quorum=2, deadline=0.001), Notes()
    loop = Loop(workers(quorum, tmp_path), change=Spoilt(SPOILED[fault], 1, 9))
    server(quorum, tmp_path / "server", loop, notes).rounds()
    [refusal] = [line for line in notes.lines if "rejected" in line]
    assert "poet" in refusal
    assert all(folder(run, tmp_path, name).result is not None for name in NAMES)


def test_a_client_that_fails_holds_nobody_up(run, tmp_path, monkeypatch) -> None:
    class Failing(Worker):
        def _obey(self, order: Order, body: bytes) -> bytes:
            if order.kind == "step" and order.turn == 1:
                raise CoterieError("no")
            return super()._obey(order, body)

    clients = workers(run, tmp_path)
    clients["poet"] = Failing(site(run, "poet", tmp_path))
    loop = Loop(clients)
    server(deployed(run, quorum=2, deadline=1e6), tmp_path / "server", loop).rounds()
    assert steps(loop)["poet", 1] == 1


def test_an_excluded_client_gets_no_order_until_the_next_round(run, tmp_path) -> None:
    loop = Loop(workers(run, tmp_path), lose=lambda name, order: (name, order.turn) == ("poet", 1))

    complete: list[str] = []

    class Gone(ServerWatch):
        def note(self, text: str) -> None:
            if text.startswith("round 2/3: "):  # too few are left, for some turns
                complete.append(text)
                loop.away = {"diarist", "whaler"}
                for name in loop.away:
                    leader.seats[name].present = None
                loop.events = {loop.turns + 5: lambda network: network.away.clear()}

    leader = server(deployed(run, quorum=2, deadline=0.001), tmp_path / "server", loop, Gone())
    leader.rounds()
    assert len(complete) == 1
    asked = [(order.kind, order.turn) for name, order in loop.orders if name == "poet"]
    assert asked == [("join", 0), ("step", 0), ("step", 1), ("step", 2), ("finish", 3)]


def test_orders_that_no_client_obeys(run, tmp_path) -> None:
    worker = Worker(site(run, "poet", tmp_path))
    order = Order(run="0" * 16, client="poet", kind="step", turn=0)
    assert unseal(Reply, worker.answer(seal(order)))[0].fault == "unknown run"
    other = order.model_copy(update={"client": "whaler"})
    assert unseal(Reply, worker.answer(seal(other)))[0].fault == "refused"
    old = order.model_copy(update={"kind": "join", "protocol": 1})
    assert unseal(Reply, worker.answer(seal(old)))[0].fault == "protocol"
    for data in (b"", b"\0\0\0\2{}", b"\xff" * 100, seal(order)[:-1]):
        with pytest.raises(CoterieError):
            worker.answer(data)


def test_a_client_whose_disk_is_full_keeps_its_state(run, tmp_path, monkeypatch) -> None:
    save = RunFolder.save

    def saves(self, rounds, states, **files):
        if "poet" in self.path.name and rounds == 2:
            raise CoterieError("Could not write: no space left on device.")
        save(self, rounds, states, **files)

    monkeypatch.setattr(RunFolder, "save", saves)
    loop = deploy(deployed(run, quorum=2, deadline=0.001), tmp_path)
    counted = {o.turn: o.counted for n, o in loop.orders if n == "poet" and o.kind == "step"}
    assert counted[1] == 0
    assert "finish" in {o.kind for n, o in loop.orders if n == "poet"}


def test_a_client_that_lost_its_folder_begins_anew(run, tmp_path) -> None:
    def lost(loop: Loop) -> None:
        shutil.rmtree(folder(run, tmp_path, "poet").path)
        loop.reconnect("poet", Worker(site(run, "poet", tmp_path)))

    deploy(run, tmp_path, events={4: lost})
    assert folder(run, tmp_path, "poet").result is not None


def test_a_client_with_another_base_is_not_let_in(run, bases, tmp_path) -> None:
    loop = Loop(workers(run, tmp_path), events={5: kill})
    strange = dataclasses.replace(site(run, "poet", tmp_path), base=str(bases / "llama"))
    loop.workers["poet"] = Worker(strange)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", loop).rounds()
    assert not steps(loop)


@pytest.mark.slow
def test_any_bytes_are_read_or_refused_with_our_error(run, tmp_path) -> None:
    worker = Worker(site(run, "poet", tmp_path))
    chance = np.random.default_rng(0)
    order = Order(run="0" * 16, client="poet", kind="step", turn=3, counted=2, protocol=0)
    whole = np.frombuffer(seal(order, b"body" * 20), dtype=np.uint8)
    for _ in range(100_000):
        data = whole.copy()
        for place in chance.integers(0, len(data), chance.integers(1, 5)):
            data[place] = chance.integers(0, 256)
        cut = data[: chance.integers(0, len(data) + 1)] if chance.random() < 0.3 else data
        with contextlib.suppress(CoterieError):
            assert unseal(Reply, worker.answer(cut.tobytes()))[0].fault in (
                "unknown run",
                "refused",
            )


def test_the_base_is_loaded_once(run, tmp_path, monkeypatch) -> None:
    import coterie.deployment.client as module

    loads = Counter[str]()
    load = module.load_base
    monkeypatch.setattr(module, "load_base", lambda *a: (loads.update(["base"]), load(*a))[1])
    deploy(run, tmp_path)
    assert loads["base"] == len(NAMES)


def test_nothing_personal_is_in_any_message(run, tmp_path) -> None:
    travelled = b"".join(deploy(run, tmp_path).seen)
    for name in NAMES:
        state = folder(run, tmp_path, name).load(f"client-{name}")
        assert len(state.parts) == 1  # local training's moments
        text = (Path(run.data_root) / "poet.txt").read_bytes() if name == "poet" else b""
        assert_private(state, text, travelled)
    assert str(tmp_path).encode() not in travelled
    assert run.data_root.encode() not in travelled
