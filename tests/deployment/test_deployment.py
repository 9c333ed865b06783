"""A deployment of real processes, over TLS: it ends in the bits of one process, whoever is killed,
cut off, late or hostile."""

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from looped import assert_private
from lossy import LossyProxy

import coterie
from coterie.bases import EMBEDDED
from coterie.config.read import load_config
from coterie.config.run import parse
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.messages import MessageError
from coterie.messages.envelope import FAULT_MESSAGES, Order, unseal
from coterie.network.keys import Keys
from coterie.runs import RunFolder

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import COTERIE, Deployment, Program, about, assert_same_bits, say, stopped

pytestmark = pytest.mark.slow
NAMES = ("diarist", "lexicographer", "poet", "whaler")
WRITERS = EMBEDDED / "demo-writers"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def four(values: Run) -> Run:
    """A run of seconds with four clients, all of whom a round needs."""

    def make(**changes: Any) -> dict[str, Any]:
        clients = [{"name": name, "path": f"{name}.txt"} for name in NAMES]
        return values(data_root=str(WRITERS), clients=clients) | changes

    return make


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Makes deployments, and kills them when the test is over."""
    made: list[Deployment] = []

    def make(run: dict[str, Any], **options: Any) -> Deployment:
        made.append(Deployment(tmp_path / f"deployment-{len(made)}", run, **options))
        return made[-1]

    yield make
    for deployment in made:
        deployment.__exit__(None, None, None)


def in_one_process(run: dict[str, Any], out: Path) -> RunFolder:
    """Run the same configuration in the local engine."""
    return RunFolder(coterie.run(parse(run), out=out).path)


PCL = {"name": "pcl-2", "warmup": 1, "every": 1, "validation_batches": 2}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("comigs-1g1s", id="comigs"),
        pytest.param(PCL, id="pcl", marks=pytest.mark.thorough),
    ],
)
def test_the_demo_between_five_processes_is_that_of_one(method, deploy, tmp_path) -> None:
    """Set up with the commands that a person would use."""
    settings = ("training.steps=2", "rounds=3", "threads=1", "data.limits.test=2000")
    demo = load_config(None, settings).as_dict()
    run = {key: demo[key] for key in ("rounds", "threads", "data", "training", "data_root")}
    run |= {"name": "demo", "base": "tiny-gpt2", "method": method}
    run["clients"] = [{"name": name, "path": f"{name}.txt"} for name in NAMES]
    deployment = deploy(run)
    for words in (["init"], *(["add", name] for name in NAMES)):
        subprocess.run(
            [*COTERIE, "keys", *words],
            cwd=deployment.folder,
            check=True,
            timeout=60,
            capture_output=True,
        )
    server = deployment.serve()
    deployment.join()
    deployment.wait(lambda: deployment.done() >= 1)
    children = server.family()[1:]
    assert children == []
    local = in_one_process(run, tmp_path / "local")
    assert deployment.ends() == {"server": 0, **dict.fromkeys(NAMES, 0)}
    assert stopped(children)
    assert_same_bits(deployment, local)
    for name in NAMES:
        assert deployment.client_log(name).count("loaded the base") == 1
        assert deployment.programs[name].text.count("round 3/3: ") == 1


@pytest.mark.thorough
def test_a_network_that_is_cut_for_30_seconds_changes_no_bit(deploy, four, tmp_path) -> None:
    run = four(method={"name": "pcl-2", "warmup": 1, "every": 1, "validation_batches": 1})
    deployment = deploy(run, taped=("poet",))
    deployment.serve()
    rope = deployment.rope("poet")
    with LossyProxy(deployment.port) as proxy:
        deployment.join("poet", port=proxy.port)
        deployment.join("diarist", "lexicographer", "whaler")
        deployment.held("poet")
        local = in_one_process(run, tmp_path / "local")
        proxy.whole.clear()
        rope.unlink()
        time.sleep(30)
        assert deployment.done() == 0
        proxy.whole.set()
        took = deployment.until_counted("poet")
        assert set(deployment.ends().values()) == {0}
    assert_same_bits(deployment, local)
    assert all(deployment.client_log(name).count("loaded the base") == 1 for name in NAMES)
    say("network of a client cut for 30 s in mid-round", "round went on; same bits", took)


def test_a_killed_server_goes_on_and_nothing_personal_travels(deploy, four, tmp_path) -> None:
    run = four()
    deployment = deploy(run, taped=("server", *NAMES))
    deployment.serve()
    ropes = [deployment.rope(name, round=1) for name in ("poet", "whaler")]
    deployment.join()
    deployment.held("poet")
    deployment.held("whaler")
    before = deployment.done()
    children = deployment.kill("server")
    assert children == []
    assert stopped(children)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", deployment.port))
    ropes[0].unlink()  # the poet's upload finds no server; the whaler's comes later
    assert deployment.done() == before
    printed_before, began = len(deployment.programs["server"].text), time.monotonic()
    server = deployment.serve("--resume")
    deployment.wait(lambda: "poet joined" in server.text[printed_before:])
    ropes[1].unlink()
    deployment.wait(lambda: deployment.done() > before)
    took = time.monotonic() - began
    assert set(deployment.ends().values()) == {0}
    assert_same_bits(deployment, in_one_process(run, tmp_path / "local"))
    say(
        "server killed in mid-round, started again with --resume",
        "round done again; same bits",
        took,
    )
    _nothing_personal_travelled(deployment)


def _nothing_personal_travelled(deployment: Deployment) -> None:
    ends = {name: deployment.tape(name) for name in ("server", *NAMES)}
    clients = {data for name in NAMES for data in ends[name]}
    received = [data for data in ends["server"] if data in clients]
    assert len(received) > 3 * 2 * len(NAMES)  # both ends saw the same
    travelled = b"".join(data for tape in ends.values() for data in tape)
    for name in NAMES:
        state = deployment.client(name).load(f"client-{name}")
        assert_private(state, deployment.texts[name].read_bytes(), travelled)
    assert str(deployment.folder).encode() not in travelled
    assert str(WRITERS).encode() not in travelled


@pytest.fixture(scope="module")
def deployment(four, tmp_path_factory) -> Iterator[Deployment]:
    """A run without end of which three of four clients are enough; the fourth came late."""
    run = four(rounds=100_000, deployment={"quorum": 3, "deadline": 8})
    folder = tmp_path_factory.mktemp("long") / "run"
    with (
        Deployment(folder, run, taped=NAMES) as deployment,
        small_disk(folder / "site-lexicographer"),
    ):
        deployment.serve()
        deployment.join("diarist", "lexicographer", "poet")
        deployment.wait(lambda: deployment.done() >= 2)
        deployment.join("whaler")
        deployment.until_counted("whaler")
        yield deployment


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Attach a disk of 16 MB at a folder, if the user has the permission."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(mount, capture_output=True).returncode
    yield
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def all_present(deployment: Deployment) -> None:
    """Start whoever does not run, and wait for another round with everybody."""
    for name in ("server", *NAMES):
        if deployment.programs[name].process.poll() is not None:
            deployment.serve("--resume") if name == "server" else deployment.join(name)
    now = deployment.done()

    def all_counted() -> bool:
        last = {deployment.counted(name)[-1] for name in NAMES}
        return len(last) == 1 and last.pop() >= now

    deployment.wait(all_counted)


def test_a_client_that_joins_late_takes_part_from_then_on(deployment) -> None:
    first = deployment.counted("whaler")[0]
    assert first >= 2
    assert f"round {first + 1}/" in deployment.programs["whaler"].text
    deployment.rounds_more(3)
    assert deployment.counted("whaler")[:3] == [first, first + 1, first + 2]


def test_a_client_that_is_killed_goes_on_from_its_last_counted_round(deployment, tmp_path) -> None:
    all_present(deployment)
    rope = deployment.hold("poet")
    last, before = deployment.counted("poet")[-1], len(deployment.tape("poet"))
    deployment.kill("poet")
    assert about(deployment.client("poet"))["turn"] == last
    shutil.copytree(deployment.folder / "site-poet", tmp_path / "copy")
    deployment.rounds_more(1)
    assert max(deployment.counted("diarist")) > max(deployment.counted("poet")) == last
    rope.unlink()
    began = time.monotonic()
    deployment.join("poet")
    deployment.until_counted("poet", after=last + 1)
    took = time.monotonic() - began
    lives = deployment.tape("poet")[before:]
    join = next(data for data, order in orders(lives) if order.kind == "join")
    after = lives[lives.index(join) :]
    step, counted = next((d, o.counted) for d, o in orders(after) if o.kind == "step")
    assert counted == last
    replies = []
    for out in (tmp_path / "copy", tmp_path / "anew"):
        worker = Worker(
            Site("poet", {"path": str(deployment.texts["poet"])}, out, deployment.base_of("poet"))
        )
        worker.answer(join)
        replies.append(worker.answer(step))
        worker.close()
    assert replies[0] in lives  # it went on from what was on its disk when it was killed
    assert replies[1] not in lives
    say("client killed in mid-round, started again", "left out; goes on from its disk", took)


def orders(tape: list[bytes]) -> Iterator[tuple[bytes, Order]]:
    """Return the orders among messages, as bytes and decoded."""
    for data in tape:
        with suppress(MessageError):
            yield data, unseal(Order, data)[0]


def test_a_straggler_past_the_deadline_is_left_out_and_caught_up(deployment) -> None:
    all_present(deployment)
    rope = deployment.hold("whaler")
    whaler, last = deployment.programs["whaler"], deployment.counted("whaler")[-1]
    whaler.send(signal.SIGSTOP)
    rope.unlink()
    deployment.rounds_more(1)
    assert deployment.counted("whaler")[-1] == last
    assert f"round {last + 2}: whaler was excluded" in deployment.log()
    whaler.send(signal.SIGCONT)
    took = deployment.until_counted("whaler")
    assert f"the server did not accept the upload of round {last + 2}" in deployment.client_log(
        "whaler"
    )
    assert last + 1 not in deployment.counted("whaler")
    say("client slower than the deadline (stopped in training)", "left out, then caught up", took)


def test_a_client_is_left_out_while_its_disk_is_full(deployment) -> None:
    name = "lexicographer"
    all_present(deployment)
    rope, last = deployment.hold(name), deployment.counted(name)[-1]
    before, printed_before = deployment.logs(), len(deployment.programs[name].text)
    make_space = filled(deployment.folder / f"site-{name}", deployment.programs[name])
    try:
        rope.unlink()
        fault = f"{name} could not train: {FAULT_MESSAGES['failed']}"
        deployment.wait(lambda: fault in deployment.log(before))
        deployment.rounds_more(1)
        assert deployment.counted(name)[-1] == last
    finally:
        make_space()
    took = deployment.until_counted(name)
    assert about(deployment.client(name))["turn"] > last
    printed = deployment.programs[name].text[printed_before:]
    assert re.search(r"could not process the server's request: Could not write .*", printed)
    assert "Traceback" not in printed
    say("disk of a client full, then emptied", "left out with a line on each side", took)


def filled(folder: Path, program: Program) -> Callable[[], object]:
    """Fill a client's disk; where it has none of its own, let it write no file over a few bytes.

    Return a function that makes space again.
    """
    if folder.is_mount():
        ballast = folder / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return ballast.unlink
    process = psutil.Process(program.process.pid)
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, before[1]))
    return lambda: process.rlimit(psutil.RLIMIT_FSIZE, before)


@pytest.mark.thorough
def test_a_renewed_key_replaces_the_one_in_use(deployment) -> None:
    all_present(deployment)
    printed_before = len(deployment.programs["poet"].text)
    key_file = Keys(deployment.folder / "keys").renew("poet", deployment.folder / "new.key")
    deployment.wait(
        lambda: "closed the connection" in deployment.programs["poet"].text[printed_before:]
    )
    deployment.wait(lambda: "poet disconnected" in deployment.log())
    key_file.replace(deployment.folder / "poet.key")
    deployment.until_counted("poet", after=deployment.done() + 1)


def test_ctrl_c_and_sigterm_end_everybody_with_a_sentence(deployment) -> None:
    all_present(deployment)
    rope = deployment.hold("poet")  # one of them in mid-round
    families = [p for program in deployment.programs.values() for p in program.family()]
    for name, number in zip(
        (*NAMES, "server"), (signal.SIGINT, signal.SIGTERM) * 2 + (signal.SIGINT,), strict=False
    ):
        deployment.programs[name].send(number)
    assert deployment.ends(60) == dict.fromkeys(("server", *NAMES), 130)
    assert stopped(families)
    rope.unlink()
    printed_before = len(deployment.programs["server"].text)
    again = deployment.serve("--resume")
    deployment.wait(lambda: "resuming after" in again.text[printed_before:])
    families = again.family()
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == 130
    assert stopped(families)
    for name in NAMES:
        assert deployment.programs[name].text.endswith(
            "Stopped. Progress is saved. To resume, run the same command.\n"
        )
    how = "Stopped. Finished rounds are saved. To resume, run the same command with --resume.\n"
    assert again.text.count(how) == 2
    assert again.text.endswith(how)
    for name, program in deployment.programs.items():
        assert "Traceback" not in program.text, name
