"""GGUF files for llama.cpp, Ollama and LM Studio, written by llama.cpp's own converter.

The converter is not distributed as a package, so the user provides llama.cpp's source. Coterie then
corrects the metadata of the converted file, so that llama.cpp splits text into the same tokens as
the checkpoint's tokenizer.
"""

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from coterie.bases.checks import read_object
from coterie.bases.gguf import load_model
from coterie.errors import CoterieError, imports_for
from coterie.exports.format import Format, Outputs, run_python
from coterie.exports.merged import MERGED
from coterie.exports.moe import MOE
from coterie.exports.source import Source

FILE = "model.gguf"
SCRIPT = "convert_hf_to_gguf.py"
VARIABLE = "LLAMA_CPP"
"""Environment variable with the folder of llama.cpp."""
LLAMA_CPP = "llama-cpp-python"
SAMPLE = (
    "It's 2024, and 33333 cats don't care. ",
    "  two  spaces\n\n\tand a tab ",
    '"Naïve" café – 你好, мир! 🚀\n',
    "def f(x):\n    return x**2  # 3.14\n",
    " leading space",
)
"""Texts for which llama.cpp must find the same tokens."""
DRAWN = 2000
"""Number of random tokens whose text is compared besides the sample."""


def converter() -> Path:
    """Return the path of llama.cpp's converter.

    The converter is looked up in the folder that the environment variable LLAMA_CPP names and, if
    the variable is not set, in the folders of PATH.

    Raises:
        CoterieError: There is no converter.
    """
    if folder := os.environ.get(VARIABLE):
        script = Path(folder) / SCRIPT
        if not script.is_file():
            raise CoterieError(
                f"The environment variable {VARIABLE} names {folder}, which does not contain "
                f"{SCRIPT}; set it to a folder with the source of llama.cpp."
            )
        return script
    if (path := shutil.which(SCRIPT)) is not None:
        return Path(path)
    raise CoterieError(
        f"The format gguf needs llama.cpp's {SCRIPT}, which is not on PATH; download the source of "
        f"llama.cpp, and set the environment variable {VARIABLE} to its folder."
    )


def to_gguf(checkpoint: Path, file: Path) -> None:
    """Convert a checkpoint to a GGUF file in float32, with the same weights and the same tokens.

    Args:
        checkpoint: A folder with a transformers model and its tokenizer.
        file: The file to create.

    Raises:
        CoterieError: The converter is missing or failed, or llama.cpp would compute something else
            than transformers.
    """
    with imports_for("The format gguf", "gguf"):
        import gguf  # noqa: F401
    script, config = converter(), read_object(checkpoint / "config.json")
    if (reason := _unequal(config)) is not None:
        raise CoterieError(f"The model cannot be exported as gguf, because {reason}.")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    with TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        raw, corrected = Path(folder) / "raw.gguf", Path(folder) / "corrected.gguf"
        _convert(script, checkpoint.absolute(), raw.absolute())
        correct_flags(raw, corrected, tokenizer)
        check_tokens(corrected, tokenizer)
        corrected.replace(file)


def _unequal(config: Mapping[str, Any]) -> str | None:
    """Return why llama.cpp would compute something else than a configuration says, or None.

    The sum of the chosen experts' weights is always 1 in llama.cpp's Qwen3-MoE, and is never
    changed to 1 in its Qwen2-MoE.
    """
    kind = str(config.get("model_type"))
    chooses = config.get("num_experts_per_tok") != config.get("num_experts")
    renormalised = {"qwen3_moe": True, "qwen2_moe": False}.get(kind)
    if chooses and renormalised not in (None, bool(config.get("norm_topk_prob", False))):
        when = "always" if renormalised else "never"
        return f"llama.cpp {when} renormalises the weights of {kind}'s experts"
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    if kind in ("mistral", "mixtral") and window is not None and window < longest:
        return f"llama.cpp ignores the sliding window of {kind}"
    return None


def _convert(script: Path, checkpoint: Path, file: Path) -> None:
    """Run llama.cpp's converter in a process of its own.

    Raises:
        CoterieError: The converter failed.
    """
    arguments = [script, checkpoint, "--outfile", file, "--outtype", "f32"]
    succeeded, last = run_python(arguments, file.parent)
    if succeeded and file.is_file():
        return
    if last.startswith("ModuleNotFoundError"):
        package = last.split("'")[1]
        raise CoterieError(
            f"llama.cpp's converter needs the package {package}; run: pip install {package}."
        )
    if "pre-tokenizer was not recognized" in last:
        raise CoterieError(
            "The model cannot be exported as gguf, because llama.cpp does not know how its "
            "tokenizer splits text into words."
        )
    raise CoterieError(f"llama.cpp's converter {script} failed: {last}")


def correct_flags(file: Path, corrected: Path, tokenizer: Tokenizer) -> None:
    """Copy a GGUF file, and set its flags for special tokens and the leading space.

    With these flags, llama.cpp adds to a text what the tokenizer adds.

    Without these flags, llama.cpp may add a token at the beginning or the end of a text, and a
    space before its first word.

    Args:
        file: The file.
        corrected: The file to create.
        tokenizer: The tokenizer of the model.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

    reader = GGUFReader(file)
    ids: list[int] = tokenizer("a")["input_ids"]
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    flags = {
        "add_bos_token": ids[:1] == [tokenizer.bos_token_id] != bare[:1],
        "add_eos_token": ids[-1:] == [tokenizer.eos_token_id] != bare[-1:],
        "add_space_prefix": _contents(reader, "tokenizer.ggml.model") == "llama"
        and str(tokenizer.convert_ids_to_tokens(bare[0])).startswith("▁"),
    }
    metadata = {
        f"tokenizer.ggml.{name}": MetadataDetails(GGUFValueType.BOOL, flag)
        for name, flag in flags.items()
    }
    writer = GGUFWriter(corrected, _contents(reader, "general.architecture"))
    with redirect_stderr(StringIO()):  # a progress bar
        copy_with_new_metadata(reader, writer, metadata, [])


def _contents(reader: Any, key: str) -> Any:
    """Return the value of a key of a GGUF file, or None if the file lacks the key."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def check_tokens(file: Path, tokenizer: Tokenizer) -> None:
    """Check that llama.cpp splits text into the same tokens as a tokenizer.

    The texts are a short sample, and the text of random tokens. If llama-cpp-python is not
    installed, a tokenizer is accepted if the converter recognised it, or if it has the form of
    SentencePiece, for which llama.cpp's algorithm is written.

    Raises:
        CoterieError: The tokens differ, or it is unknown whether they do.
    """
    from gguf import GGUFReader

    try:
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
    except ImportError:
        encoder: Any = tokenizer.backend_tokenizer
        form = json.loads(encoder.to_str())["pre_tokenizer"]
        recognised = _contents(GGUFReader(file), "tokenizer.ggml.model") != "llama"
        if recognised or form is None or form["type"] == "Metaspace":
            return
        raise CoterieError(
            "Coterie cannot check whether llama.cpp tokenizes text as the model's tokenizer does; "
            f"install {LLAMA_CPP}, and export again."
        ) from None
    with redirect_stderr(StringIO()):  # warnings about the context, which is not used
        model: Any = Llama(str(file), vocab_only=True, verbose=False)
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    drawn = random.Random(0).choices(ids, k=DRAWN)
    words = "".join(str(tokenizer.decode([token])) for token in drawn).replace("\ufffd", "")
    for text in (*SAMPLE, words):
        if (
            model.tokenize(text.encode(), add_bos=True, special=True)
            != tokenizer(text)["input_ids"]
        ):
            raise CoterieError(
                "The model cannot be exported as gguf, because llama.cpp splits text into other "
                "tokens than the model's tokenizer."
            )


def gguf_logits(file: Path, ids: Sequence[int]) -> Outputs | None:
    """Compute the outputs of a GGUF file, in float32 and on the CPU.

    Args:
        file: The file.
        ids: Token ids.

    Returns:
        The logits that llama.cpp computes if llama-cpp-python is installed, and otherwise those of
        transformers, which does not read mixtures of experts. None if neither can compute them.
    """
    from gguf import GGUFReader

    try:
        import llama_cpp  # pyright: ignore[reportMissingImports]
    except ImportError:
        reader = GGUFReader(file)
        arch = _contents(reader, "general.architecture")
        if _contents(reader, f"{arch}.expert_count"):
            return None
        return Outputs(f"transformers {transformers.__version__}", _read_back(file, ids))
    with redirect_stderr(StringIO()):  # warnings about the context
        options: dict[str, Any] = {"n_gpu_layers": 0, "logits_all": True, "verbose": False}
        options |= dict.fromkeys(("n_ctx", "n_batch"), len(ids))
        options |= dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
        model: Any = llama_cpp.Llama(str(file), n_threads=torch.get_num_threads(), **options)
    model.eval(list(ids))
    logits = torch.tensor(model.scores[: len(ids)], dtype=torch.float32)
    return Outputs(f"llama.cpp ({LLAMA_CPP} {llama_cpp.__version__})", logits)


@torch.no_grad()
def _read_back(file: Path, ids: Sequence[int]) -> Tensor:
    """Compute the outputs of a GGUF file with transformers."""
    model: Any = load_model(file, torch.float32)
    return model(torch.tensor([list(ids)])).logits[0].float()


def _checkpoint_format(source: Source) -> Format:
    """Return the format of the checkpoint that is converted."""
    return MERGED if MERGED.refusal(source) is None else MOE


def _write(source: Source, folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    _checkpoint_format(source).write(source, checkpoint)
    source.tokenizer.save_pretrained(checkpoint)
    to_gguf(checkpoint, folder / FILE)
    shutil.rmtree(checkpoint)


def _usage(source: Source, folder: str, base: str) -> str:
    """Return the code that loads the file with llama-cpp-python."""
    del source, base
    return f"from llama_cpp import Llama\n\nmodel = Llama({f'{folder}/{FILE}'!r})\n"


def _notes(source: Source) -> list[str]:
    return [
        *_checkpoint_format(source).notes(source),
        f"llama.cpp loads {FILE} with `llama-cli -m {FILE}`; in a Modelfile of Ollama, write "
        f"`FROM ./{FILE}`.",
    ]


GGUF = Format(
    name="gguf",
    content="a GGUF file for llama.cpp, Ollama and LM Studio",
    library="gguf",
    refusal=lambda source: _checkpoint_format(source).refusal(source),
    write=_write,
    usage=_usage,
    notes=_notes,
    outputs=lambda folder, ids: gguf_logits(folder / FILE, ids),
)
