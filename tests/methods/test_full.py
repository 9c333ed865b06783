"""Full fine-tuning against a plain model whose own weights are updated."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from turns import nth

import coterie
from coterie.adapters import detach, merge
from coterie.adapters.coverage import coverage
from coterie.adapters.full import FullAdapter
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from coterie.testing.rounds import down, joined
from coterie.training import local as local_training

each_family = pytest.mark.parametrize("family", ["gpt2", "llama"])


def plain(path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


def trained(run) -> Any:
    """Return a client after its first round."""
    local = joined(run)
    local.open(local.config.turn(0), ["poet"])
    client: Any = local.clients["poet"]
    client.receive(down(local, "poet"))
    client.train(nth(0))
    return client


@each_family
def test_a_round_is_that_of_a_plain_model(config, bases, monkeypatch, family) -> None:
    # With AdamW, the step of a gradient that consists of rounding errors would have full size.
    batches = []
    sampled = local_training.sample_batch
    keep = lambda *args: batches.append(sampled(*args)) or batches[-1]  # noqa: E731
    monkeypatch.setattr(local_training, "sample_batch", keep)
    training = {"steps": 3, "batch": 2, "precision": "fp32", "learning_rate": 0.5}
    training |= {"schedule": "constant", "optimiser": {"name": "sgd"}}
    run = config(base=str(bases / family), method="local-full", training=training)
    model = trained(run).model()
    naive = plain(bases / family)
    rule = torch.optim.SGD(naive.parameters(), lr=0.5)
    for batch in batches:
        logits = naive(batch.ids[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten()).backward()
        rule.step()
        rule.zero_grad()
    assert len(batches) == 3
    first = plain(bases / family).state_dict()
    for name, weight in naive.named_parameters():
        owner, _, leaf = name.rpartition(".")
        actual = getattr(model.get_submodule(owner), leaf)
        assert torch.allclose(actual, weight, atol=1e-6), name
    moved = [n for n, w in naive.state_dict().items() if not torch.equal(w, first[n])]
    assert len(moved) > len(first) / 2


def test_the_base_comes_back_unchanged(config, bases) -> None:
    client = trained(config(base=str(bases / "gpt2"), method="local-full"))
    base = client.model()
    ids = torch.arange(5, 15)[None]
    changed = base(ids).logits
    detach(base)
    first = plain(bases / "gpt2")
    assert torch.equal(base(ids).logits, first(ids).logits)
    assert not torch.allclose(changed, first(ids).logits, atol=1e-3)
    assert type(base.lm_head) is torch.nn.Linear
    assert base.lm_head.weight is base.transformer.wte.weight


def test_a_tied_weight_has_one_difference_and_moves_once_when_merged(bases) -> None:
    base = plain(bases / "gpt2")
    adapter = FullAdapter(base)
    first = base.transformer.wte.weight.detach().clone()
    difference = adapter.tensors()["weight/transformer.wte.weight"]
    difference.data.fill_(0.25)
    assert "weight/lm_head.weight" not in adapter.tensors()
    adapter.attach(base)
    want = base(torch.arange(9)[None]).logits
    merge(base)
    assert torch.equal(base.lm_head.weight, first + 0.25)
    assert base.lm_head.weight is base.transformer.wte.weight
    assert torch.equal(base(torch.arange(9)[None]).logits, want)


@each_family
def test_a_bf16_base_learns_in_fp32_and_its_head_has_a_gradient(config, bases, family) -> None:
    training = {"steps": 1, "batch": 2, "precision": "bf16"}
    run = config(base=str(bases / family), method="local-full", training=training)
    parameters = trained(run).adapter.tensors()
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    head = "transformer.wte" if family == "gpt2" else "lm_head"
    assert parameters[f"weight/{head}.weight"].abs().max() > 0


def test_a_run_is_loaded_and_saved_as_a_folder(config, bases, tmp_path) -> None:
    coterie.run(config(base=str(bases / "gpt2"), method="local-full"), out=tmp_path / "run")
    model = coterie.load(tmp_path / "run", "poet")
    model.save_pretrained(tmp_path / "folder")
    ids = torch.arange(5, 15)[None]
    assert torch.equal(plain(tmp_path / "folder")(ids).logits, model(ids).logits)
    assert not torch.allclose(plain(bases / "gpt2")(ids).logits, model(ids).logits, atol=1e-3)


def test_an_audit_says_that_all_weights_are_trained(bases) -> None:
    base = plain(bases / "gpt2")
    assert coverage(base, FullAdapter(base).parameters().values()).lines() == ("all weights",)


def test_quantised_weights_are_refused(bases) -> None:
    base = plain(bases / "gpt2")
    base.lm_head.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), False)
    with pytest.raises(CoterieError, match="Quantised weights cannot be fine-tuned"):
        FullAdapter(base)


def test_other_methods_run_on_the_base_that_was_fine_tuned(config, tmp_path) -> None:
    # In a comparison, all rows share one base.

    def scores(session: Session, name: str, method: str) -> list[float]:
        run = config(method=method, rounds=1)
        description = session.description(run, session.participants(run))
        folder = RunFolder.create(tmp_path / f"{name}-{method}", description)
        session.start(run, folder).run()
        return [line["value"] for line in folder.metrics() if line["name"] != "seconds"]

    shared = Session(config())
    scores(shared, "before", "local-full")
    for method in ("comigs-1g1s", "fedamole", "fedprompt"):
        assert scores(shared, "after", method) == scores(Session(config()), "alone", method)
