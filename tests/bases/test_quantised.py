"""Bases in int8 and nf4: close to the checkpoint, trained through, and the same whenever loaded."""

import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.adapters import Adapter, Layout, detach, of_roles
from coterie.bases import Base, BaseSpec, load_base, load_skeleton
from coterie.bases.sites import sizes
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, deploy

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
FORMATS = ("int8", "nf4")
IDS = torch.arange(3, 67).view(2, 32)


@pytest.fixture(scope="module")
def folders(bases, tmp_path_factory) -> dict[str, str]:
    """Bases wide enough that rounding averages out."""
    folder, paths = tmp_path_factory.mktemp("wide"), {}
    tokenizer = AutoTokenizer.from_pretrained(bases / "gpt2")
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"gpt2": {}, "llama": {"intermediate_size": 128, "num_key_value_heads": 2}}
    for family, own in more.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **sizes, **own, initializer_range=0.1)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        paths[family] = str(folder / family)
    return paths


def loaded(folder: str, weights: Any, precision: Any = "fp32") -> Base:
    return load_base(BaseSpec(name=folder, weights=weights), precision, 32)


def gradients(base: Base) -> torch.Tensor:
    """Return the gradients of an adapter's matrices B as one vector."""
    adapter = Adapter(base.model, Layout(), 0, "ada", lambda _: True)
    model = adapter.attach(base.model)
    adapter.require_grad(of_roles("generalist", "specialist", "dense"))
    language_model_loss(model, IDS).backward()
    detach(base.model)
    grads = [p.grad for n, p in adapter.tensors().items() if n.endswith(".B")]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("weights", "near"), [("int8", 0.999), ("nf4", 0.95)])
def test_it_computes_nearly_what_the_checkpoint_does(folders, family, weights, near) -> None:
    base, exact = loaded(folders[family], weights), loaded(folders[family], None)
    same = torch.nn.functional.cosine_similarity
    before = gradients(base)
    with torch.no_grad():
        logits, wanted = base.model(IDS).logits, exact.model(IDS).logits
    assert same(logits.flatten(), wanted.flatten(), 0) > near
    assert torch.equal(gradients(base), before)
    assert same(before, gradients(exact), 0) > near - 0.05


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("weights", FORMATS)
def test_its_linear_layers_are_small_and_as_a_server_knows_them(folders, family, weights) -> None:
    base, skeleton = loaded(folders[family], weights, "bf16"), load_skeleton(folders[family])
    plain = loaded(folders[family], "bf16", "bf16").model.get_memory_footprint()
    assert base.model.get_memory_footprint() < plain
    adapters = [Adapter(m, Layout(), 0, "ada", lambda _: True) for m in (base.model, skeleton)]
    kinds = [{n: (p.shape, p.dtype) for n, p in a.tensors().items()} for a in adapters]
    assert kinds[0] == kinds[1]
    head = base.model.get_output_embeddings()
    assert head.weight.dtype == torch.bfloat16  # pyright: ignore
    assert sizes(head) == (64, base.model.config.vocab_size)  # pyright: ignore


@pytest.mark.parametrize("weights", FORMATS)
def test_its_digest_is_that_of_what_was_loaded(folders, weights) -> None:
    first, again = loaded(folders["llama"], weights), loaded(folders["llama"], weights)
    gradients(again)  # what a layer does on its first use changes nothing
    with torch.no_grad():
        again.model(IDS)
    assert first.digest == again.digest != loaded(folders["llama"], None).digest


SLOW = (("comigs-1g1s", "int8"), ("fedit", "nf4"), ("fedamole", "nf4"))
RESUMED = [
    ("comigs-1g1s", "nf4"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("name", "weights"), RESUMED)
def test_resuming_ends_the_same(name, weights, config, folders, resumed) -> None:
    method = {"name": name} | ({"router": {"every": 2, "steps": 1}} if "comigs" in name else {})
    training = {"steps": 2, "batch": 2, "precision": "bf16"}
    base = {"name": folders["llama"], "weights": weights}
    whole = resumed(config(method=method, base=base, rounds=2, training=training))
    with torch.no_grad():
        assert coterie.load(whole.path, "poet")(input_ids=IDS).logits.isfinite().all()


@pytest.mark.slow
def test_a_deployment_ends_in_the_same_bits(config, folders, tmp_path) -> None:
    run = config(base={"name": folders["llama"], "weights": "nf4"}, rounds=1)
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    deploy(run, tmp_path)
    assert_as_local(run, tmp_path, local)


def test_what_is_missing_is_said_in_a_sentence(folders, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(CoterieError, match=r"llama in nf4 requires bitsandbytes, .*\[quantised\]"):
        loaded(folders["llama"], "nf4")
