"""What every method must keep, whatever it does: the contract that engines rely on."""

from pathlib import Path

import loop
import pytest
import torch

import coterie
from coterie.adapters import detach
from coterie.config import parse
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.exchange import Message, MessageError
from coterie.exchange.schema import Way
from coterie.methods import available
from coterie.methods.fedmkt import FedMKT
from coterie.runs import RunFolder, Watch

MIXED = {
    "diarist": {"prose": 1.0},
    "poet": {"verse": 1.0},
    "whaler": {"prose": 0.75, "verse": 0.25},
}
AT_ONCE = {
    "experts": 6,
    "warmup": 1,
    "every": 1,
    "validation_batches": 1,
    "public_batches": 1,
    "mixtures": MIXED,
}
"""Settings with which clients exchange after every round, for methods that have them."""
METHODS = {
    name: {"name": name} | {k: v for k, v in AT_ONCE.items() if k in method.model_fields}
    for name, method in available().items()
} | {
    "uneven": {
        "name": "comigs-1g1s",
        "specialists": {"poet": 3, "others": 1},
        "router_every": 1,
        "router_steps": 1,
    },
    "single": {"name": "comigs-1g1s", "specialists": {"poet": 0, "others": 1}},
    "fedavg, exact": {"name": "fedavg", "aggregation": "exact"},
    "comigs, exact": {
        "name": "comigs-1g1s",
        "aggregation": "exact",
        "specialists": {"poet": 3, "others": 1},
        "router_every": 1,
        "router_steps": 1,
    },
    "flexlora, ranks": {"name": "flexlora", "rank": {"poet": 3, "whaler": 5, "others": 16}},
    "hetlora, ranks": {
        "name": "hetlora",
        "rank": {"poet": 3, "whaler": 5, "others": 16},
        "gamma": 0.6,
        "penalty_weight": 1.0,
    },
}


def sides(run) -> LocalRun:
    """A run's sides, joined, before its first round."""
    session = Session(run)
    who = session.federation(run)
    return LocalRun(run, session.base, who.clients, RunFolder(Path()), Watch(), who.server)


@pytest.fixture(params=METHODS.values(), ids=list(METHODS))
def run(request, values, teachers):
    """A run of every method."""
    if issubclass(available()[request.param["name"]], FedMKT):
        return teachers(method=request.param)
    whole = values(method=request.param, rounds=2)
    return parse({**whole, "data": {**whole["data"], "public": "poet.txt"}})


def test_a_deployment_gives_the_same_bits(run, tmp_path) -> None:
    local = coterie.run(run, out=tmp_path / "local")
    loop.deploy(run, tmp_path)
    loop.assert_as_local(run, tmp_path, RunFolder(local.path))


def test_a_run_stopped_between_rounds_continues_to_the_same_bits(run, tmp_path) -> None:
    whole = coterie.run(run, out=tmp_path / "whole")
    session = Session(run)
    participants = session.participants(run)
    description = session.description(run, participants)
    folder = RunFolder.create(tmp_path / "stopped", description)

    class Stop(Watch):
        def round_over(self, round: int, note: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.start(run, folder, Stop()).run()
    coterie.resume(folder.path)
    loop.assert_same_states(folder, RunFolder(whole.path))


def test_the_order_of_clients_does_not_matter(run, tmp_path) -> None:
    session = Session(run)
    participants = session.participants(run)
    folders = []
    for name, order in (("one", participants), ("other", participants[::-1])):
        folder = RunFolder.create(tmp_path / name, session.description(run, participants))
        own = session.federation(run).server
        LocalRun(run, session.base, order, folder, Watch(), own).run()
        folders.append(folder)
    loop.assert_same_states(*folders)


def test_personal_parameters_are_in_no_message(run) -> None:
    local = sides(run)
    local.server.open(0, sorted(local.clients))
    personal = {"specialist", "router"} | (set() if local.schema.up else {"dense", "generalist"})
    for name, client in local.clients.items():
        download = local.server.download(name)
        upload = client.step(download)
        messages: dict[Way, Message] = {"hello": client.hello(), "up": upload, "down": download}
        for way, message in messages.items():
            local.schema.send(way, message)
            for tensor in message.tensors:
                assert tensor.split("/")[0].split(".")[0] not in personal
        # ... nor may they be: the message layer refuses them.
        for tensor in client.state().tensors:
            bare = tensor.partition("/")[2]
            if bare not in upload.tensors:
                with pytest.raises(MessageError, match="may not travel"):
                    local.schema.send("up", Message(0, {bare: client.state().tensors[tensor]}))


def test_state_and_restore_are_inverse(run) -> None:
    local = sides(run)
    local.server.open(0, sorted(local.clients))
    for name, client in local.clients.items():
        download = local.server.download(name)
        before = client.state()
        first = client.step(download)
        client.restore(before)
        second = client.step(download)
        assert first.encode() == second.encode()


def test_a_client_that_misses_rounds_and_one_that_joins_late(run) -> None:
    local = sides(run)
    server, names = local.server, sorted(local.clients)
    for round, present in enumerate((names[:1], names[1:], names)):
        server.open(round, present)
        for name in present:
            server.receive(name, local.clients[name].step(server.download(name)))
        server.close()
    for name in names:
        local.clients[name].finish(server.download(name))
        assert all(torch.isfinite(t).all() for t in local.clients[name].state().tensors.values())


def test_poisoned_uploads_are_refused_and_the_round_goes_on(run) -> None:
    local = sides(run)
    if not local.schema.up:
        pytest.skip("nothing is uploaded")
    server, names = local.server, sorted(local.clients)
    server.open(0, names)
    for name in names:
        upload = local.clients[name].step(server.download(name))
        if name == names[0]:
            floating = ((n, t) for n, t in upload.tensors.items() if t.is_floating_point())
            key, tensor = next(floating)
            poison = {**upload.tensors, key: torch.full_like(tensor, float("nan"))}
            with pytest.raises(MessageError, match="not finite"):
                local.schema.receive("up", Message(0, poison).encode())
            with pytest.raises(MessageError, match="shape"):
                server.receive(name, Message(0, {**upload.tensors, key: tensor[:1]}))
            with pytest.raises(MessageError, match="missing"):
                server.receive(name, Message(0, {}))
        else:
            server.receive(name, upload)
    server.close()
    assert all(torch.isfinite(t).all() for t in server.state().tensors.values())


def test_a_model_of_ones_own_needs_no_change_to_the_package(config, tmp_path) -> None:
    """The method in the docstring of methods/base.py."""
    from coterie.methods.contract import Method, ServerSide
    from coterie.methods.pretrained import PretrainedClient

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return ServerSide()

    run = config()
    done = coterie.run(run, method=Silent(), out=tmp_path / "silent")
    bare = coterie.run(run.with_method("pretrained"), out=tmp_path / "bare")
    assert done.results["silent"]["trained"] == bare.results["pretrained"]["trained"]


def test_both_families_of_bases_run(values, bases, tmp_path) -> None:
    run = parse(values(base=str(bases / "llama"), rounds=1))
    done = coterie.run(run, out=tmp_path / "llama")
    model = coterie.load(done.path, "poet")
    assert type(model).__name__ == "LlamaForCausalLM"
    detach(model)
