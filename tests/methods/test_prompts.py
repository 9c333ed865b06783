"""Soft prompts against a forward pass on embeddings that the test puts together itself."""

from typing import Any

import pytest
import torch
from tensors import close_to, equal, mean_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from coterie.adapters import of_roles
from coterie.bases import load_base, load_skeleton
from coterie.bases.precision import autocast
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch, language_model_loss, token_losses
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ServerContext
from coterie.methods.prompts import FedPrompt, FedPTuning
from coterie.testing.rounds import down, joined, one_round, step

METHODS = {
    "text": FedPrompt(virtual_tokens=5),
    "drawn": FedPrompt(virtual_tokens=5, init_text=None),
    "encoder": FedPTuning(virtual_tokens=5, encoder_hidden_size=24),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
each_family = pytest.mark.parametrize("family", ["gpt2", "llama"])


def trained(run) -> Any:
    """Return a client after a round, and its upload."""
    local: Any = joined(run)
    local.open(local.config.turn(0), ["poet"])
    return local.clients["poet"], step(local, "poet", 0)


def prompt_of(client) -> torch.Tensor:
    """Return the soft prompt, (tokens, dim), from the parameters alone."""
    p = {n.removeprefix("prompt/"): t for n, t in client.adapter.tensors().items()}
    x = p["embedding.weight"]
    if len(p) == 1:
        return client.adapter.encoder.start + x
    for layer in (0, 2):
        x = (x @ p[f"mlp_head.{layer}.weight"].T + p[f"mlp_head.{layer}.bias"]).relu()
    return x @ p["mlp_head.4.weight"].T + p["mlp_head.4.bias"]


def naive_logits(model, prompt, ids) -> torch.Tensor:
    """Return the logits, (time, vocabulary), of `ids`, (time,)."""
    words = model.get_input_embeddings()(ids)
    return model(inputs_embeds=torch.cat([prompt, words])[None]).logits[0, len(prompt) :]


@each_family
@each_method
def test_loss_and_gradient_of_a_padded_batch(config, bases, method, family) -> None:
    client, _ = trained(config(base=str(bases / family), method=method))
    chance = torch.Generator().manual_seed(1)
    lengths = (9, 6, 12)
    rows = [torch.randint(3, 400, (n,), generator=chance) for n in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    inside = torch.arange(12) < torch.tensor(lengths)[:, None]
    batch: Any = Batch(ids, (inside & (torch.arange(12) >= 4))[:, 1:], inside[:, 1:])
    client.adapter.require_grad(of_roles("prompt"))
    parameters = client.adapter.tensors()
    plain = AutoModelForCausalLM.from_pretrained(bases / family)

    def naive() -> torch.Tensor:
        logits = [naive_logits(plain, prompt_of(client), row[:-1])[3:] for row in rows]
        targets = torch.cat([row[4:] for row in rows])
        return F.cross_entropy(torch.cat(logits), targets, reduction="none")

    expected = torch.autograd.grad(naive().mean(), list(parameters.values()))
    loss = language_model_loss(client.model(), *batch)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    assert torch.allclose(loss, naive().mean(), atol=1e-5)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert wanted.abs().max() > 0
        assert torch.allclose(gradient, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-7)
    scored = token_losses(client.model(), *batch)[batch.counted]
    assert torch.allclose(scored, naive().detach(), atol=1e-5)


@each_method
def test_a_server_without_weights_draws_the_clients_first_values(config, bases, method) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    client: Any = joined(config(method=method)).clients["poet"]
    client.model()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    skeleton = load_skeleton(str(bases / "gpt2"))
    own = client.context
    context = ServerContext(own.seed, skeleton, ("poet",), lambda *_: None, own.training)
    server = method.server(context)
    value = server.join(server.initial(), "poet", client.hello())
    first = client.adapter.tensors()
    assert equal(value.adapter, first)
    other = method.adapter(skeleton, client.context.seed + 1, "poet").tensors()
    drawn = [name for name, p in first.items() if not torch.equal(other[name], p)]
    assert drawn == ([] if method == METHODS["text"] else list(first))


def test_a_prompt_begins_as_the_embeddings_of_its_text(config) -> None:
    for text, tokens in (("Answer the question.", 20), ("Answer the question, please.", 2)):
        client, upload = trained(config(method=FedPrompt(init_text=text, virtual_tokens=tokens)))
        base = client.context.base
        ids = base.tokenizer(text)["input_ids"]
        rows = base.model.get_input_embeddings().weight[[ids[i % len(ids)] for i in range(tokens)]]
        assert torch.equal(client.adapter.encoder.start, rows)
        (offset,) = upload["adapter"].values()
        assert 0 < offset.abs().max() < 0.1
        prompt = client.model().get_prompt(1)[0]
        assert torch.allclose(prompt, rows + offset)


def test_the_whole_encoder_travels_and_is_averaged(config) -> None:
    local: Any = joined(config(method=METHODS["encoder"]))
    first = down(local, "poet")["adapter"]
    uploads = one_round(local, 0)
    for upload in uploads.values():
        assert upload["adapter"].keys() == first.keys() == local.clients["poet"].parameters().keys()
        assert all(not torch.equal(t, first[n]) for n, t in upload["adapter"].items())
    mean = mean_of(u["adapter"] for u in uploads.values())
    assert close_to(down(local, "poet")["adapter"], mean, atol=1e-7)


@each_method
def test_clients_take_turns_on_one_base(config, method) -> None:
    local: Any = joined(config(method=method))
    poet, whaler = local.clients["poet"], local.clients["whaler"]
    base = poet.context.base.model
    digest, ids = poet.context.base.digest, torch.arange(3, 15)
    for name in ("poet", "whaler"):
        local.open(local.config.turn(0), [name])
        step(local, name, 0)
    with torch.no_grad():
        bare = base(input_ids=ids[None]).logits
        lora = FedIT().adapter(base, 0, "poet")
        lora.tensors()["dense/transformer.h.0.attn.c_attn.B"].fill_(0.1)
        outputs = {}
        for _ in range(2):
            for client in (poet, whaler):
                lora.attach(base)
                logits = client.model()(input_ids=ids[None], logits_to_keep=12).logits[0]
                assert torch.allclose(logits, naive_logits(base, prompt_of(client), ids), atol=1e-5)
                outputs[client.context.name] = logits
        assert not torch.equal(outputs["poet"], outputs["whaler"])
        assert torch.equal(base(input_ids=ids[None]).logits, bare)
    assert not base.training
    assert not any(p.requires_grad for p in base.parameters())
    del poet.context.base.__dict__["digest"]
    assert poet.context.base.digest == digest


@each_family
@each_method
def test_generation_takes_the_likeliest_token_each_time(config, bases, method, family) -> None:
    client, _ = trained(config(base=str(bases / family), method=method))
    base = client.context.base.model
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # else one token is likeliest anywhere
        ids = torch.randint(3, 400, (3, 7), generator=torch.Generator().manual_seed(2))
        rows = ids
        for _ in range(6):
            logits = [naive_logits(base, prompt_of(client), row)[-1] for row in rows]
            rows = torch.cat([rows, torch.stack(logits).argmax(-1, keepdim=True)], 1)
    ends = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 6, "do_sample": False}
    generated = client.model().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **ends)
    assert len(set(rows[:, 7:].flatten().tolist())) > 3
    assert torch.equal(generated, rows)


@each_method
def test_bf16_and_a_restored_model(values, config, bases, method) -> None:
    training = {**values()["training"], "precision": "bf16"}
    client, _ = trained(config(training=training, method=method))
    ids = torch.arange(3, 15)[None]
    with autocast("bf16", "cpu"):
        figures = token_losses(client.model(), ids)
    run = config()
    base = load_base(run.base, "fp32", run.data.window)
    other: Any = joined(config(method=method)).clients["poet"]
    other.restore(client.state())
    exact = token_losses(other.model(), ids)
    assert all(p.dtype == torch.float32 for p in client.adapter.tensors().values())
    assert torch.allclose(figures, exact, atol=0.05)
    assert not torch.equal(exact, token_losses(base.model, ids))


def test_a_base_without_room_for_the_prompt_is_refused(config) -> None:
    joined(config(method=FedPrompt(virtual_tokens=48)))
    with pytest.raises(CoterieError, match=r"16 tokens\) .*\(49\) exceeds .* \(64 tokens\)"):
        joined(config(method=FedPTuning(virtual_tokens=49)))
