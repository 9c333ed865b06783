"""How uploads become one is written once: other reductions and weights, with every method."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, cast

import pytest
import torch
from every_method import METHODS, each_method, run_of, some
from torch import Tensor

import coterie
from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.messages import Message, MessageError
from coterie.messages.schema import Reduce
from coterie.runs import RunFolder
from coterie.testing import loop
from coterie.testing.rounds import close, joined, one_round, step, take
from coterie.transforms.reductions import Median

TOKENS = {"diarist": 500, "poet": 2000, "whaler": 1250}


@pytest.fixture(params=each_method())
def run(request, values, teachers) -> RunConfig:
    """A run of every method of which there is a mean."""
    run = run_of(request.param, values, teachers)
    if not run.method.schema().reduced("mean"):
        pytest.skip("the server's side takes no mean of uploads")
    return run


@coterie.register
class Middle(Median):
    """The median, of uploads as they are: nothing is encoded."""

    name: ClassVar[str] = "middle"
    least: ClassVar[int] = 2
    reductions: ClassVar[frozenset[Reduce]] = frozenset()


def held(local: LocalRun) -> dict[str, Tensor]:
    """The shared parameters of the server, by name."""
    return local.value.adapter


def sent(uploads: dict[str, Message], run: RunConfig) -> dict[str, dict[str, Tensor]]:
    """What the server's side gets no more than a mean of: each client's, by name."""
    mean = run.method.schema().reduced("mean") & {"adapter"}
    found: dict[str, dict[str, Tensor]] = {}
    for client, upload in uploads.items():
        for group in mean:
            for name, tensor in upload[group].items():
                found.setdefault(name, {})[client] = tensor
    return found


@pytest.mark.slow
def test_another_reduction_needs_no_change_to_any_method(run: RunConfig, tmp_path) -> None:
    if any(field.name == "residual" for field in run.method.schema().down):
        pytest.skip("it makes means exact, and refuses reductions")
    aggregation = run.aggregation.model_copy(update={"transforms": (Middle(),)})
    run = run.model_copy(update={"aggregation": aggregation})
    local = joined(run)
    tensors = sent(one_round(local, 0), run) or sent(one_round(local, 1), run)
    assert tensors  # some methods exchange other things first
    for name, of in tensors.items():
        each, middle = sorted(of), len(of) // 2
        ascending = torch.stack([of[client].double() for client in each]).sort(dim=0).values
        expected = ascending[middle]
        if len(of) % 2 == 0:
            expected = (expected + ascending[middle - 1]) / 2
        torch.testing.assert_close(held(local)[name].double(), expected, rtol=1e-6, atol=1e-8)
    result = RunFolder(coterie.run(run, out=tmp_path / "run").path).result
    assert result is not None
    assert result["trained"].keys() == {client.name for client in run.clients}


def weighed(run: RunConfig) -> LocalRun:
    """Sides whose clients have TOKENS to train on and count by them."""
    spec = type(run.aggregation)(weights="tokens")
    run = run.model_copy(update={"aggregation": spec})
    clients = [
        replace(p, data=replace(p.data, train=replace(train, ids=train.ids[: TOKENS[p.name]])))
        for p in Session(run).participants(run)
        for train in [cast(Tokens, p.data.train)]
    ]
    return joined(run, clients=clients)


def mean_by_tokens(of: dict[str, Tensor]) -> Tensor:
    """In float64: the sum of n_k x_k over the sum of n_k."""
    total = sum(TOKENS[client] * tensor.double() for client, tensor in of.items())
    assert isinstance(total, Tensor)
    return total / sum(TOKENS[client] for client in of)


@pytest.mark.parametrize(
    "name", some({"comigs-1g1s"}, ["fedavg", "fedavg, exact", "comigs-1g1s", "uneven"])
)
def test_clients_count_by_their_tokens(name: str, config: Callable[..., RunConfig]) -> None:
    local = weighed(config(method=METHODS[name]))
    uploads = one_round(local, 0)
    assert {c: u.values["tokens"] for c, u in uploads.items()} == TOKENS
    tensors = sent(uploads, local.config)
    for tensor, of in tensors.items():
        expected = mean_by_tokens(of)
        torch.testing.assert_close(held(local)[tensor].double(), expected, rtol=1e-6, atol=1e-8)
    uniform = [torch.stack([t.double() for t in of.values()]).mean(0) for of in tensors.values()]
    shared = [held(local)[tensor].double() for tensor in tensors]
    far = [(one - other).abs().max() for one, other in zip(uniform, shared, strict=True)]
    assert max(far) > 1e-4  # it is something else


def test_exact_averages_are_weighed_too(config: Callable[..., RunConfig]) -> None:
    local = weighed(config(method={"name": "fedavg", "exact": True}))
    before: dict[str, Tensor] = {}  # what was added to a pair's product until now, by its A
    for round in range(2):
        uploads = one_round(local, round)
        download = local.message("poet")
        pairs = [(n, n.removesuffix("A") + "B") for n in held(local) if n.endswith("A")]
        for a, b in pairs:
            products = {
                client: upload["adapter"][b].double() @ upload["adapter"][a].double()
                for client, upload in uploads.items()
            }
            B, A = (download["adapter"][n].double() for n in (b, a))
            R = download["residual"][b].double() @ download["residual"][a].double()
            expected = mean_by_tokens(products) + before.get(a, 0)
            torch.testing.assert_close(B @ A + R, expected, rtol=1e-4, atol=1e-7)
            before[a] = R


def test_nobody_claims_more_tokens_than_when_joining(config: Callable[..., RunConfig]) -> None:
    local = weighed(config(method="fedavg"))
    local.open(local.config.turn(0), ["poet"])
    upload = step(local, "poet", 0)
    for tokens in (2001, 10**15):
        with pytest.raises(MessageError, match=r"'poet' claims .* 2,000 when it joined"):
            close(local, 0, {"poet": replace(upload, values={"tokens": tokens})})
    for tokens in (None, 0, -3, 2.5, True, "2000"):
        with pytest.raises(MessageError, match="training tokens"):
            close(local, 0, {"poet": replace(upload, values={"tokens": tokens})})
    with pytest.raises(MessageError, match="training tokens"):
        close(local, 0, {"poet": replace(upload, values={})})
    for values in ({}, {"tokens": 0}, {"tokens": True}):
        with pytest.raises(MessageError, match="training tokens"):
            local.exchange.join("poet", Message(values=values))
    close(local, 0, {"poet": replace(upload, values={"tokens": 1999})})  # fewer may be


@pytest.mark.slow
def test_all_clients_count_alike_unless_the_run_says_otherwise(
    config: Callable[..., RunConfig], tmp_path
) -> None:
    run = config(method="fedavg", rounds=1)
    assert run.aggregation.weights == "uniform"
    said = config(method="fedavg", rounds=1, aggregation={"weights": "uniform"})
    local = joined(run)
    assert "tokens" not in local.clients["poet"].hello().values
    uploads = one_round(local, 0)
    assert not any(upload.values for upload in uploads.values())
    for name, of in sent(uploads, run).items():
        mean = torch.stack([tensor.double() for tensor in of.values()]).mean(0)
        torch.testing.assert_close(held(local)[name].double(), mean, rtol=1e-6, atol=1e-8)
    folders = [
        RunFolder(coterie.run(one, out=tmp_path / name).path)
        for name, one in (("default", run), ("said", said))
    ]
    loop.assert_same_states(*folders)


def test_every_method_with_a_mean_can_weigh_by_tokens(run: RunConfig) -> None:
    spec = type(run.aggregation)(weights="tokens")
    local = joined(run.model_copy(update={"aggregation": spec}))
    for round in range(2):
        for upload in one_round(local, round).values():
            assert upload.values["tokens"] > 0
    take(local)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comigs, exact", "flexlora, ranks", "fedamole"])
def test_a_deployment_weighs_alike(name: str, config, tmp_path) -> None:
    limits = {"train": 2000, "validation": 400, "test": 400}
    run = config(
        method=METHODS[name],
        rounds=2,
        aggregation={"weights": "tokens"},
        data={"window": 16, "limits": limits},
    )
    local = coterie.run(run, out=tmp_path / "local")
    loop.deploy(run, tmp_path)
    loop.assert_as_local(run, tmp_path, RunFolder(local.path))
