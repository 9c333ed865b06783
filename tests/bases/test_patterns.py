"""Regular expressions that anybody may have written are matched in a limited time."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lora_folders import write_lora

from coterie.bases import BaseSpec, load_base, load_skeleton, patterns
from coterie.bases.patterns import matching
from coterie.bases.sites import chosen_linears
from coterie.errors import CoterieError

NAMES = [f"model.layers.{n}.self_attn.{kind}_proj" for n in range(4) for kind in "qkvo"]
ENDLESS = (r"(.*)*x", r"((\w+\.?)+)+ ", r"(a|a|\w|\.)*!", r"(?:[a-z]+|[a-z._]+|\d)*!")
PROGRAM = """
import sys
from coterie.bases import BaseSpec, load_base
from coterie.errors import CoterieError
for adapter in sys.argv[2:]:
    try:
        load_base(BaseSpec(name=sys.argv[1], adapter=adapter), "fp32", 8)
        print("loaded", flush=True)
    except CoterieError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    "pattern", [r".*\.(q|v)_proj", r"model\.layers\.[02]\..*", r"(?!.*q_proj).*", "q_proj", ".*"]
)
def test_names_are_matched_as_python_matches_them(pattern) -> None:
    assert matching(pattern, NAMES, "x") == [n for n in NAMES if re.fullmatch(pattern, n)]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_nested_repetitions_end(pattern) -> None:
    with suppress(CoterieError):  # which matching takes too long depends on the package regex
        assert matching(pattern, [*NAMES, "a" * 60], "x") == []


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(patterns, "MAX_SECONDS", 0.05)
    refusal = r"x: matching the pattern .* takes more than 0.05 secon"
    with pytest.raises(CoterieError, match=refusal):
        matching(r"(a{1,65000}){1,65000}b", ["a" * 200], "x")


@pytest.mark.parametrize("pattern", ["(a", "a{99999999999}", "(" * 900 + "a" + ")" * 900, "*"])
def test_invalid_patterns_are_refused(pattern) -> None:
    with pytest.raises(CoterieError, match=r"x: the pattern .* is not a valid regular expression"):
        matching(pattern, NAMES, "x")


def test_long_patterns_are_refused() -> None:
    with pytest.raises(CoterieError, match=r"x: the pattern has 3,000 characters; at most 2,000"):
        matching("a" * 3000, NAMES, "x")


def test_a_methods_targets_are_matched_in_a_limited_time() -> None:
    base: Any = load_skeleton("tiny-gpt2")
    assert chosen_linears(base, "attention.qkv").keys() == chosen_linears(base, "c_attn").keys()
    with pytest.raises(CoterieError, match=r"attention.targets: the pattern .* is not a valid"):
        chosen_linears(base, "(a")
    with pytest.raises(CoterieError, match="matches no linear layer"):
        chosen_linears(base, "([a-z_]+)+!")


def adapter_with(folder: Path, base: Path, **settings: Any) -> Path:
    """Write an adapter whose configuration has other settings."""
    file = write_lora(folder, base) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings))
    return folder


def test_no_pattern_of_an_adapter_hangs(bases, tmp_path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"target_modules": r"(.*)*!"}, "no module of the base matches"),
        ({"exclude_modules": r"(.*)*!"}, "loaded"),
        ({"rank_pattern": {r"(.*)*!": 2}}, "loaded"),
        ({"alpha_pattern": {r"(\w|[a-z]|\.)*!": 2}}, "loaded"),
        ({"layers_pattern": r"(.*)*!", "layers_to_transform": [0]}, "is not the na"),
    ]
    base = bases / "llama"
    folders = [adapter_with(tmp_path / f"{n}", base, **case) for n, (case, _) in enumerate(cases)]
    command = [sys.executable, "-c", PROGRAM, *map(str, (base, *folders))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    for (settings, message), line in zip(cases, done.stdout.splitlines(), strict=True):
        assert message in line, settings


@pytest.mark.parametrize("key", ["rank_pattern", "target_modules", "layers_pattern", "r"])
@pytest.mark.parametrize("value", [10**12, [3], {"a": {}}, [[]], "", {"(": 2}])
def test_settings_of_any_type_are_accepted_or_refused(key, value, bases, tmp_path) -> None:
    adapter_with(tmp_path, bases / "llama", **{key: value})
    with suppress(CoterieError):  # any other exception fails the test
        load_base(BaseSpec(name=str(bases / "llama"), adapter=str(tmp_path)), "fp32", 8)
