"""Train a small base from a folder of text: a tokenizer, a model, and the folder that holds both.

`python scripts/pretrain_base.py TEXTS --out FOLDER` with its defaults gives a base of the shape
that ships with Coterie; `coterie run --set base=FOLDER` uses it. Windows are drawn by step number,
so a training that was stopped and resumed ends with the same bits.
"""

import lzma
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from coterie.base import Base
from coterie.chance import generator
from coterie.data import ClientData, DataSpec, Texts, sample_batch, tokenise
from coterie.data.files import Document
from coterie.data.texts import split_by_fractions
from coterie.errors import CoterieError
from coterie.exchange import State
from coterie.files import write_bytes, write_folder
from coterie.training.evaluation import evaluate
from coterie.training.loss import language_model_loss
from coterie.training.precision import autocast

END = "<|endoftext|>"
Architecture = Literal["gpt2", "llama"]
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Recipe:
    """Everything that the result depends on, the text apart; the command's options explain it."""

    architecture: Architecture
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    steps: int
    batch: int
    learning_rate: float
    warmup: int
    weight_decay: float
    held_out: float
    seed: int
    threads: int

    def rate(self, step: int) -> float:
        """Learning rate: linear warm-up, then half a cosine down to a tenth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def read_texts(folder: Path, recipe: Recipe) -> Texts:
    """The .txt and .txt.xz files, with random pieces set aside for validation and test."""
    files = sorted(file for file in folder.rglob("*") if file.name.endswith((".txt", ".txt.xz")))
    if not files:
        raise CoterieError(f"{folder} has no .txt or .txt.xz file; name a folder of texts.")
    documents = []
    for file in files:
        try:
            raw = lzma.open(file).read() if file.suffix == ".xz" else file.read_bytes()
            documents.append(Document(raw.decode().removeprefix("\ufeff"), divisible=True))
        except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise CoterieError(f"{file} could not be read as UTF-8 text: {error}.") from error
    fractions = dict.fromkeys(("validation", "test"), recipe.held_out)
    return Texts(**split_by_fractions(documents, fractions, generator(recipe.seed, "split")))


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE, so that any text has tokens; token 0 ends a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = chain.from_iterable(text.splitlines(keepends=True) for text in texts)
    bpe.train_from_iterator(lines, trainer)
    return bpe


def wrap(bpe: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows it."""
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=context, **special)


def tokens(texts: Texts, tokenizer: PreTrainedTokenizerFast, context: int) -> ClientData:
    """The three splits as tokens; each must hold a window."""
    try:
        return tokenise(texts, tokenizer, DataSpec(window=context), "text")
    except CoterieError as error:
        raise CoterieError(
            f"The text is too short for a context of {context} tokens: give more of it, raise "
            "--held-out or lower --context."
        ) from error


def new_model(recipe: Recipe, vocabulary: int) -> PreTrainedModel:
    """A model with random weights in fp32; its head is the embedding, it has no dropout."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    torch.manual_seed(recipe.seed)
    if recipe.architecture == "gpt2":
        shape = {"n_layer": recipe.layers, "n_embd": recipe.width, "n_head": recipe.heads}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=recipe.context, **shape, **off, **ends
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=recipe.context,
        num_hidden_layers=recipe.layers,
        hidden_size=recipe.width,
        num_attention_heads=recipe.heads,
        intermediate_size=-(-8 * recipe.width // 3 // 32) * 32,
        **ends,
    )
    return LlamaForCausalLM(config)


class Training:
    """A model, its optimiser and the steps done, all in one checkpoint file."""

    def __init__(self, recipe: Recipe, base: Base, data: ClientData, checkpoint: Path) -> None:
        assert isinstance(base.model, PreTrainedModel)
        self.recipe, self.base, self.data, self.checkpoint = recipe, base, data, checkpoint
        self.model, self.parameters = base.model, dict(base.model.named_parameters())
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        others = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        decay = recipe.weight_decay
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=decay)
        self.done = 0

    def step(self) -> float:
        """One update; its loss in nats per token."""
        chance = generator(self.recipe.seed, "batch", self.done)
        ids = sample_batch(self.data.train, self.recipe.batch, self.recipe.context, chance)
        with autocast(self.base.precision, self.base.device.type):
            loss = language_model_loss(self.model, ids.to(self.base.device))
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate(self.done)
        self.optimiser.step()
        self.done += 1
        if not math.isfinite(loss.item()):
            raise CoterieError("The loss is no longer finite; a lower --learning-rate may help.")
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint: weights, moments, and all that tells whether it fits."""
        tensors = {f"weight/{name}": p for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            tensors |= {f"{kind}/{name}": t for kind, t in self.optimiser.state[p].items()}
        bpe = self.base.tokenizer.backend_tokenizer.to_str()  # pyright: ignore
        values = {"recipe": asdict(self.recipe), "text": digest(self.data), "bpe": bpe}
        write_bytes(self.checkpoint, State(tensors, {**values, "done": self.done}).encode())

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Go on from a checkpoint, if it is of this recipe and text."""
        if state.values["recipe"] != asdict(self.recipe) or state.values["text"] != digest(self.data):
            raise CoterieError(
                f"{self.checkpoint} began with other options or another text; repeat those it "
                "began with, or remove it to start anew."
            )
        for name, p in self.parameters.items():
            p.copy_(state.tensors[f"weight/{name}"])
            self.optimiser.state[p] = {
                kind: state.tensors[f"{kind}/{name}"].to(p.device if kind != "step" else "cpu")
                for kind in ("step", "exp_avg", "exp_avg_sq")
            }
        self.done = state.values["done"]


def digest(data: ClientData) -> str:
    """A hash of the training tokens."""
    return blake2b(data.train.ids.numpy().tobytes(), digest_size=8).hexdigest()
