"""A client takes part in what was agreed to and opens what it was given, whatever a server asks."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from looped import Notes

from coterie.cli import app
from coterie.cli.console import in_words
from coterie.config.deployed import load_agreed
from coterie.config.run import RunConfig, parse
from coterie.data.sandbox import Sandbox
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.deployment.status import Status
from coterie.deployment.terms import agreed_terms, differences, requested_terms
from coterie.errors import CoterieError
from coterie.federation.participants import public_digest
from coterie.messages import MessageError
from coterie.messages.envelope import FAULT_MESSAGES, Order, Reply, unseal
from coterie.messages.envelope import seal as sealed
from coterie.messages.formats import PROTOCOL
from coterie.runs import RunFolder
from coterie.testing.loop import RUN, Loop, deploy, server, site, workers

Change = Callable[[dict[str, Any]], None]
POWER = "{{ 9**(9**9) }}"


def order(run: RunConfig, change: Change = lambda values: None, **more: Any) -> Order:
    values = json.loads(json.dumps(run.visible_to("poet")))
    change(values)
    header = {"run": RUN, "client": "poet", "kind": "join", "turn": 0, "protocol": PROTOCOL}
    return Order.model_validate({**header, "config": values, **more})


def asked(run: RunConfig, place: Site, *orders: Order) -> tuple[Worker, list[Reply]]:
    """Return a client's replies to several orders."""
    worker = Worker(place)
    replies = [unseal(Reply, worker.answer(sealed(order)))[0] for order in orders]
    worker.close()
    return worker, replies


def setting(key: str, value: Any) -> Change:
    """Return a change of a run: a key, such as `data.public`, has another value."""

    def change(values: dict[str, Any]) -> None:
        *sections, last = key.split(".")
        for section in sections:
            values = values.setdefault(section, {})
        values[last] = value

    return change


SHARES = setting("deployment.share_metrics", True)
SHARED = "share_metrics: agreed false, requested true"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (setting("training.steps", 500), "training.steps: agreed 2, requested 500"),
        (SHARES, SHARED),
        (setting("method", {"name": "fedavg"}), 'method.name: agreed "comigs-1g1s", requested "f'),
        (setting("method.mlp.rank", 16), "method.mlp.rank: agreed 8, requested 16"),
    ],
)
def test_a_client_takes_part_only_in_what_was_agreed(change, difference, config, tmp_path) -> None:
    run = config()
    agreed = replace(site(run, "poet", tmp_path), agreed=agreed_terms(run, "poet"))
    worker, [reply] = asked(run, agreed, order(run, change))
    assert reply.fault == "terms"
    assert difference in worker.error
    assert worker.finished
    assert not list(tmp_path.glob("*poet*"))  # nothing was loaded or begun
    worker, [reply] = asked(
        run, agreed, order(run, setting("deployment.deadline", 7))
    )  # which is the server's affair
    assert (reply.fault, worker.error) == (None, "")


def test_somebody_is_asked_once_and_what_was_agreed_holds_after_a_restart(config, tmp_path) -> None:
    run, questions = config(), []

    def agrees(order: Order, config: RunConfig) -> bool:
        questions.append(dict(in_words(order, config)))
        return True

    asking = replace(site(run, "poet", tmp_path), agrees=agrees)
    _, replies = asked(run, asking, order(run), order(run))
    assert [reply.fault for reply in replies] == [None, None]
    _, replies = asked(run, asking, order(run))  # another process
    assert replies[0].fault is None
    [words] = questions
    assert words["method"].startswith("comigs-1g1s: ")
    assert "LoRA pairs of the generalists" in words["sent to the server"].splitlines()[1]
    assert words["passed on to other clients"] == "nothing"
    assert words["losses"].endswith("stay on this machine")
    worker, replies = asked(run, asking, order(run, SHARES))  # the same run, all at once
    assert replies[0].fault == "terms"
    assert SHARED in worker.error
    assert len(questions) == 1
    narrow = {**agreed_terms(run, "poet"), "share_metrics": True}  # a run file that differs
    pinned = replace(site(run, "poet", tmp_path), agreed=narrow)
    worker, replies = asked(run, pinned, order(run))
    assert "share_metrics: agreed true, requested false" in worker.error


def test_long_values_are_compared_to_their_ends() -> None:
    """Check that an agreement shows only the beginning of a value but covers the whole value."""
    agreed = {"data": {"chat_template": "{{ messages }}" * 20}}
    requested = {"data": {"chat_template": "{{ messages }}" * 20 + "more"}}
    assert len(differences(agreed, requested)) == 1
    assert len(differences(agreed, requested)[0]) < 300
    assert differences(agreed, agreed) == []


def test_whoever_does_not_agree_sends_nothing(config, tmp_path) -> None:
    run = config()
    worker = Worker(replace(site(run, "poet", tmp_path), agrees=lambda *_: False))
    reply, body = unseal(Reply, worker.answer(sealed(order(run))))
    assert (reply.fault, reply.base, body) == ("declined", "", b"")
    assert worker.declined
    assert worker.finished
    assert worker.error.startswith("You declined the run. The server was told that you declined")
    assert not list(tmp_path.glob("*poet*"))


NAMED: dict[str, dict[str, Any]] = {
    "diary": {"data.public": "/PATH"},
    "the_base": {"base": "/PATH"},
    "a_base_beside_those_that_ship": {"base": "../" * 19 + "../PATH"},
    "a_template": {"data.instructions": {"template": "/PATH/diary.txt"}},
    "a_chat_template": {"data.messages": {}, "data.chat_template": "/PATH/diary.txt"},
    "an_earlier_run": {"data.preferences": {}, "training.dpo": {"reference": "/PATH"}},
    "the_texts": {"clients": [{"name": "poet", "path": "/PATH"}]},
    "a_division": {"divide": {"source": "/PATH", "clients": 2}},
    "the_servers_test": {"server": {"test": "/PATH"}},
    "a_root": {"data_root": "/PATH"},
}
"""Settings by which a server names the path /PATH of a client."""
OPENED: list[str] = []
"""The paths of files that this process has opened, in whatever way."""


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Note the path of a file that is opened."""
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.fspath(arguments[0]))


sys.addaudithook(note)


@pytest.mark.parametrize("name", NAMED)
def test_a_server_names_no_file_of_a_client(name, config, bases, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "diary.txt").write_text("Dear diary, {{ nothing }}. " * 400, encoding="utf-8")
    for path in Path(bases / "gpt2").iterdir():
        (secret / path.name).write_bytes(path.read_bytes())
    run = config(base="tiny-gpt2")
    place = site(run, "poet", tmp_path / "out")
    named = json.loads(json.dumps(NAMED[name]).replace("/PATH", str(secret)))

    def change(values: dict[str, Any]) -> None:
        for key, value in named.items():
            setting(key, value)(values)

    OPENED.clear()
    worker, [reply] = asked(run, place, order(run, change))
    if name == "diary":  # it is there, and says nothing: what is public has a hash
        assert worker.run is not None
        assert worker.run.config.data.public is None
    else:
        assert reply.fault in ("refused", "failed", "unable")
    assert OPENED
    assert not any(str(secret) in os.path.realpath(path) for path in OPENED)


def test_a_public_text_is_the_clients_own_copy_of_the_same(config, texts, tmp_path) -> None:
    run = config(method="pcl-3", data={"public": "whaler.txt", "window": 16})
    digest = public_digest(run)
    place = site(run, "poet", tmp_path)
    assert place.public == str(texts / "whaler.txt")
    _, [reply] = asked(run, place, order(run, public=digest))
    assert reply.fault is None
    bare = replace(place, out=tmp_path / "bare", public=None)
    with pytest.raises(CoterieError, match="give this machine's copy with --public"):
        bare.config(order(run, public=digest))
    other = replace(place, out=tmp_path / "other", public=str(texts / "poet.txt"))
    _, [reply] = asked(run, other, order(run, public=digest))
    assert reply.fault == "public"
    assert FAULT_MESSAGES[reply.fault].startswith(
        "the public text on the client's machine is missing"
    )
    loop = deploy(run, tmp_path / "whole")
    orders = [order for _, order in loop.orders if order.kind == "join"]
    assert {order.public for order in orders} == {digest}
    assert not any(str(texts).encode() in data for data in loop.seen)


def test_a_run_file_is_agreed_to_as_its_server_reads_it(config, values, tmp_path) -> None:
    run = values(base="tiny-gpt2", deployment={"quorum": 2})
    del run["name"]  # then it is that of the file, which may differ
    path = tmp_path / "from-the-server.yaml"
    path.write_text(yaml.safe_dump({**run, "clients": [{"name": n} for n in ("poet", "zed")]}))
    agreed = agreed_terms(load_agreed(path, "poet"), "poet")
    known = parse({**run, "clients": [{"name": n, "path": "-"} for n in ("poet", "zed")]})
    assert differences(agreed, requested_terms(order(known))) == []
    path.write_text(yaml.safe_dump({k: v for k, v in run.items() if k != "clients"}))
    assert load_agreed(path, "poet").deployment.anyone  # for all that have a key


def test_a_server_says_who_has_not_agreed(config, tmp_path) -> None:
    run = config(deployment={"quorum": 2, "deadline": 60})
    clients = workers(run, tmp_path)
    clients["poet"].site = replace(clients["poet"].site, agrees=lambda *_: False)
    notes = Notes()
    server(run, tmp_path / "server", Loop(clients), notes).rounds()
    assert "poet declined to take part in the run" in notes.lines
    assert RunFolder(tmp_path / "server").result is not None
    states = {n: c.state for n, c in Status.read(RunFolder(tmp_path / "server")).clients.items()}
    assert states["poet"] == "declined"


def test_a_client_that_declined_can_be_asked_again(config, tmp_path) -> None:
    run = config(deployment={"quorum": 3, "deadline": 60}, rounds=1)
    clients = workers(run, tmp_path)
    agreeing = clients["poet"]
    clients["poet"] = Worker(replace(agreeing.site, agrees=lambda *_: False))
    seen: list[str] = []

    class Watch(Notes):
        def show(self, status: Status) -> None:
            seen.append(status.clients["poet"].state)

    def leave(loop: Loop) -> None:
        assert clients["poet"].declined
        loop.away.add("poet")  # its process ends

    def ask_again(loop: Loop) -> None:
        assert "round 1: waiting for poet (declined)" in run_server.monitor.status.waiting
        loop.reconnect("poet", agreeing)

    loop = Loop(clients, events={4: leave, 8: ask_again})
    watch = Watch()
    run_server = server(run, tmp_path / "server", loop, watch)
    run_server.rounds()
    assert "poet declined to take part in the run" in watch.lines
    assert [state for n, state in enumerate(seen) if state != seen[n - 1]][:3] == [
        *("joining", "declined", "joining")
    ]
    assert RunFolder(tmp_path / "server").result is not None


def test_a_service_that_nobody_can_be_asked_says_so_at_once(values, texts, tmp_path) -> None:
    from typer.testing import CliRunner

    pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
    from coterie.network.keys import Keys

    Keys.create(tmp_path / "keys").add("poet", tmp_path / "poet.key")
    text = str(texts / "poet.txt")
    where = ["--server", "localhost:1", "--key", str(tmp_path / "poet.key"), "--data", text]
    result = CliRunner().invoke(app, ["client", *where])
    assert isinstance(result.exception, CoterieError)
    assert "Give the run file with --run, or --yes" in str(result.exception)


def test_an_order_without_a_run_is_refused(config, tmp_path) -> None:
    place = site(config(), "poet", tmp_path)
    for values in ({}, {"data": []}, None):
        with pytest.raises(MessageError, match="contains no valid run"):
            place.config(Order(run=RUN, client="poet", kind="join", turn=0, config=values))


@pytest.mark.parametrize(
    "data", [{"messages": {}, "chat_template": POWER}, {"instructions": {"template": POWER}}]
)
def test_terms_are_compared_before_templates(data, config, tmp_path, monkeypatch) -> None:
    def change(values: dict[str, Any]) -> None:
        values["data"] |= data

    run = config()
    place = site(run, "poet", tmp_path)
    agreed = replace(place, agreed=agreed_terms(run, "poet"))
    parsed: list[str] = []
    parse = Sandbox._parse
    monkeypatch.setattr(
        Sandbox, "_parse", lambda self, text, *rest: parsed.append(text) or parse(self, text, *rest)
    )
    worker, [reply] = asked(run, agreed, order(run, change))
    assert reply.fault == "terms"
    assert POWER in worker.error
    worker, replies = asked(run, place, order(run), order(run, change))  # agreed to when it began
    assert [reply.fault for reply in replies] == [None, "terms"]
    assert not any(POWER in text for text in parsed)


@pytest.mark.parametrize("section", [None, "x", [], 3])
def test_terms_of_any_type_are_compared(section, config, tmp_path) -> None:
    run = config()
    agreed = replace(site(run, "poet", tmp_path), agreed=agreed_terms(run, "poet"))
    _, [reply] = asked(run, agreed, order(run, setting("deployment", section)))
    assert reply.fault in ("terms", "refused", "unable")
