"""A small base and small texts that every room's tests can use."""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

if "TEST_GPU" not in os.environ:  # before PyTorch looks for GPUs, here and in processes of tests
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from hypothesis import settings
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import coterie
from coterie.bases import EMBEDDED
from coterie.config import plugins
from coterie.config.run import parse
from coterie.engines.cluster import set_variables
from coterie.testing.small import (
    TOKENS,
    small_values,
    teaching_values,
    write_base,
    write_other_base,
    write_questions,
    write_texts,
    write_tokenizer,
)
from tests.durations import Recorder, is_slow, listed

WRITERS = EMBEDDED / "demo-writers"
TEXTS = ("diarist", "poet", "whaler")
LONGEST = ("test_demo.py", "test_deploy_files.py", "test_four_assistants.py")
THREADS = int(os.environ.get("TEST_THREADS", "1"))
UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))
"""The time, in seconds since 1970, from which slow and thorough tests are skipped."""


set_variables(None)  # before any test imports Ray
settings.register_profile("tests", deadline=None)  # a busy machine is no fault
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run this tenth (0 to 9) of the thorough tests; default: all"
    parser.addoption("--tenth", type=int, choices=range(10), help=help)
    help = "run a third of the slow tests, and no thorough ones, outside these files and folders"
    parser.addoption("--whole", type=str.split, default=["tests", "papers"], help=help)
    help = "measure all tests, and write the list of slow ones (tests/slow.json)"
    parser.addoption("--list-slow", action="store_true", help=help)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--list-slow"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, select tests, and run the longest files first.

    If time is limited, the order of files changes with the limit, so that no file is always last.
    """
    slow: frozenset[str] = frozenset() if config.getoption("--list-slow") else listed()
    for item in items:
        if is_slow(item.nodeid, slow) and not item.get_closest_marker("thorough"):
            item.add_marker("slow")
    if "TESTS_UNTIL" in os.environ:
        items.sort(key=lambda item: crc32(f"{UNTIL} {item.path.name}".encode()))
    else:
        items.sort(key=lambda item: item.path.name not in LONGEST)
    selected = [item for item in items if _is_selected(item, config)]
    config.hook.pytest_deselected(items=list(set(items) - set(selected)))
    items[:] = selected


def _is_selected(item: pytest.Item, config: pytest.Config) -> bool:
    """Return whether the options `--tenth` and `--whole` select a test, by a hash of its id."""
    tenth, part = config.getoption("--tenth"), crc32(item.nodeid.encode())
    folders: list[str] = config.getoption("--whole") or []
    whole = item.nodeid.startswith(tuple(folders))
    if item.get_closest_marker("thorough"):
        return whole and tenth in (None, part % 10)
    return whole or not item.get_closest_marker("slow") or part % 3 == (tenth or 0) % 3


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip("the time for these tests is over (TESTS_UNTIL)")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads only wait for each other over tensors as small as the tests'."""
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _one_thread_again(_one_thread: None) -> None:
    """Runs set their own number."""
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests, and processes that they start, do not touch the user's cache."""
    os.environ["COTERIE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Processes that tests start can be interrupted, even if a shell started these in the
    background, where it is ignored and they would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plugins that a test loads, and names that it registers, end with it."""
    for registry in plugins.registries():
        monkeypatch.setattr(registry, "registered", dict(registry.registered))
    monkeypatch.setattr(plugins, "_loaded", dict(plugins._loaded))
    modules = {name: module for name, module in sys.modules.items() if _is_plugin(name)}
    yield
    for name in filter(_is_plugin, list(sys.modules)):
        del sys.modules[name]
    sys.modules.update(modules)


def _is_plugin(module: str) -> bool:
    return module.startswith("coterie_plugin_")


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `gpt2` and `llama`: two layers of width 32 with random weights."""
    folder = tmp_path_factory.mktemp("bases")
    write_base(folder / "gpt2")
    sizes: Any = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaConfig(**sizes, max_position_embeddings=64, vocab_size=TOKENS)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    write_tokenizer(folder / "llama")
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of the base `tiny-gpt2`, as transformers reads it."""
    return AutoTokenizer.from_pretrained(str(EMBEDDED / "tiny-gpt2"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a little of three writers."""
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def other(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama with a tokenizer of 400 tokens, unlike that of the other tests' bases."""
    path = tmp_path_factory.mktemp("other") / "small-llama"
    return str(write_other_base(path, texts / "poet.txt"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions of different lengths and their answers, for each of three writers."""
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="session")
def values(bases: Path, texts: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a short run as plain data; named arguments replace its keys."""

    def make(**changes: Any) -> dict[str, Any]:
        method = {"name": "comigs-1g1s", "router": {"every": 2, "steps": 1}}
        whole = {"method": method, "threads": THREADS} | changes
        return small_values(bases / "gpt2", texts, **whole)

    return make


@pytest.fixture(scope="session")
def config(values: Callable[..., dict[str, Any]]) -> Callable[..., coterie.RunConfig]:
    """Return a function that makes such a run and validates it."""

    def make(**changes: Any) -> coterie.RunConfig:
        return parse(values(**changes))

    return make


@pytest.fixture(scope="session")
def teachers(bases: Path, questions: Path, other: str) -> Callable[..., coterie.RunConfig]:
    """A run in which a server and clients with other tokens have a public set of questions."""

    def make(**changes: Any) -> coterie.RunConfig:
        values = {"threads": THREADS} | changes
        return parse(teaching_values(bases / "gpt2", other, questions, **values))

    return make


@pytest.fixture(scope="session")
def opinions(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions of three writers, who prefer the same answer or the other one."""
    folder = tmp_path_factory.mktemp("opinions")
    for name in TEXTS:
        lines = (questions / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        answers = ("yes", "no") if name != "whaler" else ("no", "yes")
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for line in lines:
                prompt = json.loads(line)["instruction"]
                record = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
                file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of one to three exchanges, for each of two writers and for everybody."""
    path = tmp_path_factory.mktemp("talks")
    draw = random.Random(0)
    for name in TEXTS:
        words = (WRITERS / f"{name}.txt").read_text(encoding="utf-8").split()
        lines = []
        for _ in range(40):
            turns = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.5 else []
            for role in ("user", "assistant") * draw.randint(1, 3):
                text = " ".join(draw.choices(words, k=draw.randint(1, 4)))
                turns.append({"role": role, "content": text})
            lines.append(json.dumps({"messages": turns, "label": name}))
        (path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return path
