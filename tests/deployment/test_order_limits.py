"""A client obeys only orders inside the agreed run, and few of them again."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_rounds_opened_again import Recorded
from test_terms import asked, order

from coterie.cli.console import costs_in_words
from coterie.deployment.client import Worker
from coterie.deployment.costs import MAX_DISK, too_costly
from coterie.deployment.orders import MAX_NEW_RUNS, MAX_TRAININGS, MAX_UNFINISHED
from coterie.messages import Message
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.testing.loop import server, site, workers


@pytest.fixture(scope="module")
def sent(config, tmp_path_factory) -> list[bytes]:
    """Return the orders that one client got in a run of two rounds."""
    folder = tmp_path_factory.mktemp("sent")
    network = Recorded(workers(config(rounds=2), folder))
    server(config(rounds=2), folder / "server", network).rounds()
    return network.sent


def fault(worker: Worker, data: bytes) -> str | None:
    return unseal(Reply, worker.answer(data))[0].fault


@pytest.mark.parametrize("round", [2, 3, 5, 50, 2**31 - 1, 2**31])
@pytest.mark.parametrize("kind", ["step", "finish"])
def test_no_round_is_trained_beyond_those_agreed(round, kind, sent, config, tmp_path) -> None:
    worker = Worker(site(config(rounds=2), "poet", tmp_path))
    join, first, *_ = sent
    assert [fault(worker, data) for data in (join, first)] == [None, None]
    assert worker.run is not None
    before = worker.run.folder.digest()
    told, body = unseal(Order, first)
    changed = told.model_copy(update={"round": round, "kind": kind})
    if (kind, round) != ("finish", 2):  # which is the run's end
        assert fault(worker, seal(changed, body)) == "refused"
        assert worker.run.folder.digest() == before
    worker.close()


@pytest.mark.parametrize("counted", [0, 1, 7, 2**31, -2])
def test_no_round_counts_before_it_is_over(counted, sent, config, tmp_path) -> None:
    worker = Worker(site(config(rounds=2), "poet", tmp_path))
    told, body = unseal(Order, sent[1])
    assert fault(worker, sent[0]) is None
    changed = told.model_copy(update={"counted": counted})
    assert fault(worker, seal(changed, body)) == "refused"
    worker.close()


def test_a_round_is_trained_a_few_times_for_different_downloads(sent, config, tmp_path) -> None:
    worker = Worker(site(config(rounds=2), "poet", tmp_path))
    told, body = unseal(Order, sent[1])
    assert fault(worker, sent[0]) is None
    message, found = Message.decode(body), []
    for number in range(MAX_TRAININGS + 3):
        groups = {
            group: {name: tensor + 0.001 * number for name, tensor in tensors.items()}
            for group, tensors in message.groups.items()
        }
        other = Message(message.round, groups, message.values).encode()
        found.append(fault(worker, seal(told, other)))
    assert found == [None] * MAX_TRAININGS + ["failed"] * 3
    worker.close()


def test_few_new_runs_are_begun_without_a_person(config, tmp_path) -> None:
    run = config()
    ids = [f"{number:016x}" for number in range(1, MAX_NEW_RUNS + 3)]
    orders = [order(run).model_copy(update={"run": id[::-1]}) for id in ids]
    worker, replies = asked(run, site(run, "poet", tmp_path), *orders)
    assert [reply.fault for reply in replies] == [None] * MAX_NEW_RUNS + ["limits"] * 2
    assert worker.finished
    assert "start this client again" in worker.error
    assert len(list(tmp_path.glob("*poet*/run.json"))) == MAX_NEW_RUNS
    _, [again] = asked(run, site(run, "poet", tmp_path), orders[0])  # an earlier run goes on
    assert again.fault is None


def test_unfinished_runs_are_limited_on_disk(config, tmp_path) -> None:
    run = config()
    for number in range(MAX_UNFINISHED):
        folder: Path = tmp_path / f"small-poet-{number}"
        folder.mkdir()
        (folder / "run.json").write_text("{}")
    worker, [reply] = asked(run, site(run, "poet", tmp_path), order(run))
    assert reply.fault == "limits"
    assert "delete the folders" in worker.error
    (tmp_path / "small-poet-0" / "result.json").write_text("{}")
    _, [reply] = asked(run, site(run, "poet", tmp_path), order(run))
    assert reply.fault is None


COSTLY = [
    ({"threads": 20_000}, "threads"),
    ({"rounds": 10**9}, "rounds"),
    ({"training": {"steps": 10**9}}, "training.steps"),
    ({"training": {"batch": 10**7}}, "training.batch"),
    ({"training": {"batch": 2, "micro_batch": 10**7}}, "training.micro_batch"),
    ({"evaluation": {"batch": 10**7}}, "evaluation.batch"),
    ({"evaluation": {"validation_samples": 10**9}}, "evaluation.validation_samples"),
    ({"data": {"window": 10**9}}, "data.window"),
    ({"method": {"name": "fedavg", "mlp": {"rank": 10**7}}}, "method.mlp.rank"),
    ({"method": {"name": "fedavg", "mlp": {"rank": 1000}}}, "method.mlp.rank"),
    ({"method": {"name": "fedavg", "attention": {"rank": 10**5}}}, "method.attention.rank"),
    ({"method": {"name": "fedprompt", "virtual_tokens": 10**8}}, "method.virtual_tokens"),
    ({"method": {"name": "comigs-1g1s", "router": {"steps": 10**9}}}, "method.router.steps"),
    ({"rounds": 99_000, "training": {"steps": 999_000}}, "training steps"),
]


@pytest.mark.parametrize(("changes", "named"), COSTLY)
def test_what_no_machine_bears_is_refused_whoever_agrees(changes, named, config, tmp_path) -> None:
    run = config()
    worker, [reply] = asked(run, site(run, "poet", tmp_path), order(config(**changes)))
    assert reply.fault == "limits"
    assert named in worker.error
    assert not list(tmp_path.glob("*poet*/run.json"))


def test_costs_of_usual_runs_are_accepted(config) -> None:
    assert too_costly(config()) is None
    assert too_costly(config(method={"name": "fedavg", "mlp": {"rank": 64}}, threads=64)) is None


def test_trainings_of_a_round_are_counted_across_restarts(sent, config, tmp_path) -> None:
    told, body = unseal(Order, sent[1])
    message, found = Message.decode(body), []
    for number in range(MAX_TRAININGS + 2):
        worker = Worker(site(config(rounds=2), "poet", tmp_path))  # a new process
        assert fault(worker, sent[0]) is None
        groups = {
            group: {name: tensor + 0.001 * number for name, tensor in tensors.items()}
            for group, tensors in message.groups.items()
        }
        other = Message(message.round, groups, message.values).encode()
        found.append(fault(worker, seal(told, other)))
        worker.close()
    assert found == [None] * MAX_TRAININGS + ["failed"] * 2


def test_a_person_is_asked_again_after_several_new_runs(config, tmp_path) -> None:
    run, shown = config(), []
    place = replace(
        site(run, "poet", tmp_path), asks=True, agrees=lambda order, _: shown.append(order) or True
    )
    orders = [
        order(run).model_copy(update={"run": f"{number:x}" * 16})
        for number in range(MAX_NEW_RUNS + 2)
    ]
    worker, replies = asked(run, place, *orders)
    assert [reply.fault for reply in replies] == [None] * len(orders)
    assert len(shown) == len(orders) + 1  # once for each run, and once for their number
    assert not worker.error
    place = replace(place, agrees=lambda order, _: shown.append(order) or len(shown) < limit)
    limit = len(shown) + MAX_NEW_RUNS + 2
    orders = [order_.model_copy(update={"run": "9" + order_.run[1:]}) for order_ in orders]
    worker, replies = asked(run, place, *orders[: MAX_NEW_RUNS + 1])
    assert [reply.fault for reply in replies] == [None] * MAX_NEW_RUNS + ["declined"]


def test_the_runs_of_a_client_have_a_bound_in_bytes(config, tmp_path) -> None:
    run = config()
    folder = tmp_path / "small-poet-0"
    folder.mkdir()
    for name in ("run.json", "result.json"):
        (folder / name).write_text("{}")
    with (folder / "large").open("wb") as file:
        file.truncate(MAX_DISK + 1)  # a sparse file
    worker, [reply] = asked(run, site(run, "poet", tmp_path), order(run))
    assert reply.fault == "limits"
    assert "32 GiB" in worker.error


def test_the_estimated_memory_is_shown_before_somebody_agrees(config) -> None:
    assert "about 2.0 GB" in costs_in_words(config(), 2 * 10**9)["memory"]
    assert "about" not in costs_in_words(config())["memory"]
