"""Other reductions and weights of uploads, with every method."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from shortened import TOKENS, joined_with_tokens
from tensors import Tensors, close_to, mean_of
from torch import Tensor

import coterie
from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.engines.local import LocalRun
from coterie.messages import Message, MessageError
from coterie.messages.schema import Reduce
from coterie.runs import RunFolder
from coterie.testing.rounds import close, joined, one_round, step, take
from coterie.transforms.reductions import Median


@pytest.fixture
def run(each_run) -> RunConfig:
    """A run of every method of which there is a mean."""
    if not each_run.method.schema().reduced("mean"):
        pytest.skip("the server's side takes no mean of uploads")
    return each_run


@coterie.register
class Middle(Median):
    """The median, of uploads as they are: nothing is encoded."""

    name: ClassVar[str] = "middle"
    least: ClassVar[int] = 2
    reductions: ClassVar[frozenset[Reduce]] = frozenset()


def held(local: LocalRun) -> dict[str, Tensor]:
    """Return the shared parameters of the server, by name."""
    return local.value.adapter


def sent(uploads: dict[str, Message], run: RunConfig) -> dict[str, dict[str, Tensor]]:
    """Return the averaged tensors of each client's upload."""
    mean = run.method.schema().reduced("mean") & {"adapter"}
    return {c: {n: t for g in mean for n, t in u[g].items()} for c, u in uploads.items()}


@pytest.mark.slow
def test_another_reduction_needs_no_change_to_any_method(run: RunConfig, tmp_path) -> None:
    if any(field.name == "residual" for field in run.method.schema().down):
        pytest.skip("it makes means exact, and refuses reductions")
    aggregation = run.aggregation.model_copy(update={"transforms": (Middle(),)})
    run = run.model_copy(update={"aggregation": aggregation})
    local = joined(run)
    uploads = [*sent(one_round(local, 0), run).values()]
    if not any(uploads):  # some methods exchange other things first
        uploads = [*sent(one_round(local, 1), run).values()]
    for name in {name for upload in uploads for name in upload}:
        each = [upload[name].double() for upload in uploads if name in upload]
        expected = torch.stack(each).quantile(0.5, dim=0)
        torch.testing.assert_close(held(local)[name].double(), expected, rtol=1e-6, atol=1e-8)
    assert any(uploads)
    result: Any = RunFolder(coterie.run(run, out=tmp_path / "run").path).result
    assert result["trained"].keys() == {client.name for client in run.clients}


def weighed(run: RunConfig) -> LocalRun:
    """Return a run that weighs by tokens, and whose clients have TOKENS training tokens."""
    spec = type(run.aggregation)(weights="tokens")
    return joined_with_tokens(run.model_copy(update={"aggregation": spec}))


def test_exact_averages_are_weighed_too(config) -> None:
    local = weighed(config(method={"name": "fedavg", "exact": True}))
    before: dict[str, Tensor] = {}  # what was added to a pair's product until now, by its A

    def products(tensors: Tensors) -> dict[str, Tensor]:
        factors = {n: t.double() for n, t in tensors.items()}
        return {n: factors[n[:-1] + "B"] @ A for n, A in factors.items() if n.endswith("A")}

    for round in range(2):
        uploads = one_round(local, round)
        download = local.message("poet")
        mean = mean_of((products(u["adapter"]) for u in uploads.values()), TOKENS.values())
        residual = products(download["residual"])
        for a, product in products(download["adapter"]).items():
            expected = mean[a] + before.get(a, 0)
            torch.testing.assert_close(product + residual[a], expected, rtol=1e-4, atol=1e-7)
        before = residual


def test_nobody_claims_more_tokens_than_when_joining(config) -> None:
    local = weighed(config(method="fedavg"))
    local.open(local.config.turn(0), ["poet"])
    upload = step(local, "poet", 0)
    wrong: list[tuple[dict[str, Any], str]] = [({}, "training tokens")]
    wrong += [({"tokens": t}, "'poet' claims .* 2,000 when it joined") for t in (2001, 10**15)]
    wrong += [({"tokens": t}, "training tokens") for t in (None, 0, -3, 2.5, True, "2000")]
    for values, why in wrong:
        with pytest.raises(MessageError, match=why):
            close(local, 0, {"poet": replace(upload, values=values)})
    for values in ({}, {"tokens": 0}, {"tokens": True}):
        with pytest.raises(MessageError, match="training tokens"):
            local.exchange.join("poet", Message(values=values))
    close(local, 0, {"poet": replace(upload, values={"tokens": 1999})})  # fewer may be


def test_every_method_with_a_mean_can_weigh_by_tokens(run: RunConfig) -> None:
    local: Any = weighed(run)
    compared = False
    for round in range(2):
        uploads = one_round(local, round)
        tokens = [upload.values["tokens"] for upload in uploads.values()]
        texts = all(isinstance(c.context.data.train, Tokens) for c in local.clients.values())
        assert min(tokens) > 0
        assert run.method.name not in ("fedavg", "comigs-1g1s") or tokens == [*TOKENS.values()]
        tensors = sent(uploads, run).values()
        if any(tensors) and not compared:  # some methods exchange other things first
            compared, mean = True, mean_of(tensors, tokens)
            assert close_to({n: held(local)[n] for n in mean}, mean, atol=1e-7)
            assert not texts or not close_to(mean, mean_of(tensors), atol=1e-5)
    assert compared
    take(local)
