"""Checks of a base's files, its configuration and its tokenizer.

transformers only warns if a tokenizer has no tokens. Here, this is an error. The module `whole`
checks the weights.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    __version__,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from coterie.errors import CoterieError
from coterie.files import open_file, parse_json, read_file

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
ADAPTER = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tekken.json",
)
OTHER_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    INDEX,
)
OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.safetensors")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
COUNTS = re.compile("layer|block|expert|head|depth|stage|label")
"""Names of numbers that determine how many modules a model has, or how long its lists are."""
WIDTHS = re.compile("size|dim|width|length|rank|channel|capacity")
"""Names that `COUNTS` matches, but that are not counts."""
COSTLESS = re.compile("theta|base|position|length|len$|window|context|param|total")
"""Names of numbers that need no memory, or that the check of the weights covers."""
MAX_COUNT = 4096
"""The highest accepted number of layers, heads, experts or the like."""
MAX_NUMBER = 2**24
"""The highest accepted value of any other number."""
MAX_MODULES = 200_000
"""The highest accepted number of a model's modules."""


def check_files(folder: Path) -> None:
    """Check those files in a base's folder that describe the model and the tokenizer.

    Raises:
        CoterieError: A file is a Git LFS pointer, a .json file does not contain a JSON object, or
            the folder contains a PEFT adapter.
    """
    if (folder / ADAPTER).exists():
        config = read_object(folder / ADAPTER)
        raise CoterieError(
            f"{folder} contains a PEFT adapter of {config.get('base_model_name_or_path')!r}, not a "
            "base; set `base` to the model that the adapter adapts and, if the adapter is LoRA, "
            "`adapter` to this folder."
        )
    for name in (*TOKENIZER_FILES, *OTHER_FILES):
        check = read_object if name.endswith(".json") else refuse_pointer
        if (folder / name).is_file():
            check(folder / name)


def check_weights(folder: Path) -> None:
    """Check that a base's folder has all weight files and that no weight file is damaged.

    Only the files' headers are read.

    Raises:
        CoterieError: A file is missing or damaged, is only a Git LFS pointer, or is not in the
            safetensors format.
    """
    if (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    elif (folder / INDEX).exists():
        files = sorted(set(_shards(folder / INDEX).values()))
    else:
        raise CoterieError(_without_weights(folder))
    for name in files:
        if not (folder / name).is_file():
            raise CoterieError(f"{folder} lacks the weight file {name}; download it.")
        refuse_pointer(folder / name)
        try:
            with safe_open(folder / name, "pt"):
                pass
        except SafetensorError as error:
            size = (folder / name).stat().st_size
            raise CoterieError(
                f"{folder / name} is damaged or incomplete ({size:,} bytes; {error}); download it "
                "again."
            ) from error


def _shards(index: Path) -> Mapping[str, str]:
    """Read an index file's mapping from tensor names to the names of weight files."""
    content = read_object(index)
    shards = content.get("weight_map")
    if not (
        isinstance(shards, dict)
        and all(isinstance(name, str) for name in shards.values())
        and isinstance(content.get("metadata"), dict)
    ):
        raise CoterieError(f"{index} lacks valid `metadata` or `weight_map`; download it again.")
    return shards


def _without_weights(folder: Path) -> str:
    paths = (path for form in OTHER_FORMATS for path in sorted(folder.glob(form)))
    others = [path.name for path in paths if path.exists()]  # without dangling links
    if not others:
        return f"{folder} contains no weights; download model.safetensors."
    if others[0].endswith((".bin", ".pth", ".pt", ".ckpt")):
        return (
            f"{folder} stores its weights in a pickle ({others[0]}), which can run code when it is "
            "opened; if you trust the file, load the model with transformers and save it with "
            "save_pretrained, which writes model.safetensors."
        )
    return f"{folder} stores its weights in {others[0]}; convert them to model.safetensors."


def refuse_pointer(file: Path) -> None:
    """Raise CoterieError if a file is a Git LFS pointer."""
    with open_file(file) as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CoterieError(
                f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in the "
                "file's folder."
            )


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CoterieError: The file is a Git LFS pointer, is not valid JSON, or contains another value.
    """
    refuse_pointer(file)
    try:
        content = parse_json(read_file(file))
    except ValueError as error:
        raise CoterieError(f"{file} is not valid JSON ({error}); download it again.") from error
    if not isinstance(content, dict):
        raise CoterieError(f"{file} does not contain a JSON object; download it again.")
    return content


def check_numbers(where: str, values: Mapping[str, Any]) -> None:
    """Check the whole numbers that describe a model, before a list or a loop depends on them.

    Args:
        where: The file or its part, with which error messages begin.
        values: The content of config.json, or of the header of a GGUF file.

    Raises:
        CoterieError: A number is too large.
    """
    nested: list[tuple[str, Any]] = list(values.items())
    while nested:
        key, value = nested.pop()
        if isinstance(value, Mapping):
            nested += [(f"{key}.{inner}", entry) for inner, entry in value.items()]
        elif isinstance(value, list):
            nested += [(key, entry) for entry in value if not isinstance(entry, str)]
        elif isinstance(value, int):
            name = key.rpartition(".")[2]
            counts = COUNTS.search(name) and not WIDTHS.search(name)
            limit = MAX_COUNT if counts else MAX_NUMBER
            if abs(value) > limit and (counts or not COSTLESS.search(name)):
                raise CoterieError(
                    f"{where} sets {key} to {value:,}, but at most {limit:,} is accepted; download "
                    "the file again, or set `base` to another base."
                )


@contextmanager
def limited_modules(where: str) -> Iterator[None]:
    """Limit the number of modules of a model that is built in the body of the with statement.

    Raises:
        CoterieError: The model has too many modules.
    """
    count, thread = 0, get_ident()

    def register(*_: Any) -> None:
        nonlocal count
        count += get_ident() == thread
        if count > MAX_MODULES:
            raise CoterieError(
                f"{where} describes a model of more than {MAX_MODULES:,} modules, the highest "
                "accepted number; download the file again, or set `base` to another base."
            )

    handle = register_module_module_registration_hook(register)
    try:
        yield
    finally:
        handle.remove()


def check_architecture(name: str, raw: Mapping[str, Any]) -> None:
    """Check that transformers supports the architecture in a base's config.json.

    Args:
        name: The base's name in the run file.
        raw: The content of config.json. Empty if there is no config.json.

    Raises:
        CoterieError: The architecture is missing or unknown.
    """
    if not raw:
        raise CoterieError(f"The base {name!r} has no config.json.")
    architecture = raw.get("model_type")
    if architecture is None:
        raise CoterieError(f"The config.json of the base {name!r} has no `model_type`.")
    if architecture not in CONFIG_MAPPING:
        raise CoterieError(
            f"The architecture {architecture!r} of the base {name!r} is unknown to transformers "
            f"{__version__}; use a newer version, or a base with another architecture (code "
            "shipped with a base is never run)."
        )


def check_causal(name: str, config: PreTrainedConfig) -> None:
    """Check that a base is a causal language model.

    A causal language model predicts each token from the preceding tokens.
    """
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    encodes = (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING
        and type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        and not getattr(config, "is_decoder", False)
    )
    if not causal or encodes:
        raise CoterieError(
            f"The base {name!r} is not a causal language model (its architecture is "
            f"{config.model_type!r}); use a base that predicts the next token."
        )


def check_tokenizer_files(folder: Path) -> None:
    """Check that a base's folder has a tokenizer.

    Without this check, transformers would create an empty tokenizer if the folder has none.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CoterieError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json into it."
        )


def check_tokenizer(name: str, tokenizer: Tokenizer) -> None:
    """Check that a base's tokenizer has at least one token that is not special."""
    ids: dict[str, int] = tokenizer.get_vocab()
    if not set(ids.values()) - set(tokenizer.added_tokens_decoder):
        raise CoterieError(
            f"The tokenizer of the base {name!r} has only special tokens; download its files again."
        )


def check_vocabulary(name: str, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    """Check that a base has an embedding for every token of its tokenizer."""
    rows = embedding_rows(model)
    ids: dict[str, int] = tokenizer.get_vocab()
    largest = max(ids.values())
    if largest >= rows:
        raise CoterieError(
            f"The tokenizer of the base {name!r} has {len(tokenizer):,} tokens with ids up to "
            f"{largest:,}, but the base's embedding has only {rows:,} rows; use the tokenizer "
            "that the base was trained with, or resize the embedding (resize_token_embeddings)."
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]
