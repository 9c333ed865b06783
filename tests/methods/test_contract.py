"""The contract of all methods, on which engines rely."""

import inspect

import pytest
import torch
from tensors import close_to, mean_of

import coterie
from coterie.messages import Message, MessageError
from coterie.methods import contract
from coterie.methods.averaging import FedAvg
from coterie.methods.contract import Method, Server
from coterie.methods.pretrained import PretrainedClient
from coterie.testing import MethodContract
from coterie.testing.rounds import joined, one_round, take

REFUSED = r"must stay on its client|may not be sent"


class TestEveryMethod(MethodContract):
    @pytest.fixture
    def run(self, each_run):
        return each_run

    @pytest.mark.slow
    def test_an_evaluation_adds_no_work(self, run, tmp_path, monkeypatch) -> None:
        super().test_an_evaluation_adds_no_work(run, tmp_path, monkeypatch)


def test_personal_parts_are_not_sent(each_run) -> None:
    # The contract compares messages with `shared`; this test compares `shared` with roles.
    local = joined(each_run)
    personal = {"specialist", "router", "frozen"}
    personal |= set() if local.schema.up else {"dense", "generalist"}
    if each_run.method.name in ("fedamole", "fedlease", "auto"):  # their routers are averaged
        return
    for client in local.clients.values():
        assert not any(
            each_run.method.shared(p) for p in client.parameters().values() if p.role in personal
        )


def test_a_model_of_ones_own_needs_no_change_to_the_package(config, tmp_path) -> None:
    # The method is the one in the docstring of methods/contract.py.

    class Silent(Method):
        name = "silent"
        summary = "the base alone"

        def client(self, context):
            return PretrainedClient(context)

        def server(self, context):
            return Server()

    assert inspect.getsource(Silent) in (contract.__doc__ or "")
    run = config()
    done = coterie.run(run, method=Silent(), out=tmp_path / "silent")
    bare = coterie.run(run.with_method("pretrained"), out=tmp_path / "bare")
    assert done.results["silent"]["trained"] == bare.results["pretrained"]["trained"]


class FirstFactor(FedAvg):
    """FedAvg in which A of every pair is averaged, and B is personal."""

    name = "first-factor"
    summary = "A of every pair is averaged; B stays"

    def shared(self, parameter):
        return parameter.factor == "A"


def test_a_method_that_shares_one_factor_is_one_line(config, install) -> None:
    # A package that is installed beside this one has registered the method.
    install(**{"first-factor": lambda: FirstFactor})
    run = config(method="first-factor", rounds=2)
    local = joined(run)
    uploads = one_round(local, 0)
    take(local)
    for name, client in local.clients.items():
        parts, sent = client.parameters(), uploads[name]["adapter"]
        assert sent.keys() == {n for n, p in parts.items() if p.factor == "A"}
        assert len(parts) == 2 * len(sent)
        mean = mean_of(u["adapter"] for u in uploads.values())
        assert close_to({n: parts[n].tensor for n in sent}, mean)
        for tensor, part in parts.items():
            if part.factor == "B":
                assert part.tensor.any()  # B was trained, and is this client's own
                message = Message(0, {"adapter": {tensor: part.tensor}})
                with pytest.raises(MessageError, match="must stay on its client"):
                    local.clients.host(name)._serialise("up", message)
    poet, whaler = (local.clients[name].parameters() for name in ("poet", "whaler"))
    for tensor, part in poet.items():
        alike = torch.equal(part.tensor, whaler[tensor].tensor)
        assert alike == (part.factor == "A")
