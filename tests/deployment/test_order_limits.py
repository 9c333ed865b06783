"""A client obeys only orders inside the agreed run, and few of them again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_rounds_opened_again import Recorded
from test_terms import asked, order

from coterie.cli.console import costs_in_words
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.costs import MAX_DISK, too_costly
from coterie.deployment.orders import MAX_RUNS, MAX_TRAININGS, MAX_UNFINISHED
from coterie.deployment.terms import agreed_terms
from coterie.messages import Message
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.testing.loop import RUN, server, site, workers


@pytest.fixture(scope="module")
def sent(config, tmp_path_factory) -> list[bytes]:
    """Return the orders that one client got in a run of two rounds."""
    folder = tmp_path_factory.mktemp("sent")
    network = Recorded(workers(config(rounds=2), folder))
    server(config(rounds=2), folder / "server", network).rounds()
    return network.sent


def started(config: Any, out: Path) -> Worker:
    """Return a new process of the client."""
    return Worker(site(config(rounds=2), "poet", out))


def fault(worker: Worker, data: bytes) -> str | None:
    return unseal(Reply, worker.answer(data))[0].fault


@pytest.mark.parametrize("round", [2, 3, 5, 50, 2**31 - 1, 2**31])
@pytest.mark.parametrize("kind", ["step", "finish"])
def test_no_round_is_trained_beyond_those_agreed(round, kind, sent, config, tmp_path) -> None:
    worker = started(config, tmp_path)
    join, first, *_ = sent
    assert [fault(worker, data) for data in (join, first)] == [None, None]
    assert worker.run is not None
    before = worker.run.folder.digest()
    header, body = unseal(Order, first)
    changed = header.model_copy(update={"turn": round, "kind": kind})
    if (kind, round) != ("finish", 2):  # which is the run's end
        assert fault(worker, seal(changed, body)) == "refused"
        assert worker.run.folder.digest() == before
    worker.close()


@pytest.mark.parametrize("counted", [0, 1, 7, 2**31, -2])
def test_no_round_counts_before_it_is_over(counted, sent, config, tmp_path) -> None:
    worker = started(config, tmp_path)
    header, body = unseal(Order, sent[1])
    assert fault(worker, sent[0]) is None
    changed = header.model_copy(update={"counted": counted})
    assert fault(worker, seal(changed, body)) == "refused"
    worker.close()


def perturbed(data: bytes, number: int) -> bytes:
    """Return an order to train with another download than in `data`."""
    header, body = unseal(Order, data)
    message = Message.decode(body)
    groups = {
        group: {name: tensor + 0.001 * number for name, tensor in tensors.items()}
        for group, tensors in message.groups.items()
    }
    return seal(header, Message(message.exchange, groups, message.values).encode())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_round_is_trained_a_few_times_for_other_downloads(restarts, sent, config, tmp_path):
    worker, faults = started(config, tmp_path), []
    assert fault(worker, sent[0]) is None
    for number in range(MAX_TRAININGS + 3):
        if restarts:
            worker.close()
            worker = started(config, tmp_path)
            assert fault(worker, sent[0]) is None
        faults.append(fault(worker, perturbed(sent[1], number)))
    assert faults == [None] * MAX_TRAININGS + ["failed"] * 3
    worker.close()


def renamed(order: Order, number: int) -> Order:
    """Replace everything in an order to join that a client does not need to agree to."""
    assert order.config is not None
    deployment = {**order.config["deployment"], "quorum": 1 + number, "deadline": 60 + number}
    return order.model_copy(
        update={"config": {**order.config, "name": f"run{number}", "deployment": deployment}}
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_a_renamed_run_has_the_folder_of_the_run(restarts, sent, config, tmp_path) -> None:
    """Switch between two runs, and rename both each time."""
    worker = started(config, tmp_path)
    join, faults = unseal(Order, sent[0])[0], []
    for number in range(MAX_TRAININGS + 3):
        if restarts:
            worker.close()
            worker = started(config, tmp_path)
        other = join.model_copy(update={"run": "f" * 16})
        assert fault(worker, seal(renamed(other, number))) is None
        assert fault(worker, seal(renamed(join, number))) is None
        faults.append(fault(worker, perturbed(sent[1], number)))
    worker.close()
    assert faults == [None] * MAX_TRAININGS + ["failed"] * 3
    assert {path.parent.name for path in tmp_path.glob("*/run.json")} == {
        f"poet-{RUN}",
        f"poet-{'f' * 16}",
    }


def test_runs_whose_ids_begin_alike_have_separate_folders_and_counts(config, tmp_path) -> None:
    run = config()
    orders = [order(run).model_copy(update={"run": f"{RUN[:15]}{digit}"}) for digit in "ab"]
    _, replies = asked(run, site(run, "poet", tmp_path), *orders)
    assert [reply.fault for reply in replies] == [None, None]
    runs = {json.loads(p.read_text())["run"] for p in tmp_path.glob("*/run.json")}
    assert runs == {each.run for each in orders}


def new_runs(run: RunConfig, count: int) -> list[Order]:
    """Return orders to join runs with different ids."""
    return [order(run).model_copy(update={"run": f"{number:x}" * 16}) for number in range(count)]


def end(folder: Path) -> None:
    """Mark all runs in a client's folder as finished."""
    for path in folder.glob("*/run.json"):
        (path.parent / "result.json").write_text("{}")


@pytest.mark.parametrize("ended", [False, True])
def test_few_new_runs_are_begun_without_a_person(ended, config, tmp_path) -> None:
    """Check that neither a restart nor the end of runs with equal terms resets the limit."""
    run = config()
    orders = new_runs(run, MAX_RUNS + 2)
    clients, faults = [], []
    for number, each in enumerate(orders):
        changed = each if number % 2 else renamed(each, number)
        worker, [reply] = asked(run, site(run, "poet", tmp_path), changed)  # a new process
        clients.append(worker)
        faults.append(reply.fault)
        if ended:
            end(tmp_path)
    assert faults == [None] * MAX_RUNS + ["limits"] * 2
    assert clients[-1].finished
    assert "start this client again" in clients[-1].error
    assert len(list(tmp_path.glob("*poet*/run.json"))) == MAX_RUNS
    _, [again] = asked(run, site(run, "poet", tmp_path), orders[0])  # an earlier run goes on
    assert again.fault is None
    (tmp_path / f"poet-{orders[0].run}").rename(tmp_path / "over")  # the operator agrees to more
    _, [reply] = asked(run, site(run, "poet", tmp_path), orders[-1])
    assert reply.fault is None


def test_few_bases_are_loaded_for_runs_that_do_not_begin(config, tmp_path) -> None:
    """Send orders of runs for which the client has other weights, so that none has a folder."""
    names = ("tiny-gpt2", "tiny-gpt2-2m", "tiny-llama", "tiny-polyglot")
    orders = [
        order(config(base=name)).model_copy(update={"base": "0" * 16, "run": f"{n}" * 16})
        for n, name in enumerate(names)
    ]
    place = replace(site(config(base="tiny-gpt2"), "poet", tmp_path), base=None)
    _, replies = asked(config(), place, *orders[:3], orders[0], orders[3])
    assert [reply.fault for reply in replies] == ["base"] * 4 + ["limits"]
    assert not list(tmp_path.glob("*/run.json"))


def test_ended_runs_with_other_terms_do_not_count(config, tmp_path) -> None:
    for number, each in enumerate(new_runs(config(), MAX_RUNS + 2)):
        run = config(seed=number)
        other = order(run).model_copy(update={"run": each.run})
        _, [reply] = asked(run, site(run, "poet", tmp_path), other)
        assert reply.fault is None
        end(tmp_path)


def test_unfinished_runs_are_limited_on_disk(config, tmp_path) -> None:
    """Check that the limit applies to approved runs too, and not to runs of other clients."""
    run = config()
    for name in ("poet", "other-poet"):
        for number in range(MAX_UNFINISHED):
            folder: Path = tmp_path / f"{name}-{number:016x}"
            folder.mkdir()
            (folder / "run.json").write_text("{}")
    place = replace(site(run, "poet", tmp_path), asks=True)
    worker, [reply] = asked(run, place, order(run))
    assert reply.fault == "limits"
    assert "delete the folders" in worker.error
    (tmp_path / f"poet-{0:016x}" / "result.json").write_text("{}")
    _, [reply] = asked(run, place, order(run))
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


@pytest.mark.parametrize("pinned", [False, True])
def test_a_person_is_asked_about_each_further_run(pinned, config, tmp_path) -> None:
    run, shown = config(), []
    place = replace(
        site(run, "poet", tmp_path),
        asks=True,
        agrees=lambda order, _: shown.append(order.run) or True,
        agreed=agreed_terms(run, "poet") if pinned else None,
    )
    orders = new_runs(run, MAX_RUNS + 2)
    worker, replies = asked(run, place, *orders)
    assert [reply.fault for reply in replies] == [None] * len(orders)
    assert shown == [each.run for each in orders[MAX_RUNS if pinned else 0 :]]  # once for each run
    assert not worker.error
    further = orders[0].model_copy(update={"run": "a" * 16})
    worker, [reply] = asked(run, replace(place, agrees=lambda *_: False), further)
    assert (reply.fault, worker.declined) == ("declined", True)


def test_the_runs_of_a_client_have_a_bound_in_bytes(config, tmp_path) -> None:
    run = config()
    folder = tmp_path / f"poet-{0:016x}"
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
