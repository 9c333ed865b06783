"""The message sizes that are computed before the first round, compared with sent messages."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from every_method import each_method, run_of
from transformers import LlamaConfig

import coterie
from coterie import CoterieError, RunConfig
from coterie.bases import load_skeleton
from coterie.config.run import parse
from coterie.deployment.client import Worker
from coterie.deployment.status import ServerWatch
from coterie.federation.sizes import MessageSizes, Size, check_run, message_sizes
from coterie.messages import Schema, message
from coterie.methods.adapter import AdapterMethod
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, server, workers
from coterie.testing.small import write_tokenizer

PCL: dict[str, Any] = {"name": "pcl-2", "warmup": 2, "every": 1, "validation_batches": 1}
LEASE: dict[str, Any] = {"name": "fedlease", "warmup": 2, "max_clusters": 3}


def parameters_of(run: RunConfig) -> Mapping[str, Any]:
    """Return the parameters of a client's adapter."""
    assert isinstance(run.method, AdapterMethod)
    return run.method.adapter(load_skeleton(run.base, run.root), run.seed, "poet").parameters()


def sent(run: RunConfig, out: Path, monkeypatch) -> tuple[dict[str, Size], list[MessageSizes]]:
    """Execute a run, and return the sizes of its largest messages and the computed sizes."""
    largest = {"up": Size(0, 0), "down": Size(0, 0), "hello": Size(0, 0)}
    computed: list[MessageSizes] = []
    send = Schema.send

    def measured(self: Schema, way: Any, content: Any) -> bytes:
        data = send(self, way, content)
        header = 8 + int.from_bytes(data[:8], "little")
        largest[way] = max(largest[way], Size(len(data), header))
        return data

    monkeypatch.setattr(Schema, "send", measured)
    monkeypatch.setattr("coterie.engines.local.check_messages", computed.append)
    coterie.run(run, out=out)
    return largest, computed


@pytest.mark.parametrize("method", each_method())
def test_no_message_is_larger_than_computed(
    method, values, teachers, tmp_path, monkeypatch
) -> None:
    run = run_of(method, values, teachers)
    schema = run.method.schema()
    if any(not isinstance(f.dtype, str) for f in (*schema.up, *schema.down)):
        pytest.skip("predictions are not counted")
    largest, computed = sent(run, tmp_path / "run", monkeypatch)
    for way in ("up", "down"):
        size = max(sizes.largest(way) for sizes in computed)
        assert largest[way].header <= size.header
        assert largest[way].total - largest[way].header <= size.total - size.header


AUTO = {"name": "auto", "every": 1}


@pytest.mark.parametrize(
    "method",
    [
        *({"name": name} for name in ("fedavg", "hetlora", "cobo", "ifca", "clove")),
        *(PCL, AUTO, {**AUTO, "peers": 1}, {"name": "fedfomo", "peers": 1}),
    ],
    ids=lambda method: "-".join(map(str, method.values())),
)
def test_tensors_of_the_largest_messages(method, config, tmp_path, monkeypatch) -> None:
    largest, computed = sent(config(method=method, rounds=4), tmp_path / "run", monkeypatch)
    for way in ("up", "down"):
        size = max(s.largest(way) for s in computed)
        assert largest[way].total - largest[way].header == size.total - size.header


def test_residuals_grow_up_to_the_width_of_the_layer(config) -> None:
    run = config(method={"name": "fedavg", "exact": True, "mlp": None, "attention": {"rank": 2}})
    parameters = parameters_of(run)
    names = {n: p.tensor.shape for n, p in parameters.items()}
    pairs = sum(math.prod(shape) for shape in names.values())
    sizes = message_sizes(run, parameters, 3)

    def numbers(exchanges: int) -> float:
        size = replace(sizes, exchanges=exchanges).largest("down")
        return (size.total - size.header) / 4

    assert numbers(1) == pairs + 3 * pairs  # the mean, and residuals of rank 3 x 2
    assert numbers(5) == pairs + 15 * pairs
    assert numbers(6) == numbers(100) == pairs + 16 * pairs  # rank 32, the base's width


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of Llama-3.1-8B, without weights."""
    folder = tmp_path_factory.mktemp("llama")
    write_tokenizer(folder)
    shape = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    names = {"vocab_size": 128_256, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**shape, **heads, **names).save_pretrained(folder)
    return str(folder)


TOO_LARGE = (
    "A download of a client may have 1,125.4 MB, but the limit is 1,073.7 MB; it fits with at most "
    "4 clients instead of 5, or with a LoRA rank of at most 7 instead of 8."
)
NAMES_TOO_LARGE = "of which 15.1 MB are names and shapes, but the limit is 8.4 MB; .* at most 28 c"
EXACT = {"name": "fedavg", "exact": True}


@pytest.mark.parametrize(
    ("method", "clients", "reason"),
    [
        ("pcl-2", 5, TOO_LARGE),
        ("pcl-2", 4, ""),
        ("pcl-2", 10, "2,532.0 MB, .* at most 4 clients instead of 10"),
        (EXACT, 5, "14,191.7 MB, .* at most 1 round instead of 20"),
        ("auto", 50, ""),
        ("pcl-2", 50, NAMES_TOO_LARGE),
    ],
)
def test_eight_billion_weights(method, clients, reason, llama, tmp_path, monkeypatch) -> None:
    """Compute the sizes of messages of a run with a base of Llama-3.1-8B's shape."""
    monkeypatch.setattr(message, "LARGEST_MESSAGE", 2 ** (40 if reason == NAMES_TOO_LARGE else 30))
    monkeypatch.setattr(message, "LARGEST_HEADER", 2**23)
    names = [f"client-{n}" for n in range(clients)]
    entries = [{"name": name, "path": "text.txt"} for name in names]
    run = parse({"base": llama, "method": method, "rounds": 20, "clients": entries})
    with pytest.raises(CoterieError, match=reason) if reason else nullcontext():
        check_run(run, load_skeleton(llama), names, tmp_path)


@pytest.fixture
def too_small(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig, int], None]:
    """A function that sets the limit to the size of a download with a given number of clients."""

    def limit(run: RunConfig, clients: int) -> None:
        size = message_sizes(run, parameters_of(run), clients).largest("down").total
        monkeypatch.setattr(message, "LARGEST_MESSAGE", size)
        monkeypatch.setattr(message, "LARGEST_HEADER", size)

    return limit


NO_TRAINING = "coterie.training.local.LocalTraining.run"
FITS = "the limit is .* it fits with at most 2 clients instead of 3"


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_is_refused_before_its_folder_is_written(engine, config, tmp_path, too_small) -> None:
    run = config(method=PCL, rounds=4)
    too_small(run, 2)
    with pytest.raises(CoterieError, match=FITS):
        coterie.run(run, out=tmp_path / "run", engine=engine)
    assert not (tmp_path / "run").exists()
    too_small(run, 3)
    coterie.run(run, out=tmp_path / "run", engine=engine)


def test_the_uploads_of_a_round_fit_on_the_disk(config, tmp_path, monkeypatch) -> None:
    run = config(method="fedavg", rounds=1)
    needed = 3 * message_sizes(run, parameters_of(run), 3).largest("up").total
    for free, reason in [
        (needed, ""),
        (needed - 1, r"The uploads of a round may need .* \(TMPDIR"),
    ]:
        space = SimpleNamespace(free=free)
        monkeypatch.setattr("coterie.federation.sizes.disk_usage", lambda _, space=space: space)
        if not reason:
            check_run(run, load_skeleton(run.base, run.root), list("abc"), tmp_path)
            continue
        with pytest.raises(CoterieError, match=reason):
            coterie.run(run, out=tmp_path / "run")


def test_a_run_is_refused_before_training(config, tmp_path, monkeypatch) -> None:
    """Check a method whose parameters only clients know."""
    monkeypatch.setattr(message, "LARGEST_MESSAGE", 80_000)
    monkeypatch.setattr(NO_TRAINING, None)
    with pytest.raises(CoterieError, match="A download of a client may have"):
        coterie.run(config(method=LEASE, rounds=4), out=tmp_path / "run")


def test_a_server_refuses_a_run_before_clients_join(config, tmp_path, too_small) -> None:
    run = config(method=PCL, rounds=4)
    too_small(run, 2)
    network = Loop(workers(run, tmp_path))
    with pytest.raises(CoterieError, match=FITS):
        server(run, tmp_path / "server", network)
    assert not network.orders


def test_uploads_and_downloads_can_be_limited(config, tmp_path, monkeypatch) -> None:
    run = config(method="fedavg", rounds=4)
    network = Loop(workers(run, tmp_path))
    network.largest = 1000
    with pytest.raises(CoterieError, match=r"A download .* the limit is 0\.0 MB"):
        server(run, tmp_path / "server", network)
    monkeypatch.setattr("coterie.deployment.joins.MiB", 100)
    monkeypatch.setattr("coterie.federation.sizes.MiB", 100)
    run = config(method=PCL, rounds=4, deployment={"largest_message": 1000})
    with pytest.raises(CoterieError, match=r"An upload .* or with deployment.largest_message: \d+"):
        server(run, tmp_path / "server", Loop(workers(run, tmp_path)))


def test_a_client_with_less_memory_leaves_before_the_first_round(
    config, tmp_path, too_small, monkeypatch
) -> None:
    run = config(method=PCL, rounds=3, deployment={"quorum": 2, "deadline": 60})
    network = Loop(workers(run, tmp_path))
    run_server = server(run, tmp_path / "server", network)
    join = Worker.answer

    def answer(self: Worker, data: bytes) -> bytes:
        too_small(run, 2 if self.site.name == "poet" else 3)
        return join(self, data)

    monkeypatch.setattr(Worker, "answer", answer)
    monkeypatch.setattr("coterie.deployment.server.GRACE", 0.0)
    run_server.rounds()
    assert [order.kind for name, order in network.orders if name == "poet"] == ["join"]
    assert "fits with at most 2 clients" in network.workers["poet"].error
    assert RunFolder(tmp_path / "server").result is not None


class Notes(ServerWatch):
    """A watch that stores its notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("client_checks", [True, False])
def test_a_client_that_makes_downloads_too_large_is_not_admitted(
    client_checks, config, tmp_path, too_small, monkeypatch
) -> None:
    run = config(method=PCL, rounds=3, deployment={"anyone": True, "quorum": 2, "deadline": 60})
    listed, notes = run.model_copy(update={"clients": run.clients[:2]}), Notes()
    network = Loop(workers(run, tmp_path))
    join = Worker.answer

    def answer(self: Worker, data: bytes) -> bytes:
        too_small(run, 2 if client_checks else 3)
        try:
            return join(self, data)
        finally:
            too_small(run, 2)

    monkeypatch.setattr(Worker, "answer", answer)
    monkeypatch.setattr("coterie.deployment.server.GRACE", 0.0)
    too_small(run, 2)
    server(listed, tmp_path / "server", network, notes).rounds()
    trained = {name for name, order in network.orders if order.kind == "step"}
    assert trained == {client.name for client in listed.clients}
    refused = "whaler could not join" if client_checks else "rejected a message from whaler: A down"
    assert any(refused in line for line in notes.lines)
