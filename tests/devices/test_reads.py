"""The number of reads of device values on the host, each of which would synchronise a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
from device import Counts
from every_method import METHODS, run_of, some
from placed import counting
from turns import nth

from coterie.config.run import parse
from coterie.evaluation.evaluate import evaluate
from coterie.messages import Message
from coterie.testing.rounds import down, joined, one_round
from coterie.training.update import Updater
from coterie.turn import FIRST

TRAINED = [name for name in METHODS if name not in ("pretrained", "llm2slm", "clove")]
"""The methods that train in the first exchange."""


def counted(action: Callable[[], Any]) -> Counts:
    with counting() as counts:
        action()
    return counts


def opened(run: Any) -> tuple[Any, str]:
    """Return a run whose first client has applied its first download, and the client's name."""
    local = joined(run)
    client = next(iter(local.clients))
    local.open(FIRST, list(local.clients))
    local.clients[client].receive(down(local, client))
    return local, client


@pytest.fixture
def two_steps(monkeypatch) -> Callable[..., tuple[int, int]]:
    """A function that counts the reads and the updates of two training steps.

    The counts are the differences between a round of six steps and a round of four steps, because
    the first steps differ from the others, for example if optimisers are created. A step has
    several updates if a router is trained as well, or a second adapter.
    """
    update, updates = Updater.update, []

    def counting_updates(*args: Any, **named: Any) -> float:
        updates.append(1)
        return update(*args, **named)

    monkeypatch.setattr(Updater, "update", counting_updates)

    def difference(make: Callable[[int], Any]) -> tuple[int, int]:
        counts = []
        for steps in (4, 6):
            local, client = opened(make(steps))
            updates.clear()
            reads = counted(lambda: local.clients[client].train(nth(0))).reads.total()  # noqa: B023
            counts.append((reads, len(updates)))
        (fewer, before), (more, after) = counts
        return more - fewer, after - before

    return difference


@pytest.mark.parametrize("name", some({"fedavg", "auto", "hetlora, ranks"}, TRAINED))
def test_an_update_reads_one_value(name, values, teachers, gpu, two_steps) -> None:
    def run(steps: int) -> Any:
        training = {"steps": steps, "batch": 2, "precision": "fp32"}
        return run_of(METHODS[name], values, teachers, device=gpu, training=training)

    reads, updates = two_steps(run)
    assert reads == updates >= 2


@pytest.fixture(params=["text", "instructions", "messages", "preferences"])
def kind(request, values, questions, talks, opinions, gpu) -> Callable[..., Any]:
    """A function that returns a run of FedAvg on one kind of data."""
    folder = {"instructions": questions, "messages": talks, "preferences": opinions}
    limits = {"train": 2000, "validation": 400, "test": 400}
    data: dict[str, Any] = {"window": 40, "limits": limits}
    changes: dict[str, Any] = {}
    if request.param != "text":
        clients = [{"name": name, "path": f"{name}.jsonl"} for name in ("diarist", "poet")]
        changes = {"data_root": str(folder[request.param]), "clients": clients}
        spec = {"template": "{{ instruction }}?"} if request.param == "instructions" else True
        data |= {"limits": {"validation": 4, "test": 4}, request.param: spec}

    def run(steps: int = 2, **training: Any) -> Any:
        training = {"steps": steps, "batch": 4, "precision": "fp32", **training}
        return parse(values(method="fedavg", device=gpu, data=data, training=training, **changes))

    return run


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_step_on_any_kind_of_data_reads_one_value(kind, micro_batch, two_steps) -> None:
    assert two_steps(lambda steps: kind(steps, micro_batch=micro_batch)) == (2, 2)


def test_batches_are_copied_to_the_device_without_waiting(kind) -> None:
    local, client = opened(kind())
    counts = counted(lambda: local.clients[client].train(nth(0)))
    assert not counts.writes.total(), counts.writes


def test_a_batch_of_an_evaluation_is_read_once(kind) -> None:
    local, client = opened(kind())
    part = local.clients.host(client)
    [test] = part.participant.tests.values()
    model, batches = part.side.model(), []
    for batch in (1, 2):
        rows = evaluate(part.base, model, test, 40, batch).item_nats.numel()
        reads = counted(lambda: evaluate(part.base, model, test, 40, batch)).reads  # noqa: B023
        batches.append((reads.total(), -(-rows // batch)))
    assert all(reads == count for reads, count in batches), batches


@pytest.mark.parametrize("name", some({"comigs-1g1s", "pcl-1", "hetlora, ranks"}, TRAINED))
def test_a_message_is_copied_at_once(name, values, teachers, gpu) -> None:
    """Count one transfer for each dtype of an upload, and one for the state of a checkpoint."""
    local, client = opened(run_of(METHODS[name], values, teachers, device=gpu))
    part = local.clients.host(client)
    part.side.train(nth(0))
    upload = part.side.upload(nth(0))
    kinds = {tensor.dtype for *_, tensor in upload.tensors() if tensor.device.type != "cpu"}
    assert counted(upload.on_host).reads.total() == len(kinds)
    assert counted(upload.on_host().encode).reads.total() == 0
    state = part.side.state()
    assert counted(state.encode).reads.total() == 1


def test_a_download_is_read_on_the_host_alone(values, teachers, gpu) -> None:
    local, client = opened(run_of(METHODS["fedavg"], values, teachers, device=gpu))
    data = local.download(client)
    assert counted(lambda: Message.decode(data)).reads.total() == 0
    assert counted(lambda: local.clients[client].receive(down(local, client))).reads.total() == 0


def test_a_trial_of_auto_reads_each_sample_once(values, teachers, gpu) -> None:
    """Copy a sample's gradients once, and compare them with the changes of all peers."""
    run = run_of(METHODS["auto"], values, teachers, device=gpu, rounds=4)
    local = joined(run)
    one_round(local, 0)
    client = next(iter(local.clients))
    side: Any = local.clients[client]
    download = down(local, client)
    samples = len(list(side.judging.split(1)))
    # The losses of two models, once in the trial and once before the evaluation.
    compared = 4 * len(list(side.judging.split(2)))
    reads = counted(lambda: side.receive(download)).reads
    assert download.peers
    assert reads.total() == 1 + samples + compared, reads
