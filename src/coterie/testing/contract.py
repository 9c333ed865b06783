"""Tests of the properties that engines require of every method, and of every run."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import coterie
from coterie.config.run import RunConfig
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.messages import Message, MessageError
from coterie.messages.schema import Way
from coterie.methods.contract import Method
from coterie.methods.registry import METHODS
from coterie.runs import Callback, RunFolder
from coterie.testing import loop
from coterie.testing.rounds import close, down, joined, one_round, step, take, up
from coterie.testing.small import small_run
from coterie.testing.work import worked

REFUSED = r"must stay on its client|may not be sent"


class Stop(Callback):
    """A callback that interrupts a run after the first round, like Ctrl-C."""

    def on_round_end(self, round: int, scores: str) -> None:
        raise KeyboardInterrupt


class RunContract:
    """Contract tests of methods and of transforms; a subclass has a fixture `run`."""

    def test_a_deployment_gives_the_same_bits(self, run: RunConfig, tmp_path: Path) -> None:
        """Check that a deployment ends in the same states as a run of the local engine.

        In a deployment, messages are exchanged as bytes.
        """
        local = coterie.run(run, out=tmp_path / "local")
        loop.deploy(run, tmp_path)
        loop.assert_as_local(run, tmp_path, RunFolder(local.path))

    def test_a_stopped_run_continues_to_the_same_bits(self, run: RunConfig, tmp_path: Path) -> None:
        """Check that a resumed run ends in the same states as an uninterrupted run.

        `state()` must contain everything that a restart needs, and random draws must not depend on
        earlier draws.
        """
        uninterrupted = coterie.run(run, out=tmp_path / "whole")
        session = Session(run)
        description = session.description(run, session.participants(run))
        folder = RunFolder.create(tmp_path / "stopped", description)
        with pytest.raises(KeyboardInterrupt):
            session.start(run, folder, [Stop()]).run()
        coterie.resume(folder.path)
        loop.assert_same_states(folder, RunFolder(uninterrupted.path))

    def test_the_order_of_clients_does_not_matter(self, run: RunConfig, tmp_path: Path) -> None:
        """Check that states do not depend on the order in which clients are listed."""
        session = Session(run)
        federation = session.federation(run)
        clients, server = federation.clients, federation.server
        folders = []
        for name, order in (("one", clients), ("other", clients[::-1])):
            folder = RunFolder.create(tmp_path / name, session.description(run, clients))
            local_run(run, session.base, order, folder, own=server).run()
            folders.append(folder)
        loop.assert_same_states(*folders)


class MethodContract(RunContract):
    """Contract tests of a method; a subclass sets `method`, and pytest runs the tests."""

    method: ClassVar[Method]
    """The method to test."""
    changes: ClassVar[dict[str, Any]] = {}
    """Keys and values that the method needs in the run file of the tests, such as `server`."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunConfig:
        """The run that the tests execute, with three clients, two rounds and a public text."""
        if not METHODS.is_installed(type(self.method)):
            METHODS.register(type(self.method))
        (folder := tmp_path / "texts").mkdir()
        return small_run(folder, **{"method": self.method, **self.changes})

    def test_nothing_travels_that_the_method_does_not_send(self, run: RunConfig) -> None:
        """Check that uploads contain only the parameters selected by `sends`.

        Also check that an upload is refused if it contains a nested state, or a parameter that is
        not `shared`.
        """
        local = joined(run)
        local.open(run.turn(0), sorted(local.clients))
        declared = {field.name for field in local.schema.up}
        for name, client in local.clients.items():
            host, download = local.clients.host(name), down(local, name)
            upload = step(local, name, 0, download)
            parameters, method = client.parameters(), run.method
            private = {n: p.tensor for n, p in parameters.items() if not method.shared(p)}
            sent = {tensor for _, _, tensor, _ in upload.tensors()} & parameters.keys()
            assert all(method.sends(parameters[tensor], 0) for tensor in sent)
            messages: dict[Way, Message] = {"hello": client.hello(), "up": upload, "down": download}
            for way, message in messages.items():
                local.schema.send(way, message)
                assert not private.keys() & {tensor for _, _, tensor, _ in message.tensors()}
            # Private parameters are refused in every group of the upload.
            for tensor, parameter in private.items():
                for group in declared:
                    with pytest.raises(MessageError, match=REFUSED):
                        host._serialise("up", Message(0, {group: {tensor: parameter}}))
            for path, state in client.state().walk():
                for group, tensors in state.groups.items():
                    if tensors and (path or group not in declared):
                        peers = {path[0]: {group: tensors}} if path else {}
                        leak = Message(0, {} if path else {group: tensors}, peers=peers)
                        with pytest.raises(MessageError, match=REFUSED):
                            host._serialise("up", leak)

    def test_state_and_restore_are_inverse(self, run: RunConfig) -> None:
        """Check that a client creates the same upload again after its earlier state is restored.

        Also check that creating an upload does not change the state.
        """
        local = joined(run)
        local.open(run.turn(0), sorted(local.clients))
        for name, client in local.clients.items():
            download = down(local, name)
            before = client.state()
            first = step(local, name, 0, download)
            client.restore(before)
            second = step(local, name, 0, download)
            assert first.encode() == second.encode()
            after = client.state().encode()
            assert up(local, name, 0).encode() == second.encode()  # repeatable
            assert client.state().encode() == after

    def test_clients_may_miss_rounds_and_join_late(self, run: RunConfig) -> None:
        """Check that clients' states are finite after rounds that some clients missed.

        Some clients miss the first round, so that they begin later than the others.
        """
        local = joined(run)
        names = sorted(local.clients)
        for round, present in enumerate((names[:1], names[1:], names)):
            one_round(local, round, present)
        take(local)
        for name in names:
            assert local.clients[name].state().is_finite()

    def test_nothing_is_kept_of_a_client_that_leaves(self, run: RunConfig) -> None:
        """Check that no server state and no download contains the name of a client that left.

        Also check that the other clients can continue.
        """
        local = joined(run)
        names, leaver = sorted(local.clients), sorted(local.clients)[0]
        for round in range(2):
            one_round(local, round, names)
        local.leave(leaver)
        assert leaver.encode() not in local.value.state().encode()
        remaining = [name for name in names if name != leaver]
        one_round(local, 2, remaining)
        for name in remaining:
            assert leaver.encode() not in down(local, name).encode()
        assert leaver.encode() not in local.value.state().encode()

    def test_poisoned_uploads_are_refused(self, run: RunConfig) -> None:
        """Check that invalid uploads are refused.

        An upload is invalid if a tensor has non-finite values or the wrong shape, or if a group of
        tensors is missing. Also check that the round continues with the other uploads.
        """
        local = joined(run)
        if not local.schema.up:
            pytest.skip("nothing is uploaded")
        names = sorted(local.clients)
        local.open(run.turn(0), names)
        uploads = {name: step(local, name, 0) for name in names}
        upload = uploads.pop(names[0])

        def changed(group: str, key: str, value: torch.Tensor) -> Message:
            return Message(0, {**upload.groups, group: {**upload[group], key: value}})

        invalid = [(Message(0), "missing")]
        for _, group, key, tensor in upload.tensors():
            if tensor.is_floating_point():
                nan = changed(group, key, torch.full_like(tensor, float("nan"))).encode()
                with pytest.raises(MessageError, match="non-finite"):
                    local.schema.receive("up", nan)
            invalid.append((changed(group, key, torch.cat([tensor, tensor])), "shape"))
        for message, error in invalid:
            with pytest.raises(MessageError, match=error):
                close(local, 0, {names[0]: message})
        close(local, 0, uploads)
        assert local.value.state().is_finite()

    def test_an_evaluation_adds_no_work(
        self, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check that evaluations cause no additional calls to the clients' method objects.

        Also check that evaluations do not change the number of forward passes in training.
        """
        often = worked(run, 1, tmp_path / "often", monkeypatch)
        never = worked(run, None, tmp_path / "never", monkeypatch)
        assert often.done == never.done
        assert often.scores > never.scores
        receives = run.exchanges + bool(run.method.schema().down)  # plus the last download
        for client in run.clients:
            calls = [never.done[f"{step} {client.name}"] for step in ("receive", "train", "upload")]
            assert calls == [receives, run.exchanges, run.exchanges]
