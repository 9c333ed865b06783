"""The memory and the messages that are computed from shapes, against those of real runs."""

from dataclasses import replace

import pytest
import torch
from every_method import METHODS, some
from live import LiveTensors

from coterie.analysis.need import Need, need_of
from coterie.analysis.sizes import bytes_in, client_names
from coterie.analysis.trial import first_exchange, start
from coterie.bases import Base, load_base
from coterie.config.run import RunConfig, parse
from coterie.data.tokens import ClientData
from coterie.engines.session import Session
from coterie.federation.participants import NOTHING, Participant, client_context
from coterie.messages import Message
from coterie.methods.adapter import AdapterClient
from coterie.methods.registry import available


def needed(config: RunConfig) -> Need:
    need = need_of(config, "poet")
    assert isinstance(need, Need)
    return need


def client_of(config: RunConfig) -> tuple[Base, AdapterClient]:
    base = load_base(config.base, config.training.precision, config.data.window)
    nobody = Participant("poet", ClientData(NOTHING, NOTHING, NOTHING), {})
    side = config.method.client(client_context(config, base, nobody, lambda *_: None))
    assert isinstance(side, AdapterClient)
    return base, side


def size(message: Message) -> int:
    return sum(tensor.nbytes for *_, tensor in message.tensors())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["comigs-1g1s", "fedit"])
def test_weights_and_the_adapter_are_counted_exactly(method, precision, config) -> None:
    run = config(method=method, training={"precision": precision}, evaluation={"keep": "last"})
    need, (base, side) = needed(run), client_of(run)
    tensors = {id(t): t.nbytes for t in (*base.model.parameters(), *base.model.buffers())}
    assert need.weights == sum(tensors.values())
    values = sum(p.nbytes for p in side.adapter.tensors().values())
    sent = [p for p in side.parameters().values() if p.role not in ("router", "frozen")]
    experts = sum(p.tensor.nbytes for p in sent)
    assert need.adapter == 3 * values + experts  # values, moments, the gradients of one level
    assert need.copies < 10_000  # the text that takes the place of the client's texts


def test_quantised_weights_take_less(config) -> None:
    bases = [{"name": config().base.name, "weights": kind} for kind in (None, "int8", "nf4")]
    bf16 = {"precision": "bf16"}
    whole, int8, nf4 = (needed(config(base=base, training=bf16)) for base in bases)
    assert nf4.weights < int8.weights < whole.weights
    assert int8.step > nf4.step  # bitsandbytes keeps the inputs of layers in int8
    assert int8.pages == nf4.pages > 0


def test_what_makes_a_step_smaller_or_larger_changes_the_need(config) -> None:
    run = config(training={"batch": 8, "precision": "fp32"}, evaluation={"batch": 1})

    def changed(**settings: object) -> Need:
        return needed(run.model_copy(update={"training": run.training.model_copy(update=settings)}))

    whole, pieces = changed(), changed(micro_batch=2)
    again, stored = changed(checkpointing=True), changed(store_activations=True)
    assert pieces.step < 0.6 * whole.step
    assert again.step < whole.step < stored.step
    assert replace(pieces, step=0) == replace(again, step=0) == replace(whole, step=0)
    assert whole.memory > whole.weights + whole.pages + whole.adapter + whole.step


def test_what_is_frozen_has_neither_gradients_nor_moments(config) -> None:
    half = needed(config(method="ffa-lora"))
    whole = needed(config(method={"name": "fedavg", "mlp": {"rank": 16, "sets": 1}}))
    assert half.exchange.up < whole.exchange.up  # B alone
    assert half.adapter < whole.adapter


UNKNOWN = ("pretrained", "fedprompt", "fedptuning", "fedmkt", "llm2slm")
MESSAGES = ("fedavg", "comigs-1g1s", "auto", "pcl-2")
FAST = ("fedavg", "hetlora", "fedamole", "fedmkt", "pcl-3", "auto", "cobo")


@pytest.mark.parametrize("method", some(FAST, sorted(available()), ()))
def test_every_method_has_an_estimate_or_none(method, config) -> None:
    need, other = need_of(config(method=METHODS[method]), "poet"), needed(config(method="pcl-2"))
    assert (need is None) == method.startswith(UNKNOWN)
    if need is not None:
        assert need.weights == other.weights
        assert need.adapter > 0
        assert (need.exchange is None) == (method in ("pcl-3", "cobo"))  # sends what it computes


@pytest.mark.parametrize("method", some({"fedavg", "comigs-1g1s", "auto"}, MESSAGES))
def test_messages_have_the_computed_sizes(method, config) -> None:
    settings = method if method == "auto" else METHODS[method]
    run = config(method=settings, rounds=4, training={"batch": 2})
    sizes = needed(run).exchange
    local = start(Session(run), run)
    messages = first_exchange(local)
    up, down = size(messages["poet"]["up"]), size(messages["poet"]["down"])
    if method == "auto":  # the second exchange sends all experts, and the trial follows it
        assert sizes.up > up
        local.step(local.config.turn(1), local.names)
        up = sum(tensor.nbytes for tensor in local.exchange.each("adapter")["poet"].values())
    assert up == sizes.up
    if method == "pcl-2":
        assert down == sizes.peers == 2 * sizes.up
        assert sizes.down == 0
    elif method != "auto":
        assert (down, sizes.peers) == (sizes.down, 0)
    assert sizes.server >= bytes_in((local.server, local.value))


def clients(count: int) -> list[dict[str, str]]:
    return [{"name": "poet", "path": "x"}, *({"name": f"c{n}", "path": "x"} for n in range(count))]


@pytest.mark.parametrize(
    ("divide", "names"),
    [
        ({"by": "even", "clients": 3}, ["client-1", "client-2", "client-3"]),
        ({"by": "mixtures", "mixtures": {"b": {"x": 1}, "a": {"y": 1}}}, ["a", "b"]),
        ({"by": "label"}, ["a client"]),  # the labels are in the data
    ],
)
def test_the_clients_of_a_division_are_counted(divide, names, values) -> None:
    texts = {"x": "poet.txt", "y": "whaler.txt"}
    source = {"source": "poet.txt" if divide["by"] == "even" else texts}
    run = parse({k: v for k, v in values(divide=source | divide).items() if k != "clients"})
    assert client_names(run) == names


@pytest.mark.parametrize("method", ["pcl-2", "auto", "fedamole", "fedavg"])
def test_needs_grow_with_the_number_of_clients(method, values) -> None:
    settings = {"name": "fedamole"} if method == "fedamole" else METHODS[method]
    runs = [parse(values(method=settings, clients=clients(n))) for n in (3, 4, 40)]
    few, more, many = map(needed, runs)
    peers = {"pcl-2": (3, 4, 40), "auto": (3, 4, 16)}.get(method, (0, 0, 0))
    sizes = [need.exchange.peers for need in (few, more, many)]
    assert sizes == pytest.approx([count * sizes[0] / max(1, peers[0]) for count in peers])
    assert (many.exchange.server > few.exchange.server) == (method != "fedavg")
    assert many.disk > more.disk > few.disk
    assert few.exchange.up == more.exchange.up == many.exchange.up or method == "fedamole"
    assert many.receiving >= few.receiving


def test_the_servers_memory_grows_with_the_clients_in_a_download(values) -> None:
    runs = [parse(values(method="auto", clients=clients(n))) for n in (3, 16, 40)]
    few, most, more = (needed(run).exchange.server for run in runs)  # a download has at most 16
    assert few < most == more


def test_residuals_of_exact_averages_are_counted(config) -> None:
    exact, mean = needed(config(method=METHODS["fedavg, exact"])), needed(config(method="fedavg"))
    assert exact.exchange.down > 2 * mean.exchange.down
    assert exact.exchange.server > mean.exchange.server
    assert exact.receiving > mean.receiving


def test_tensors_that_share_memory_count_once() -> None:
    x = torch.zeros(100)
    held = {"a": x, "b": [x[:10], torch.ones(5)], "c": torch.zeros(3, device="meta"), "d": "text"}
    assert bytes_in(held) == 4 * 105


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pcl-2", "auto"])
def test_applying_a_download_holds_what_is_computed(method, config) -> None:
    run = config(method=METHODS[method], rounds=4, training={"batch": 2})
    need = needed(run)
    local = start(Session(run), run)
    first_exchange(local)
    if method == "auto":
        local.step(local.config.turn(1), local.names)
    payload = local.download("poet")
    with LiveTensors() as tensors:
        local.clients["poet"].receive(local.schema.receive("down", payload))
    assert tensors.peak + len(payload) < 1.1 * need.receiving + need.step
