"""Small runs that take seconds: a base with two narrow, random layers, and three short texts."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from coterie.bases import EMBEDDED, load_tokenizer
from coterie.config.run import RunConfig, parse
from coterie.files import write_json

WRITERS = ("diarist", "poet", "whaler")
"""The names of the test clients, who are the writers of three of the demo's texts."""
TOKENS = 1024
"""The size of the base's vocabulary.

With tiny-gpt2's 8,192 tokens, the output head would take most of the time of a run.
"""


def write_base(folder: Path) -> Path:
    """Write a GPT-2 of two layers and width 32 with random weights, and its tokenizer.

    Args:
        folder: The folder for the base.

    Returns:
        The folder.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": TOKENS, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, **sizes)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the first `TOKENS` tokens of tiny-gpt2's tokenizer.

    The tokens keep their ids.

    Args:
        folder: The folder for the tokenizer.
    """
    load_tokenizer("tiny-gpt2").save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    model = content["model"]
    bytes_and_end = len(model["vocab"]) - len(model["merges"])
    model["vocab"] = {token: n for token, n in model["vocab"].items() if n < TOKENS}
    model["merges"] = model["merges"][: TOKENS - bytes_and_end]
    write_json(file, content)


def write_texts(folder: Path) -> Path:
    """Write a file NAME.txt with 30,000 characters of text for each of the `WRITERS`.

    Args:
        folder: The folder for the texts.

    Returns:
        The folder.
    """
    for name in WRITERS:
        text = (EMBEDDED / "demo-writers" / f"{name}.txt").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[:30_000], encoding="utf-8")
    return folder


def write_other_base(folder: Path, text: Path) -> Path:
    """Write a Llama of one layer with random weights, and a tokenizer of 400 tokens.

    Args:
        folder: The folder for the base.
        text: The file that the tokenizer is trained on.

    Returns:
        The folder of the base.
    """
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    encoder.train([str(text)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=encoder, bos_token="<end>", eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 400, "hidden_size": 24, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def write_questions(folder: Path) -> Path:
    """Write a file NAME.jsonl with 60 yes-or-no questions and answers for each of the `WRITERS`.

    Args:
        folder: The folder for the files.

    Returns:
        The folder.
    """
    draw = random.Random(0)
    for name in WRITERS:
        words = (EMBEDDED / "demo-writers" / f"{name}.txt").read_text(encoding="utf-8").split()
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(60):
                question = " ".join(draw.choices(words, k=draw.randint(1, 6)))
                record = {"instruction": question, "output": draw.choice(["yes", "no"])}
                file.write(json.dumps(record) + "\n")
    return folder


def small_values(base: Path, texts: Path, /, **changes: Any) -> dict[str, Any]:
    """Return, as plain data, a run file with three clients and three rounds.

    Args:
        base: The folder of the base.
        texts: The folder that `write_texts` has filled.
        **changes: Keys and values that are added to the run file, or that replace existing values.
    """
    return {
        "name": "small",
        "threads": 1,
        "base": str(base),
        "rounds": 3,
        "data_root": str(texts),
        "data": {"window": 16, "limits": {"train": 2000, "validation": 400, "test": 400}},
        "clients": [{"name": name, "path": f"{name}.txt"} for name in WRITERS],
        "training": {"steps": 2, "batch": 2, "precision": "fp32"},
    } | changes


def teaching_values(
    base: Path, other: Path | str, questions: Path, /, **changes: Any
) -> dict[str, Any]:
    """Return, as plain data, a run file for FedMKT with two tokenizers and public questions.

    Args:
        base: The folder of the base that the client `diarist` uses. With the method
            `fedmkt-fedavg`, the client `poet` also uses this base.
        other: The base of the server's own model. With any method except `fedmkt-fedavg`, the
            client `poet` also uses this base.
        questions: The folder that `write_questions` has filled.
        **changes: Keys and values that are added to the run file, or that replace existing values.
            A value for the key `method` must be a mapping. Settings of the method that are not in
            the mapping keep their values.
    """
    method = {"attention": {"rank": 2}, "logits": 7} | changes.pop("method", {"name": "fedmkt"})
    run: dict[str, Any] = {
        "method": method,
        "rounds": 2,
        "server": {"base": str(other), "test": "whaler.jsonl"},
        "bases": {} if method["name"] == "fedmkt-fedavg" else {"poet": str(other)},
        "data": {
            "window": 48,
            "instructions": {"template": "{{ instruction }}?"},
            "limits": {"train": 12, "validation": 4, "test": 4, "public": 10},
            "public": "whaler.jsonl",
        },
        "clients": [{"name": name, "path": f"{name}.jsonl"} for name in ("diarist", "poet")],
    }
    return small_values(base, questions, **run | changes)


def small_run(folder: Path, /, **changes: Any) -> RunConfig:
    """Create the configuration of a run that takes a few seconds.

    The run has three clients, two rounds and a public text.

    Args:
        folder: The folder for the base and the texts.
        **changes: Keys and values that are added to the run file, or that replace existing values.

    Returns:
        The configuration of the run.
    """
    base, texts = write_base(folder / "base"), write_texts(folder)
    values = small_values(base, texts, rounds=2)
    data = {**values["data"], "public": "poet.txt"}
    return parse({**values, "data": data, **changes})
