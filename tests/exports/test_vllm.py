"""Exported mixtures in vLLM: the tokens that it generates, and their log-probabilities.

The tests need vLLM in an environment of its own (environment variable VLLM_PYTHON, the path of its
Python), because vLLM pins the versions of many packages; docs/develop/tests.md says how to install
it.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_model
from sources import FAR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.bases import load_tokenizer

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no Python"),
]
PROMPTS = ("The sea was", "It was a bright cold day, and")
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, seed=0)
settings = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
sampling = SamplingParams(**settings, logprobs=0, prompt_logprobs=0)
answers = []
for output in model.generate(prompts, sampling):
    new = output.outputs[0]
    ids = [*output.prompt_token_ids, *new.token_ids]
    known = [*output.prompt_logprobs[1:], *new.logprobs]
    scores = [of[id].logprob for id, of in zip(ids[1:], known, strict=True)]
    answers.append({"ids": ids, "prompt": len(output.prompt_token_ids), "scores": scores})
print("ANSWERS", json.dumps(answers))
"""


def answers_of(folder: Path) -> list[dict[str, Any]]:
    """Return the greedy answers of vLLM to PROMPTS, with log-probabilities."""
    command = [os.environ["VLLM_PYTHON"], "-c", GENERATE, str(folder), json.dumps(PROMPTS)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | settings
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.mark.parametrize(
    ("base", "method", "target"),
    [
        ("llama", "comigs-1g1s", "mixtral"),
        ("llama", "local", "mixtral"),
        ("llama", "top-1", "qwen2_moe"),
        ("qwen2", "comigs-1g1s", "qwen2_moe"),
        ("qwen3", "comigs-1g1s", "qwen3_moe"),
    ],
)
def test_vllm_computes_what_transformers_computes(base, method, target, values, tmp_path) -> None:
    top_1 = {"name": "comigs-1g1s", "router": {"every": 2, "steps": 1, "top_k": 1}}
    run = values(
        base=str(small(base, tmp_path / base)),
        method=top_1 if method == "top-1" else {"name": method},
        rounds=2,
        **FAR,
    )
    coterie.run(run, out=tmp_path / "run")
    done = coterie.export(tmp_path / "run", "poet", tmp_path / "out", format="moe")
    assert AutoConfig.from_pretrained(done.path).model_type == target
    compare(done.path)


def small(name: str, folder: Path) -> Path:
    """Save a random base with biases. Its attention heads are wide enough for vLLM."""
    tokenizer = load_tokenizer("tiny-llama")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = small_model(name, vocab_size=len(tokenizer), initializer_range=0.2, **sizes)
    for path, parameter in model.named_parameters():
        if path.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compare(folder: Path) -> None:
    """Compare the ids of prompts, the answers, and all log-probabilities with transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, answer in zip(PROMPTS, answers_of(folder), strict=True):
        ids = torch.tensor([answer["ids"]])
        assert answer["ids"][: answer["prompt"]] == tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        assert logits[answer["prompt"] - 1 :].argmax(-1).equal(ids[0, answer["prompt"] :])
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        difference = (torch.tensor(answer["scores"]) - expected).abs().max().item()
        print(f"{folder}: {difference:.2g} of {expected.abs().max():.3g}")
        assert difference < 1e-4 * expected.abs().max()
