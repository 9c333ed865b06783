"""What every method must keep, whatever it does: the contract that engines rely on."""

import inspect
from types import SimpleNamespace

import loop
import pytest
import torch
from every_method import each_method, run_of
from rounds import close, down, joined, one_round, step, take, up

import coterie
from coterie.adapters import detach
from coterie.config import parse
from coterie.engines.local import LocalRun
from coterie.engines.part import contribution
from coterie.engines.session import Session
from coterie.exchange import Message, MessageError
from coterie.exchange.schema import Way
from coterie.methods import available, contract
from coterie.methods.averaging import FedAvg
from coterie.methods.contract import Method, ServerSide
from coterie.methods.pretrained import PretrainedClient
from coterie.runs import RunFolder, Watch

REFUSED = r"stays with its client|may not travel"


@pytest.fixture(params=each_method())
def run(request, values, teachers):
    """A run of every method."""
    return run_of(request.param, values, teachers)


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
    local = joined(run)
    local.server.open(0, sorted(local.clients))
    personal = {"specialist", "router", "frozen"}
    personal |= set() if local.schema.up else {"dense", "generalist"}
    if run.method.name == "fedamole":
        personal.clear()
    declared = {field.name for field in local.schema.up}
    for name, client in local.clients.items():
        part, download = local.parts[name], down(local, name)
        upload = step(local, name, 0, download)
        messages: dict[Way, Message] = {"hello": client.hello(), "up": upload, "down": download}
        for way, message in messages.items():
            local.schema.send(way, message)
            for _, _, tensor, _ in message.tensors():
                assert tensor not in client.parts() or client.parts()[tensor].role not in personal
                assert tensor.split("/")[0].split(".")[0] not in personal
        # ... nor may they be: they are refused, whatever group a method would put them in.
        kept = {n: p.parameter for n, p in client.parts().items() if not run.method.sends(p)}
        assert {n for n, p in client.parts().items() if p.role in personal} <= kept.keys()
        for tensor, parameter in kept.items():
            for group in declared:
                with pytest.raises(MessageError, match=REFUSED):
                    part._sent("up", Message(0, {group: {tensor: parameter}}))
        for path, state in client.state().walk():
            for group, tensors in state.groups.items():
                if tensors and (path or group not in declared):
                    hidden = {path[0]: {group: tensors}} if path else {}
                    bare = Message(0, {} if path else {group: tensors}, peers=hidden)
                    with pytest.raises(MessageError, match=REFUSED):
                        part._sent("up", bare)


def test_state_and_restore_are_inverse(run) -> None:
    local = joined(run)
    local.server.open(0, sorted(local.clients))
    for name, client in local.clients.items():
        download = down(local, name)
        before = client.state()
        first = step(local, name, 0, download)
        client.restore(before)
        second = step(local, name, 0, download)
        assert first.encode() == second.encode()
        after = client.state().encode()
        assert up(local, name, 0).encode() == second.encode()  # asked again, it says the same
        assert client.state().encode() == after


def test_a_client_that_misses_rounds_and_one_that_joins_late(run) -> None:
    local = joined(run)
    names = sorted(local.clients)
    for round, present in enumerate((names[:1], names[1:], names)):
        one_round(local, round, present)
    take(local)
    for name in names:
        for _, state in local.clients[name].state().walk():
            assert all(torch.isfinite(t).all() for t in loop.flat(state).values())


def test_poisoned_uploads_are_refused_and_the_round_goes_on(run) -> None:
    local = joined(run)
    if not local.schema.up:
        pytest.skip("nothing is uploaded")
    server, names = local.server, sorted(local.clients)
    server.open(0, names)
    counted = {}
    for name in names:
        upload = step(local, name, 0)
        if name == names[0]:
            group, key, tensor = next(
                (g, n, t) for _, g, n, t in upload.tensors() if t.is_floating_point()
            )

            def changed(
                value: torch.Tensor, upload: Message = upload, group: str = group, key: str = key
            ) -> Message:
                return Message(0, {**upload.groups, group: {**upload[group], key: value}})

            nan = changed(torch.full_like(tensor, float("nan"))).encode()
            with pytest.raises(MessageError, match="not finite"):
                local.schema.receive("up", nan)
            for wrong, fault in ((changed(tensor[:1]), "shape"), (Message(0), "missing")):
                with pytest.raises(MessageError, match=fault):
                    contribution(server, local.aggregation, name, wrong)
        else:
            counted[name] = upload
    close(local, 0, counted)
    for _, state in server.state().walk():
        assert all(torch.isfinite(t).all() for t in loop.flat(state).values())


def test_a_model_of_ones_own_needs_no_change_to_the_package(config, tmp_path) -> None:
    """The method in the docstring of methods/contract.py."""

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return ServerSide()

    assert inspect.getsource(Silent) in (contract.__doc__ or "")
    run = config()
    done = coterie.run(run, method=Silent(), out=tmp_path / "silent")
    bare = coterie.run(run.with_method("pretrained"), out=tmp_path / "bare")
    assert done.results["silent"]["trained"] == bare.results["pretrained"]["trained"]


class FirstFactor(FedAvg):
    """As fedavg; of every pair, A alone is averaged."""

    name = "first-factor"
    summary = "A of every pair is averaged; B stays"

    def sends(self, part):
        return part.factor == "A"


@pytest.fixture
def registered(monkeypatch):
    """A package that is installed beside this one has registered the method."""
    entry = SimpleNamespace(load=lambda: FirstFactor)
    monkeypatch.setattr("coterie.methods.entry_points", lambda group: [entry])
    available.cache_clear()
    yield
    available.cache_clear()


def test_a_method_that_shares_one_factor_is_one_line(config, tmp_path, registered) -> None:
    run = config(method="first-factor", rounds=2)
    local = joined(run)
    uploads = one_round(local, 0)
    take(local)
    for name, client in local.clients.items():
        parts, sent = client.parts(), uploads[name]["adapter"]
        assert sent.keys() == {n for n, p in parts.items() if p.factor == "A"}
        assert len(parts) == 2 * len(sent)
        for tensor, part in parts.items():
            if part.factor == "A":
                mean = torch.stack([u["adapter"][tensor].double() for u in uploads.values()]).mean(
                    0
                )
                torch.testing.assert_close(part.parameter.detach().double(), mean)
            else:
                assert part.parameter.any()  # B was trained, and is this client's own
                message = Message(0, {"adapter": {tensor: part.parameter}})
                with pytest.raises(MessageError, match="stays with its client"):
                    local.parts[name]._sent("up", message)
    poet, whaler = (local.clients[name].parts() for name in ("poet", "whaler"))
    for tensor, part in poet.items():
        alike = torch.equal(part.parameter, whaler[tensor].parameter)
        assert alike == (part.factor == "A")
    test_a_deployment_gives_the_same_bits(run, tmp_path / "deployed")
    test_a_run_stopped_between_rounds_continues_to_the_same_bits(run, tmp_path / "resumed")


def test_both_families_of_bases_run(values, bases, tmp_path) -> None:
    run = parse(values(base=str(bases / "llama"), rounds=1))
    done = coterie.run(run, out=tmp_path / "llama")
    model = coterie.load(done.path, "poet")
    assert type(model).__name__ == "LlamaForCausalLM"
    detach(model)
