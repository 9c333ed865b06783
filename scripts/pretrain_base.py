"""Train a small base from a folder of text: a tokenizer, a model, and the folder that holds both.

`python scripts/pretrain_base.py TEXTS --out FOLDER` makes a base of the shape that ships with
Coterie, and `coterie run --set base=FOLDER` uses it. Every draw is named by its step, so a training
that was stopped and resumed ends with the same bits.
"""

import json
import lzma
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.kinds.text import pieces
from coterie.data.spec import PIECE, DataSpec
from coterie.data.texts import Texts, split_by_fractions
from coterie.data.tokens import ClientData, Split, encoded, tokenise
from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import Score, evaluate
from coterie.files import write_bytes, write_folder
from coterie.losses.tokens import language_model_loss
from coterie.messages import State
from coterie.seeding import generator

END = "<|endoftext|>"
SPACE = "\u2581"  # how SentencePiece writes a space
STAND_IN = "\uffff"  # no character by Unicode's word, so it can stand for a SPACE found in a text
# A word of letters, a digit, or signs, each with one space before it; what is left between two of
# them (spaces, line breaks) is a piece, too. As letters and digits part here, no text can be merged
# into the name of a byte such as <0x0A>.
PIECES = rf"{SPACE}?(?:[\p{{L}}\p{{M}}]+|\p{{N}}|[^{SPACE}\s\p{{L}}\p{{M}}\p{{N}}]+)"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = 200  # characters with a token of their own, in a SentencePiece vocabulary
HELD_OUT = {"validation": 0.005, "test": 0.005}
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Recipe:
    """All that the result depends on except the text; the command's options explain each value."""

    architecture: Literal["gpt2", "llama"]
    layers: int
    width: int
    heads: int
    tokenizer: Literal["byte-level", "sentencepiece"]
    vocabulary: int
    context: int
    steps: int
    batch: int
    learning_rate: float
    seed: int
    begin: str | None = None
    """Digest of the base that is trained further, so that its second training has other windows."""

    def rate(self, step: int) -> float:
        """Return the learning rate: a warm-up of 2 % of the steps, then a cosine to a tenth."""
        warmup = math.ceil(0.02 * self.steps)
        done = max(0, step - warmup) / max(1, self.steps - warmup)
        falls = 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * min(1.0, (step + 1) / warmup) * falls


def read_files(folder: Path) -> dict[str, str]:
    """Read a folder's .txt and .txt.xz files, and return their texts by path within the folder."""
    files = {}
    for file in sorted(f for f in folder.rglob("*") if f.name.endswith((".txt", ".txt.xz"))):
        try:
            raw = file.read_bytes()
            text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode()
        except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise CoterieError(f"{file} could not be read as UTF-8 text: {error}.") from error
        files[str(file.relative_to(folder))] = text
    if not files:
        raise CoterieError(f"There is no .txt or .txt.xz file in {folder}.")
    return files


def divided(files: dict[str, str], seed: int) -> Texts:
    """Set random pieces of the texts aside, and keep the rest for training."""
    documents = [pieces(text, PIECE) for text in files.values()]
    return Texts(**split_by_fractions(documents, HELD_OUT, generator(seed, "split")))


def lines_of(texts: list[str]) -> Iterator[str]:
    """Return the lines of all texts, with their breaks, to train a tokenizer on."""
    return (line for text in texts for line in text.splitlines(keepends=True))


def train_byte_level(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train byte-level BPE, which can encode any text; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines_of(texts), trainer)
    return tokenizer


def train_sentencepiece(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train BPE as Llama 2 has it; 256 of its tokens are for the bytes of rare characters.

    A space is part of the word after it, a text's first word has none, and line breaks are bytes.
    Decoding gives back every text without U+FFFF. Token 0 ends a text, tokens 1 to 256 are bytes.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(SPACE, STAND_IN), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Metaspace(SPACE, prepend_scheme="never"),
            decoders.ByteFallback(),
            decoders.Replace(STAND_IN, SPACE),
        ]
    )
    remaining = vocabulary - 1 - len(BYTES)
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    # the trainer's own alphabet is left to chance where characters are equally frequent
    common = sorted((c for c in counts if c != SPACE and not c.isspace()), key=lambda c: -counts[c])
    alphabet = [SPACE, *common][: min(ALPHABET, remaining)]
    trainer = trainers.BpeTrainer(
        vocab_size=remaining + 1,
        special_tokens=[END],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines_of(texts), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    ids = {piece: i for i, piece in enumerate([END, *BYTES, *pieces[1:]])}
    merges = [(left, right) for left, right in trained["merges"]]
    tokenizer.model = models.BPE(ids, merges, byte_fallback=True)
    return tokenizer


def new_model(recipe: Recipe, vocabulary: int) -> PreTrainedModel:
    """Create a model with random fp32 weights; its head is the embedding, and it has no dropout."""
    settings = {  # transformers knows GPT-2's sizes by these names, too
        "num_hidden_layers": recipe.layers,
        "hidden_size": recipe.width,
        "num_attention_heads": recipe.heads,
        "max_position_embeddings": recipe.context,
        "vocab_size": vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    if recipe.architecture == "gpt2":
        config = GPT2Config(**settings, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    else:
        wide = math.ceil(8 * recipe.width / 3 / 32) * 32
        config = LlamaConfig(**settings, intermediate_size=wide)
    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(config)


class Training:
    """A model, its optimiser and the steps done; all of it fits into one checkpoint."""

    def __init__(
        self, recipe: Recipe, base: Base, data: ClientData, identity: dict[str, object]
    ) -> None:
        assert isinstance(base.model, PreTrainedModel)
        self.recipe, self.base, self.data, self.model = recipe, base, data, base.model
        self.identity = identity
        self.parameters = dict(base.model.named_parameters())
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        others = [p for p in self.parameters.values() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
        self.done = 0

    def step(self) -> float:
        """Take one optimiser step, and return its loss in nats per token."""
        before = filter(None, [self.recipe.begin])
        chance = generator(self.recipe.seed, "batch", *before, self.done)
        ids = sample_batch(self.data.train, self.recipe.batch, self.recipe.context, chance).ids
        with autocast(self.base.precision, self.base.device.type):
            loss = language_model_loss(self.model, ids.to(self.base.device))
        if not math.isfinite(loss.item()):
            raise CoterieError("The loss is no longer finite; a lower --learning-rate may help.")
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = self.recipe.rate(self.done)
        self.optimiser.step()
        self.done += 1
        return loss.item()

    def score(self, tokens: Split) -> Score:
        """Evaluate the model on text that it is not trained on."""
        return evaluate(self.base, self.model, tokens, self.recipe.context)

    def bits_per_byte(self, files: dict[str, str], held_out: list[str]) -> dict[str, float]:
        """Return bits per byte for the held-out text of each file, where it fills a window."""
        spec, scores = DataSpec(window=self.recipe.context), {}
        for name, text in files.items():
            own = [piece for piece in held_out if piece in text]
            if sum(map(len, own)) > 40 * spec.window:  # characters that surely fill one
                tokens = encoded(own, self.base.tokenizer, spec, "test", name)
                scores[name] = self.score(tokens).bits_per_byte
        return scores

    def export(self, folder: Path) -> None:
        """Write the base's files, with weights in bf16; call it last, since it converts the model.

        bf16 takes half the space of fp32, in which the base is used, as its config says.
        """
        self.base.model.bfloat16()
        self.model.save_pretrained(folder)
        self.model.config.dtype = torch.float32
        self.model.config.save_pretrained(folder)
        self.base.tokenizer.save_pretrained(folder)

    def state(self) -> State:
        """Return weights and moments, and the values that a resumed training must match."""
        groups: dict[str, dict[str, Tensor]] = {"weights": dict(self.parameters)}
        for name, p in self.parameters.items():
            for kind, tensor in self.optimiser.state[p].items():
                groups.setdefault(kind, {})[name] = tensor
        return State(groups, {**self.identity, "done": self.done})

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Restore the weights and moments of a checkpoint."""
        for name, p in self.parameters.items():
            p.copy_(state["weights"][name])
            self.optimiser.state[p] = {
                "step": state["step"][name],
                "exp_avg": state["exp_avg"][name].to(p.device),
                "exp_avg_sq": state["exp_avg_sq"][name].to(p.device),
            }
        self.done = state.values["done"]


def digest_of(base: Path) -> str:
    """Return the digest of a base's weights."""
    try:
        return blake2b((base / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise CoterieError(f"{base} is no base of this script: {error}.") from error


def begin(split: Texts, recipe: Recipe, base: Path | None, checkpoint: State | None) -> Training:
    """Prepare a training for its next step: the first, or the one after a checkpoint."""
    text = blake2b("".join(split.train).encode(), digest_size=8).hexdigest()
    identity = {"recipe": asdict(recipe), "text": text}
    if base is not None:
        bpe = Tokenizer.from_file(str(base / "tokenizer.json"))
    elif checkpoint is None:
        byte_level = recipe.tokenizer == "byte-level"
        train_tokenizer = train_byte_level if byte_level else train_sentencepiece
        bpe = train_tokenizer(split.train, recipe.vocabulary)
    else:
        bpe = Tokenizer.from_str(checkpoint.values["tokenizer"])
    if checkpoint is not None:
        if any(checkpoint.values[key] != value for key, value in identity.items()):
            raise CoterieError("The training began with other options or texts; give those again.")
        torch.set_num_threads(checkpoint.values["threads"])
    identity |= {"tokenizer": bpe.to_str(), "threads": torch.get_num_threads()}
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    tokenizer = FastTokenizer(tokenizer_object=bpe, model_max_length=recipe.context, **special)
    try:
        data = tokenise(split, tokenizer, DataSpec(window=recipe.context), "base")
    except CoterieError as error:
        few = f"The texts are too few: the {HELD_OUT['test']:.1%} that are set aside for a test"
        raise CoterieError(f"{few} must hold over {recipe.context} tokens (--context).") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        made = AutoModelForCausalLM.from_pretrained
        model = new_model(recipe, len(tokenizer)) if base is None else made(base).float().train()
    training = Training(recipe, Base(model, tokenizer, "bf16", device), data, identity)
    if checkpoint is not None:
        training.restore(checkpoint)
    return training


def pretrain(
    texts: Path, out: Path, recipe: Recipe, base: Path | None, every: int, resume: bool
) -> None:
    """Train from the start, or from the checkpoint beside `out`; `out` appears when it is done."""
    if out.exists():
        raise CoterieError(f"{out} is there already; choose another folder with --out.")
    path = out.with_name(f"{out.name}.checkpoint.safetensors")
    if resume != path.exists():
        advice = "leave out --resume" if resume else "go on with --resume, or remove it"
        raise CoterieError(f"There is {'no' if resume else 'a'} checkpoint {path}; {advice}.")
    files = read_files(texts)
    split = divided(files, recipe.seed)
    training = begin(split, recipe, base, State.decode(path.read_bytes()) if resume else None)
    size, tokens = sum(p.numel() for p in training.parameters.values()), training.data.train.ids
    console.print(f"{size:,} parameters, {len(tokens):,} training tokens")
    out.parent.mkdir(parents=True, exist_ok=True)
    began, first, losses = time.monotonic(), training.done, []
    for done in range(first + 1, recipe.steps + 1):
        losses.append(training.step())
        if done % math.ceil(every / 10) == 0 or done == recipe.steps:
            pace = (time.monotonic() - began) / (done - first)
            console.print(
                f"step {done:,}/{recipe.steps:,}  loss {sum(losses) / len(losses):.3f}  "
                f"{recipe.batch * recipe.context / pace:,.0f} tokens/s  "
                f"{pace * (recipe.steps - done) / 60:.1f} min left"
            )
            losses.clear()
        if done % every == 0 and done < recipe.steps:
            write_bytes(path, training.state().encode())
            perplexity = training.score(training.data.validation).perplexity
            console.print(f"  held-out perplexity {perplexity:.2f}; saved")
    console.print(f"test perplexity {training.score(training.data.test).perplexity:.2f}")
    for name, bits in training.bits_per_byte(files, split.test).items():
        console.print(f"  {bits:.3f} bits per byte  {name}")
    write_folder(out, training.export)
    path.unlink(missing_ok=True)
    console.print(f"The base is in {out}; use it with `coterie run --set base={out.resolve()}`.")


def main(
    texts: Annotated[Path, typer.Argument(help="Folder of .txt or .txt.xz files, UTF-8.")],
    out: Annotated[Path, typer.Option(help="Folder for the base; it must not exist yet.")],
    architecture: Annotated[
        Literal["gpt2", "llama"], typer.Option(help="Whose shape the model has.")
    ] = "gpt2",
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 6,
    width: Annotated[int, typer.Option(min=2, help="Size of hidden states.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    tokenizer: Annotated[
        Literal["byte-level", "sentencepiece"],
        typer.Option(help="BPE as GPT-2 has it, or as Llama 2 has it."),
    ] = "byte-level",
    vocabulary: Annotated[int, typer.Option(min=257, help="Tokens, at most.")] = 8192,
    context: Annotated[int, typer.Option(min=1, help="Tokens that it reads at once.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 10_000,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a step.")] = 32,
    learning_rate: Annotated[float, typer.Option(min=0, help="Its largest value.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Every random draw comes from it.")] = 0,
    begin_with: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a base to train further, in its own shape and with its tokenizer. "
            "With the texts and seed of its training, the same text is held out again."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints, and held-out perplexities.")
    ] = 500,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint, with the same options.")
    ] = False,
) -> None:
    """Train a small base from a folder of text, for `coterie run --set base=FOLDER`.

    After a stop, --resume goes on from FOLDER.checkpoint.safetensors, to the same bits.
    """
    shape = (architecture, layers, width, heads, tokenizer, vocabulary, context)
    try:
        if width % (2 * heads):
            raise CoterieError(f"--width must be a multiple of {2 * heads}, twice --heads.")
        begun = None if begin_with is None else digest_of(begin_with)
        recipe = Recipe(*shape, steps, batch, learning_rate, seed, begun)
        pretrain(texts, out, recipe, begin_with, every, resume)
    except CoterieError as error:
        console.print(f"[red]Error:[/] {escape(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Stopped. If a checkpoint was saved, the same command with --resume goes on.")
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
