"""Whatever a run file holds: a run, or one sentence; never a traceback."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

import coterie
from coterie.config.deployed import load_deployment, load_with_any_text
from coterie.config.read import load_config, load_here
from coterie.config.values import read_values
from coterie.errors import CoterieError

ROOT = Path(__file__).parents[2]
HOSTILE = [
    *("2024-01-01", "2024-01-01 00:00:00", "!!timestamp x", "!!set {a, b}", "!!omap [a: 1]"),
    *("!!binary aGk=", "!!int x", "!!float 1_0", "!!python/object:os.system x", "&a [*a]", "*a"),
    *("~nosuchuser/x", "~", "null", "true", "0", "-1", "1:30", "0x", "1_0", "3.5", "'3'", "-0.0"),
    *(".inf", ".nan", "1e999", "1e-320", "9" * 400, "9" * 5000, "x" * 3000, "''"),
    *('"\\0"', '"a\\nb"', '"\\ud800"'),
    *("é", "/", "/dev/null", "..", "a/../../b", "[]", "{}", "[{}]", "[null]", "[1]"),
    *("[1, 2, 3]", "[[[[[]]]]]", "{a: {b: {c: {d: 1}}}}", "{1: 2}", "{null: 1}", "{2024-01-01: 1}"),
    *("? [1, 2]\n: 3", "{[1]: 2}", "<<: 3", "{<<: 3}", "[a, b]*", "{name: 3}", "{name: [x]}"),
    *("{name: null}", "{name: fedit}", "{name: fedit, 1: 2}"),
]  # fmt: skip
DEEP = [
    *("a: " + "[" * depth + "]" * depth for depth in (20, 200, 3000)),
    *("{a: " * depth + "1" + "}" * depth for depth in (20, 200, 3000)),
    *("a: " + "[" * depth for depth in (20, 200, 20_000)),
]


def originals() -> list[str]:
    """Return the run files of the package and of the documentation."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    blocks = [re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL) for page in pages]
    shipped = Path(coterie.__file__).parent.glob("assets/*.yaml")
    return [*(path.read_text() for path in shipped), *(text for texts in blocks for text in texts)]


def mutated(text: str, rng: random.Random) -> str:
    """Return a run file with some lines changed."""
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(lines))
        key, colon, value = lines[at].partition(":")
        match rng.randrange(8):
            case 0 | 1 | 2 if colon:
                lines[at] = f"{key}: {rng.choice(HOSTILE)}"
            case 3 if colon:
                indent = key[: len(key) - len(key.lstrip())]
                lines[at] = f"{indent}{rng.choice(HOSTILE)}:{value}"
            case 4:
                lines[at] = rng.choice(["", " ", "- "]) + lines[at]
            case 5:
                lines.insert(at, rng.choice(lines))
            case 6:
                del lines[at : at + 1]
                lines.append("")
            case _ if lines[at]:
                where = rng.randrange(len(lines[at]))
                changed = rng.choice("[]{}:,&*!|>'\"%@`#-? \t\x00\x7fé\ud800")
                lines[at] = lines[at][:where] + changed + lines[at][where + 1 :]
    return "\n".join(lines)


READERS = (
    load_config,
    lambda path: load_with_any_text(read_values(path)),
    lambda path: load_here(read_values(path)),
    lambda path: load_deployment(read_values(path), ["alice", "bob"]),
)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), pytest.param(1, 10_000, marks=pytest.mark.slow)]
)
def test_run_files_are_read_or_refused_in_a_sentence(seed, count, tmp_path) -> None:
    rng, counts = random.Random(seed), Counter[str]()
    path, texts = tmp_path / "run.yaml", originals()
    for number in range(count):
        text = DEEP[number] if number < len(DEEP) else mutated(rng.choice(texts), rng)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            READERS[number % len(READERS)](path)
            counts["taken"] += 1
        except CoterieError:
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{error!r} on {text[:3000]!r}") from error
    assert min(counts["taken"], counts["refused"]) > count / 20  # both happen
