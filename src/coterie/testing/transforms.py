"""Tests of the properties that engines require of every transform."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import coterie
from coterie.config.run import RunConfig, parse
from coterie.federation.pipeline import pipeline_of
from coterie.messages import Groups, Message, MessageError
from coterie.messages.envelope import Order
from coterie.privacy import secrets
from coterie.runs import RunFolder
from coterie.testing import loop
from coterie.testing.contract import RunContract
from coterie.testing.rounds import close, joined
from coterie.testing.small import small_run
from coterie.transforms.contract import Transform
from coterie.transforms.registry import TRANSFORMS


class TransformContract(RunContract):
    """Contract tests of a transform; a subclass sets `transform`, and pytest runs the tests."""

    transform: ClassVar[Transform]
    """The transform to test."""
    changes: ClassVar[dict[str, Any]] = {}
    """Keys and values that the transform needs in the run file of the tests, such as `method`."""

    @pytest.fixture(autouse=True)
    def _equal_secrets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give all runs the same secrets, so that their noise and masks are equal."""
        monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunConfig:
        """The run that the tests execute: FedAvg with three clients and two rounds."""
        if not TRANSFORMS.is_installed(type(self.transform)):
            TRANSFORMS.register(type(self.transform))
        (folder := tmp_path / "texts").mkdir()
        keys = {
            "method": "fedavg",
            "aggregation": {"transforms": [self.transform], "largest_change": None},
            "deployment": {"quorum": 3},
        }
        return small_run(folder, **{**keys, **self.changes})

    def test_lost_replies_do_not_change_the_result(self, run: RunConfig, tmp_path: Path) -> None:
        """Check that a deployment in which each reply is lost once ends in the same states."""
        local = coterie.run(run, out=tmp_path / "local")
        lost: set[tuple[str, str, int]] = set()

        def lose(name: str, order: Order) -> bool:
            key = name, order.kind, order.turn
            is_first = key not in lost
            lost.add(key)
            return is_first and order.kind != "join"

        def reconnect(network: loop.Loop) -> None:
            for client in run.clients:
                network.reconnect(client.name)

        loop.deploy(run, tmp_path, lose=lose, events=dict.fromkeys(range(3, 100, 3), reconnect))
        loop.assert_as_local(run, tmp_path, RunFolder(local.path))

    def test_a_run_file_contains_all_settings(self, run: RunConfig) -> None:
        """Check that the run file of a run describes the transform completely."""
        stages = pipeline_of(parse(run.as_dict())).stages
        assert self.transform in [stage.transform for stage in stages]

    def test_no_tensor_is_modified_in_place(
        self, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check that `encode` and `decode` do not modify the tensors of their arguments.

        The tensors belong to the method, to a message, or to a memory that may be rolled back.
        """
        kind, modified = type(self.transform), list[tuple[str, ...]]()

        def watch(hook: str) -> None:
            original = getattr(kind, hook)

            def checked(transform: Transform, groups: Groups, context: Any) -> Groups:
                arguments = {"argument": groups, "memory": dict(context.memory.groups)}
                before = {
                    (place, group, name): (tensor, tensor.clone())
                    for place, content in arguments.items()
                    for group, tensors in content.items()
                    for name, tensor in tensors.items()
                }
                result = original(transform, groups, context)
                changes = (
                    k for k, (tensor, copy) in before.items() if not torch.equal(tensor, copy)
                )
                modified.extend((hook, *key) for key in changes)
                return result

            monkeypatch.setattr(kind, hook, checked)

        watch("encode")
        watch("decode")
        coterie.run(run, out=tmp_path / "local")
        assert not modified

    def test_clients_may_miss_rounds(self, run: RunConfig) -> None:
        """Check that states are finite after rounds that some clients missed."""
        local = joined(run)
        names, least = sorted(local.clients), self.transform.least
        present = [names[:least], names[-least:]]
        for turn in map(run.turn, range(run.turns)):
            local.step(turn, present[turn.round])
        assert local.value.state().is_finite()

    def test_invalid_uploads_are_refused(self, run: RunConfig) -> None:
        """Check that uploads with missing or wrongly shaped tensors are refused.

        Also check that the round continues with all uploads as they were sent.
        """
        local = joined(run)
        names = sorted(local.clients)
        *earlier, turn = map(run.turn, range(1 + len(self.transform.before)))
        for phase in earlier:
            local.step(phase, names)
        local.open(turn, names)
        uploads = {
            name: local.schema.receive(
                "up", local.clients.host(name).step(turn, local.download(name))
            )
            for name in names
        }
        upload = uploads[names[0]]
        invalid = [Message(0, values=upload.values)]
        for _, group, key, tensor in upload.tensors():
            tensors = {**upload[group], key: torch.stack([tensor, tensor])}
            invalid.append(Message(0, {**upload.groups, group: tensors}, upload.values))
        for message in invalid:
            with pytest.raises(MessageError):
                close(local, turn.number, {names[0]: message})
        close(local, turn.number, uploads)
        for later in map(run.turn, range(turn.number + 1, len(run.phases))):
            local.step(later, names)
        assert local.value.state().is_finite()
