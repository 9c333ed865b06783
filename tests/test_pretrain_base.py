import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer import Typer
from typer.testing import CliRunner

from coterie.bases import load_base
from coterie.seeding import generator
from scripts import pretrain_base as script

STEPS = 5
STYLES = ["byte-level", "sentencepiece"]
STRANGE = [
    *("the whale 🐳 sang", " leading\n\n  spaces\t", "größte 東京 👩‍👩‍👧", "<|not special|>"),
    *("", "   ", "  two  and three   \r\n\u2028 \n ", "\x00\t\t\ufffd e\u0301"),
    "a byte's name, <0x0A>, and ▁ itself ▁▁",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    words = ["the", "whale", "sang", "of", "an", "old", "ship", "größte", "🐳\n"]
    for name in ("one", "two"):
        chosen = torch.randint(len(words), (20_000,), generator=generator(0, name)).tolist()
        text = " ".join(words[i] for i in chosen).encode()
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(text, preset=0))
    return folder


@pytest.fixture
def pretrain(texts: Path) -> Callable[..., tuple[int, str]]:
    app = Typer()
    app.command()(script.main)

    def call(out: Path, *options: str) -> tuple[int, str]:
        small = f"--layers 1 --width 16 --heads 2 --vocabulary 300 --context 16 --steps {STEPS}"
        small += " --batch 8 --learning-rate 0.02 --every 2"
        result = CliRunner().invoke(app, [str(texts), "--out", str(out), *small.split(), *options])
        return result.exit_code, result.output

    return call


@pytest.mark.parametrize(("architecture", "style"), [("gpt2", STYLES[0]), ("llama", STYLES[1])])
def test_base_loads_in_transformers_and_coterie(pretrain, tmp_path, architecture, style):
    options = ("--architecture", architecture, "--tokenizer", style)
    code, output = pretrain(tmp_path / "base", *options)
    assert code == 0, output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert model.dtype == torch.float32
    with safe_open(tmp_path / "base" / "model.safetensors", "pt") as file:
        types = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert types == {"BF16"}
    assert model.config.model_type == architecture
    assert model.lm_head.weight is model.get_input_embeddings().weight  # pyright: ignore
    assert len(tokenizer) == model.config.vocab_size <= 300
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert load_base(str(tmp_path / "base"), "bf16", window=16).context_token == 0
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    for text in STRANGE:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # no space is put before a text, so a prompt and an answer encoded apart spell both
    assert tokenizer.tokenize("whale")[0][0] == "w"
    answer = tokenizer.encode("old ship")
    assert tokenizer.decode(tokenizer.encode("the ") + answer) == "the old ship"


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    code = "if x:\n    return '<0x0A>'\n\tthe end\n"
    prose = "the whale sang, and the ship of 1851 sang on.\n"
    rare = "".join(chr(0x4E00 + i) for i in range(300))
    return script.train_sentencepiece([code * 50, prose * 100, rare], 520)


def test_sentencepiece_offsets_are_the_characters_of_each_token(sentencepiece):
    for text in STRANGE:
        encoding, covered = sentencepiece.encode(text), 0
        spelt = ["" for _ in text]  # what the tokens from each character on stand for
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            assert start <= covered <= end
            covered = end
            if re.fullmatch("<0x..>", token):
                assert end == start + 1
                spelt[start] += token
            else:
                assert token.replace("▁", " ") == text[start:end]
        assert covered == len(text)
        for character, names in zip(text, spelt, strict=True):
            if names and character != "▁":
                assert names == "".join(f"<0x{byte:02X}>" for byte in character.encode())


def test_sentencepiece_vocabulary_is_full_and_laid_out_as_said(sentencepiece):
    tokens = [sentencepiece.id_to_token(i) for i in range(sentencepiece.get_vocab_size())]
    assert (len(tokens), tokens[0]) == (520, script.END)
    assert tokens[1:257] == [f"<0x{byte:02X}>" for byte in range(256)]
    [added] = sentencepiece.get_added_tokens_decoder().values()
    assert added.content == script.END
    pieces = tokens[257:]
    assert "▁whale" in pieces
    assert not any("\n" in piece or " " in piece for piece in pieces)
    assert not any(piece.rstrip("▁") and "▁" in piece[1:] for piece in pieces)  # one word each
    assert all(len(piece.lstrip("▁")) == 1 for piece in pieces if re.search(r"\d", piece))


def test_sentencepiece_tells_breaks_and_rare_characters_in_bytes(sentencepiece):
    assert sentencepiece.encode("the\nwhale").tokens[1:2] == ["<0x0A>"]
    assert sentencepiece.encode("\n\n").tokens == ["<0x0A>", "<0x0A>"]
    assert sentencepiece.encode("東").tokens == ["<0xE6>", "<0x9D>", "<0xB1>"]
    named = sentencepiece.encode("<0x0A>")  # as text, though the trainer saw it 50 times
    assert not set(named.ids) & set(range(257))


def test_sentencepiece_alphabet_is_limited_and_the_same_again():
    rare = "".join(chr(0x4E00 + i) * (1 + (i < 100)) for i in range(300))  # many are as frequent
    first, second = (script.train_sentencepiece([rare], 1000).to_str() for _ in range(2))
    assert first == second
    letters = {piece for piece in json.loads(first)["model"]["vocab"] if len(piece) == 1}
    assert letters == {"▁", *(chr(0x4E00 + i) for i in range(script.ALPHABET - 1))}


def test_loss_falls(pretrain, tmp_path):
    _, output = pretrain(tmp_path / "base", "--steps", "40", "--every", "10")
    losses = [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 1
    perplexity = float(output.split("test perplexity")[1].split()[0])
    assert perplexity < 2 ** (losses[0] / torch.log(torch.tensor(2.0)).item())


@pytest.mark.parametrize("tokenizer_style", STYLES)
def test_resumed_training_ends_the_same(pretrain, tmp_path, monkeypatch, tokenizer_style):
    style = ("--tokenizer", tokenizer_style)
    pretrain(tmp_path / "whole", *style)
    real, calls = script.language_model_loss, []

    def killed_at_the_fourth_step(model, ids):
        calls.append(ids)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(model, ids)

    with monkeypatch.context() as patch:
        patch.setattr(script, "language_model_loss", killed_at_the_fourth_step)
        code, output = pretrain(tmp_path / "parts", *style)
    assert code == 130
    assert "--resume" in output
    assert not (tmp_path / "parts").exists()
    code, output = pretrain(tmp_path / "parts", "--resume", *style)
    assert code == 0, output
    assert "step 3/5" in output
    assert "step 2/5" not in output
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_base_is_trained_further_on_other_windows(pretrain, tmp_path, monkeypatch):
    pretrain(tmp_path / "first")
    real, read = script.language_model_loss, []

    def seen(model, ids):
        read.append((ids, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return real(model, ids)

    monkeypatch.setattr(script, "language_model_loss", seen)
    pretrain(tmp_path / "again")
    first = [ids for ids, _ in read]
    read.clear()
    code, output = pretrain(tmp_path / "more", "--begin-with", str(tmp_path / "first"))
    assert code == 0, output
    began = AutoModelForCausalLM.from_pretrained(tmp_path / "first").float()
    assert all(torch.equal(p, read[0][1][name]) for name, p in began.named_parameters())
    assert not any(torch.equal(ids, other) for ids, _ in read for other in first)
    tokenizers = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("first", "more")]
    assert tokenizers[0] == tokenizers[1]
    scores = re.findall(r"^  ([\d.]+) bits per byte  (\w+)\.txt\.xz$", output, re.MULTILINE)
    assert {name for _, name in scores} <= {"one", "two"}  # so small a share may be of one alone
    assert scores
    assert all(0 < float(bits) < 8 for bits, _ in scores)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    recipe = script.Recipe("gpt2", 1, 16, 2, "byte-level", 300, 16, 500, 8, 1e-2, 0)
    rates = [recipe.rate(step) for step in range(500)]
    assert rates[:10] == pytest.approx([1e-3 * (step + 1) for step in range(10)])
    assert rates[10] == 1e-2
    assert rates[255] == pytest.approx(5.5e-3)  # half way down
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 1e-3 < rates[-1] < 1.001e-3


def test_errors_are_one_sentence(pretrain, tmp_path):
    def refuses(*options: str) -> str:
        code, output = pretrain(tmp_path / "base", *options)
        assert code == 2
        assert output.startswith("Error: ")
        assert output.count("\n") == 1
        return output

    assert "no checkpoint" in refuses("--resume")
    assert "multiple of 4" in refuses("--width", "18")
    assert "--context" in refuses("--context", "5000")
    (tmp_path / "base").mkdir()
    assert "there already" in refuses()


def test_other_options_cannot_resume(pretrain, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(script, "write_folder", _interrupted)
        assert pretrain(tmp_path / "base")[0] == 130
    code, output = pretrain(tmp_path / "base")
    assert (code, "go on with --resume" in output) == (2, True)
    for other in (("--seed", "1"), ("--tokenizer", "sentencepiece")):
        code, output = pretrain(tmp_path / "base", "--resume", *other)
        assert (code, "other options" in output) == (2, True)


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt
