"""FedIT: which layers carry a pair, what the pairs do, and what the server makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from coterie.adapters import detach
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.methods.fedit import FedIT, FedITFT
from coterie.runs import RunFolder, Watch

LAYERS = {"gpt2": {"c_attn"}, "llama": {"q_proj", "v_proj"}}


def sides(run, method) -> Any:
    run = run.model_copy(update={"method": method})
    session = Session(run)
    return LocalRun(run, session.base, session.participants(run), RunFolder(Path()), Watch())


@pytest.mark.parametrize("family", LAYERS)
def test_queries_and_values_carry_pairs_that_count_alpha_over_rank(config, bases, family) -> None:
    local = sides(config(base=str(bases / family)), FedIT(attention_rank=4, alpha=12.0))
    local.server.open(0, ["poet"])
    client = local.clients["poet"]
    upload = client.step(local.server.download("poet"))
    assert {name.split(".")[-2] for name in upload.tensors} == LAYERS[family]
    assert {name.split("/")[0] for name in upload.tensors} == {"dense"}
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = client.model()(input_ids=ids).logits
        base = client.context.base.model
        detach(base)
        for name in {name.removesuffix(".A").removesuffix(".B") for name in upload.tensors}:
            linear = base.get_submodule(name.removeprefix("dense/"))
            A, B = (upload.tensors[f"{name}.{end}"] for end in "AB")
            update = 12.0 / 4 * B @ A
            linear.weight += update if isinstance(linear, nn.Linear) else update.T
        assert torch.allclose(base(input_ids=ids).logits, expected, atol=1e-5)


def test_the_server_averages_the_pairs(config) -> None:
    local = sides(config(), FedIT())
    local.server.open(0, sorted(local.clients))
    uploads = [c.step(local.server.download(n)) for n, c in sorted(local.clients.items())]
    for name, upload in zip(sorted(local.clients), uploads, strict=True):
        local.server.receive(name, upload)
    local.server.close()
    after = local.server.download("poet").tensors
    assert after.keys() == local.clients["poet"].adapter.parameters().keys()
    for name, tensor in after.items():
        mean = torch.stack([u.tensors[name].double() for u in uploads]).mean(0)
        assert torch.allclose(tensor.double(), mean, atol=1e-7)
        assert not torch.equal(tensor, uploads[0].tensors[name])


def test_which_model_is_the_result() -> None:
    assert (FedIT.reports, FedITFT.reports) == ("aggregated", "trained")
    assert FedITFT().model_dump() == FedIT().model_dump()
