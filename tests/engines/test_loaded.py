"""Each operation works on a loaded model as on a plain one, or is refused with one sentence."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_method import marks, some
from loaded import GREEDY, IDS, METHODS, Finished, beam, generated, greedy, logits
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline
from transformers.pytorch_utils import Conv1D

import coterie
from coterie import CoterieError
from coterie.runs import RunFolder

Make = Callable[[str, str], Finished]
EXPERTS = "does not support several experts.*coterie.load"
FAST = {("comigs-1g1s", "llama"), ("fedit", "llama"), ("fedprompt", "llama")}
SLOW = {(method, "llama") for method in ("three experts", "fedamole", "one set", "local")}
SLOW |= {("comigs-1g1s", "tiny-gpt2")}
"""Methods and bases; the others are thorough."""


@pytest.fixture(scope="session")
def make(values, bases, tmp_path_factory) -> Make:
    """The finished run of a method on a base, made once."""
    made: dict[tuple[str, str], Finished] = {}

    def run(method: str, base: str) -> Finished:
        if (method, base) not in made:
            embedded = base == "tiny-gpt2"
            path = tmp_path_factory.mktemp("runs") / "run"
            rate = {"learning_rate": 0.01 if embedded else 0.05}
            training = {"steps": 2, "batch": 2, "precision": "fp32"} | rate
            settings = {"method": {"name": method} | METHODS[method], "training": training}
            folder = base if embedded else str(bases / base)
            run = values(base=folder, rounds=2, evaluation={"keep": "last"}, **settings)
            made[method, base] = Finished(method, run["base"], coterie.run(run, out=path).path)
        return made[method, base]

    return run


@pytest.fixture(
    params=[
        pytest.param((method, base), id=f"{method}-{base}", marks=marks((method, base), FAST, SLOW))
        for base in ("llama", "tiny-gpt2")
        for method in METHODS
    ]
)
def run(request, make: Make) -> Finished:
    return make(*request.param)


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_the_model_is_far_from_its_base(run: Finished) -> None:
    """Check that comparisons with the base can fail."""
    assert run.change > 0.02
    model = run.load()
    assert isinstance(model, PeftModel if run.prompt else PreTrainedModel)
    near(logits(model), run.logits)


def test_a_saved_model_loads_as_itself_or_is_not_saved(run: Finished, tmp_path) -> None:
    model, out = run.load(), tmp_path / "saved"
    if run.merged:
        model.save_pretrained(out)
        near(logits(AutoModelForCausalLM.from_pretrained(out)), run.logits)
    elif run.prompt:
        model.save_pretrained(out)
        near(logits(PeftModel.from_pretrained(run.plain(), out)), run.logits)
        with pytest.raises(ValueError, match="does not support prompt learning"):
            AutoModelForCausalLM.from_pretrained(out)
    else:
        for copied in (
            model,
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            model.half(),
        ):
            with pytest.raises(CoterieError, match=EXPERTS):
                copied.save_pretrained(out)
        compiled: Any = torch.compile(model)
        with pytest.raises(CoterieError, match=EXPERTS):
            compiled.save_pretrained(out)
        assert not out.exists()


def test_what_cannot_be_saved_is_not_pushed(run: Finished, monkeypatch) -> None:
    class Asked(Exception):
        pass

    def asked(*_: Any, **__: Any) -> None:
        raise Asked

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", asked)
    saved = run.merged or run.prompt
    with pytest.raises(Asked if saved else CoterieError, match=None if saved else EXPERTS):
        run.load().push_to_hub("somebody/model")


@pytest.mark.parametrize("base", some({"llama"}, ["llama", "tiny-gpt2"]))
@pytest.mark.parametrize("method", ["one set", "fedit"])
def test_pairs_are_merged_as_by_hand(method: str, base: str, make: Make) -> None:
    run = make(method, base)
    state, model = RunFolder(run.path).load("client-poet"), run.plain()
    pairs = [state["adapter"], state["residual"]] if method == "one set" else [state["adapter"]]
    for tensors in pairs:
        names = {name.removesuffix(".A") for name in tensors if name.endswith(".A")}
        assert names
        for name in names:
            A, B = tensors[f"{name}.A"].double(), tensors[f"{name}.B"].double()
            linear = model.get_submodule(name.split("/", 1)[1])
            update = 16 / (8 if method == "fedit" else 8**0.5) * B @ A
            weight: Any = linear.weight
            weight.data += (update.t() if isinstance(linear, Conv1D) else update).float()
    near(logits(model), run.logits)


def saved_and_read(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, saved_and_read])
def test_a_copy_is_the_same_model_and_apart(run: Finished, way: Callable[[Any], Any]) -> None:
    model = run.load()
    wanted = generated(model, IDS, 3)
    model(IDS)  # with a graph, which some modules keep
    again = way(model)
    near(logits(again), run.logits)
    assert torch.equal(generated(again, IDS, 3), wanted)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    near(logits(model), run.logits)


def test_a_state_dict_holds_all_that_a_model_has(run: Finished) -> None:
    model, other = run.load(), run.load()
    for tensor in other.state_dict().values():
        tensor.zero_()
    assert (logits(other) - run.logits).abs().mean() > 0.5 * run.change
    other.load_state_dict(model.state_dict())
    near(logits(other), run.logits)
    # What is no parameter and no buffer would stay behind when a model is moved or cast.
    for module in run.load().modules():
        for name, value in vars(module).items():
            assert not any(isinstance(v, Tensor) for v in (value, *flat(value))), name


def flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


CASTS: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {
    "half": (torch.float16, ()),
    "bfloat16": (torch.bfloat16, ()),
    "double": (torch.float64, ()),
    "to-bfloat16": (torch.bfloat16, (torch.bfloat16,)),
    "to-cpu": (torch.float32, ("cpu",)),
}
"""The type of a model after a call of its method, and the method's arguments."""


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_model_computes_the_same(run: Finished, cast: str) -> None:
    dtype, arguments = CASTS[cast]
    model = getattr(run.load(), cast.partition("-")[0])(*arguments)
    with torch.no_grad():
        assert model(IDS).logits.dtype == dtype
    error = (logits(model) - run.logits).abs().mean().item()
    assert error < (1e-4 if dtype.itemsize > 2 else 0.1) * run.change
    assert generated(model, IDS, 3).shape == (2, 10)


COMPILED = [
    *((method, "llama", "aot_eager") for method in METHODS),
    ("comigs-1g1s", "tiny-gpt2", "eager"),
    ("comigs-1g1s", "llama", "inductor"),
]


@pytest.mark.parametrize(
    ("method", "base", "backend"),
    [pytest.param(*case, marks=marks(case, (), COMPILED[:1] + COMPILED[2:3])) for case in COMPILED],
)
def test_a_compiled_model_computes_the_same(method, base, backend, make: Make) -> None:
    run = make(method, base)
    torch._dynamo.reset()
    model: Any = torch.compile(run.load(), backend=backend)
    near(logits(model), run.logits)
    near(model(IDS).logits[:, -7:].detach(), run.logits)  # with a graph
    assert torch.equal(generated(model, IDS, 3), greedy(run.load(), IDS, 3))


def test_without_gradients_nothing_is_kept(run: Finished) -> None:
    model = run.load()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            actual = model(IDS).logits
        assert not actual.requires_grad
        near(actual[:, -7:], run.logits)
    actual = model.requires_grad_(False)(IDS).logits
    assert not actual.requires_grad
    near(actual[:, -7:], run.logits)


def test_greedy_and_beams_are_as_by_hand(run: Finished) -> None:
    model = run.load()
    assert torch.equal(generated(model, IDS, 5), greedy(model, IDS, 5))
    actual = generated(model, IDS[:1], 4, num_beams=3)
    assert actual[0].tolist() == beam(model, IDS[0].tolist(), 3, 4)


SHORT = 4
"""Tokens of the first of two texts that are padded to one length."""


def padded(before: bool) -> tuple[Tensor, Tensor]:
    """Cut the first row of IDS to SHORT tokens, pad it with 0, and return it with its mask."""
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0], mask[0], length = 0, 0, IDS.shape[1]
    where = slice(length - SHORT, length) if before else slice(0, SHORT)
    ids[0, where], mask[0, where] = IDS[0, :SHORT], 1
    return ids, mask


def test_padding_before_texts_does_not_change_what_is_written(run: Finished) -> None:
    model = run.load()
    ids, mask = padded(before=True)
    more: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    actual: Any = generated(model, ids, 5, attention_mask=mask, **more)
    alone = greedy(model, IDS[:1, :SHORT], 5), greedy(model, IDS[1:], 5)
    assert torch.equal(actual.sequences[:1, -SHORT - 5 :], alone[0])
    assert torch.equal(actual.sequences[1:], alone[1])
    read = torch.stack(actual.logits, dim=1)
    near(read[0], logits(model, alone[0])[0, -6:-1])
    near(read[1], logits(model, alone[1])[0, -6:-1])


def test_padding_does_not_change_logits(run: Finished) -> None:
    model = run.load()
    ids, mask = padded(before=False)
    actual = logits(model, ids, attention_mask=mask)
    near(actual[0, :SHORT], logits(model, IDS[:1, :SHORT])[0])
    near(actual[1], run.logits[1])
    ids, mask = padded(before=True)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if run.prompt:
        for wrong in ({"attention_mask": mask}, {"position_ids": positions}):
            with pytest.raises(CoterieError, match="no padding before a text, no position_ids"):
                model(ids, **wrong)
        return
    actual = logits(model, ids, attention_mask=mask, position_ids=positions)
    near(actual[0, -SHORT:], logits(model, IDS[:1, :SHORT])[0])
    near(actual[1], run.logits[1])


def test_a_cache_that_is_passed_on_by_hand(run: Finished) -> None:
    model = run.load()
    with torch.no_grad():
        cache = model(IDS[:, :-2], use_cache=True).past_key_values
        if run.prompt:
            with pytest.raises(CoterieError, match="no past_key_values"):
                model(IDS[:, -2:], past_key_values=cache)
        else:
            near(logits(model, IDS[:, -2:], past_key_values=cache), run.logits[:, -2:])


def test_drafts_do_not_change_what_is_written(run: Finished) -> None:
    model, plain = run.load(), run.plain()
    twice = IDS[:1].repeat(1, 2)
    calls = (
        (model, IDS[:1], {"assistant_model": plain}, "with an assistant model"),
        (plain, IDS[:1], {"assistant_model": model}, "as another model's assistant"),
        (model, twice, {"prompt_lookup_num_tokens": 2}, "with prompt lookup"),
    )
    for wrapped, ids, options, refused in calls:
        if run.prompt:
            with pytest.raises(CoterieError, match=f"cannot generate {refused}"):
                generated(wrapped, ids, 6, **options)
        else:
            assert torch.equal(generated(wrapped, ids, 6, **options), greedy(wrapped, ids, 6))


def test_other_caches_and_embeddings(run: Finished) -> None:
    model = run.load()
    wanted = greedy(model, IDS, 3)
    assert torch.equal(generated(model, IDS, 3, cache_implementation="dynamic"), wanted)
    embeddings = model.get_input_embeddings()(IDS)
    if run.prompt:
        with pytest.raises(CoterieError, match="with a cache of a fixed size"):
            generated(model, IDS, 3, cache_implementation="static")
        with pytest.raises(CoterieError, match="from inputs_embeds"):
            model.generate(inputs_embeds=embeddings)
        return
    assert torch.equal(generated(model, IDS, 3, cache_implementation="static"), wanted)
    options = {**GREEDY, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 3}
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), wanted[:, -3:])


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pipeline_writes_the_same(run: Finished, batch: int, caplog) -> None:
    model, words = run.load(), copy.deepcopy(run.words)
    words.pad_token, words.padding_side = words.eos_token, "left"
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        write: Any = pipeline("text-generation", model=model, tokenizer=words)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "is not supported" not in caplog.text
    texts = ["I sing of the", "Some"]
    options = {"return_full_text": False, "batch_size": batch, "do_sample": False}
    actual = write(texts, max_new_tokens=5, eos_token_id=-1, pad_token_id=0, **options)
    for text, [answer] in zip(texts, actual, strict=True):
        ids = words(text, return_tensors="pt")["input_ids"]
        assert answer["generated_text"] == words.decode(greedy(model, ids, 5)[0, ids.shape[1] :])
