"""Every example of README.md, docs/ and `--help` is executed with small settings, or validated.

A command of `coterie`, a Python block and a YAML block is executed or resolved here unless
shown_examples.yaml lists it with the reason; what is listed is parsed.
"""

import glob
import json
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.config.deployed import load_with_any_text
from coterie.config.plugins import load_plugin
from coterie.config.values import DEMO, read_yaml
from coterie.methods.contract import RunFacts

ROOT = Path(__file__).parents[1]
LISTED = yaml.safe_load((ROOT / "tests/shown_examples.yaml").read_text(encoding="utf-8"))
"""The examples that are not executed here: by reason and page, patterns of their first lines."""
COMMANDS: Any = typer.main.get_command(app)
CLIENTS = ("ada", "alice", "anna", "ben")
SHORT = " --set rounds=1 --set training.steps=1"
DEMOS = ("who-wrote-this", "teach-one-another", "four-assistants")
FEW = "".join(f" --set data.limits.{split}=4" for split in ("train", "validation", "test"))
LANGUAGES = {"bash", "console", "json", "nginx", "python", "sh", "text", "toml", "yaml"}
SHELLS = {"bash", "console", "sh"}


class Example(NamedTuple):
    """A fenced block of a page, or an indented block of a command's help."""

    page: str
    line: int
    language: str
    text: str

    def lines(self) -> list[str]:
        """Return the commands of a block for a shell; the first line of another block."""
        if self.language not in ("sh", "console"):
            return [self.text.strip().partition("\n")[0]]
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if shlex.split(line, comments=True)]

    def unlisted(self) -> list[str]:
        """Return the lines that no pattern in the list matches."""
        patterns = [p for pages in LISTED.values() for p in pages.get(self.page, ())]
        return [each for each in self.lines() if not any(fnmatch(each, p) for p in patterns)]

    def commands(self) -> Iterator[list[str]]:
        """Yield the arguments of every `coterie COMMAND`, also under sudo and in an image."""
        for line in self.text.splitlines() if self.language == "bash" else self.lines():
            words = shlex.split(line, comments=True)
            ends = [i for i, word in enumerate(words) if re.match(r"[|&>;]", word)]
            for i, word in enumerate(words[:-1]):
                if Path(word).name == "coterie" and words[i + 1] in COMMANDS.commands:
                    yield words[i + 1 : min((end for end in ends if end > i), default=None)]


def of_pages() -> Iterator[Example]:
    """Yield the fenced blocks of all pages except the generated page on GPUs."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for block in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 1
            if name != "docs/develop/gpu.md":
                yield Example(name, line, block[2], textwrap.dedent(block[3]))


def of_helps(command: Any, name: str) -> Iterator[Example]:
    """Yield the indented blocks of a command's help and of its subcommands'."""
    for block in re.findall(r"^(?:    .*\n)+", f"{command.help or ''}\n", re.MULTILINE):
        text = textwrap.dedent(block)
        language = "sh" if re.search(r"^(echo .*\| )?coterie ", text) else "yaml"
        yield Example(f"{name} --help", 0, language, text)
    for subcommand, value in getattr(command, "commands", {}).items():
        yield from of_helps(value, f"{name} {subcommand}")


DOCSTRING = Example("coterie.__doc__", 0, "python", (coterie.__doc__ or "").partition("\n")[2])
EXAMPLES = [*of_pages(), *of_helps(COMMANDS, "coterie"), DOCSTRING]


def examples(*languages: str, listed: bool = False) -> pytest.MarkDecorator:
    """Decorate a test, so that it runs on unlisted (or all) examples in some languages."""
    chosen = [e for e in EXAMPLES if e.language in languages and (listed or e.unlisted())]
    names = [f"{example.page}:{example.line}" for example in chosen]
    return pytest.mark.parametrize("example", chosen, ids=names)


def test_every_block_has_a_language() -> None:
    assert not [example for example in EXAMPLES if example.language not in LANGUAGES]
    assert sum("--help" in example.page for example in EXAMPLES) > 10


def test_every_pattern_in_the_list_matches_an_example() -> None:
    lines = {(example.page, line) for example in EXAMPLES for line in example.lines()}
    for pages in LISTED.values():
        for page, patterns in pages.items():
            for pattern in patterns:
                assert any(p == page and fnmatch(line, pattern) for p, line in lines), pattern


@examples(*SHELLS, listed=True)
def test_a_shell_can_read_the_commands_and_coterie_can_parse_its_own(example) -> None:
    code = example.text if example.language == "bash" else "\n".join(example.lines())
    done = subprocess.run(["bash", "-n", "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    for words in example.commands():
        command = COMMANDS
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        if "--plugin" in words:  # is executed by the parser
            del words[(at := words.index("--plugin")) : at + 2]
        command.make_context("", words)
        if "runs/demo" in words:
            clients = yaml.safe_load(DEMO.read_text(encoding="utf-8"))["divide"]["mixtures"]
            assert words[words.index("--client") + 1] in clients


@examples("python", listed=True)
def test_python_is_valid(example) -> None:
    compile(example.text, example.page, "exec")


@examples("json", "toml", "nginx", listed=True)
def test_data_are_valid(example) -> None:
    if example.language == "json":
        assert all(isinstance(json.loads(line), dict) for line in example.text.splitlines())
    elif example.language == "toml":
        assert tomllib.loads(example.text)
    else:
        assert not example.unlisted()


def documents(text: str) -> Iterator[str]:
    """Yield the run files in a block; each begins with the same key as the first."""
    key = text.partition(":")[0]
    yield from re.split(rf"\n(?={key}:)", text)


@examples("yaml")
def test_a_run_file_can_be_resolved(example) -> None:
    load_plugin(ROOT / "examples" / "ranked.py")
    for text in documents(example.text):
        values = read_yaml(text)
        if not {"clients", "divide"} & values.keys():
            values["clients"] = [{"name": name, "path": "x"} for name in ("ben", "poet", "whaler")]
        run = load_with_any_text(values)
        names = tuple(client.name for client in run.clients) or ("one", "two")
        server, public = run.server is not None, run.data.public is not None
        run.method.check(RunFacts(names, public=public, server=server, instructions=public))


@pytest.fixture(scope="module")
def prepared(values, bases, other, tmp_path_factory) -> Path:
    """Return a folder with the run files, texts, bases and finished runs that examples name."""
    folder = tmp_path_factory.mktemp("examples")
    us = values(name="us", clients=[{"name": name, "path": "poet.txt"} for name in CLIENTS])
    for name in ("mine", "run", "us"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**us, "name": name}), "utf-8")
    sources = {"diarist": "diarist.txt", "poet": "poet.txt"}
    news = values(name="news", divide={"source": sources, "by": "label"}, clients=[])
    (folder / "news.yaml").write_text(yaml.safe_dump(news), "utf-8")
    (folder / "texts").mkdir()
    for name in ("anna", "ben"):
        shutil.copy(Path(us["data_root"]) / "poet.txt", folder / "texts" / f"{name}.txt")
    runs = folder / "runs"
    coterie.run({**us, "rounds": 1, "baselines": ["local"]}, out=runs / "us")
    for name in ("demo", "mine", "alice-1"):
        shutil.copytree(runs / "us", runs / name)
    coterie.compare({**us, "rounds": 1}, ["local", "fedavg"], out=runs / "compare-mine")
    record = json.dumps({"instruction": "Good or bad?", "input": "a triumph", "output": "good"})
    (folder / "anna.jsonl").write_text(f"{record}\n" * 20, encoding="utf-8")
    clients = [{"name": name, "path": str(folder / "anna.jsonl")} for name in CLIENTS]
    data = {"window": 48, "instructions": {"template": "plain"}}
    reviews = values(name="reviews", data=data, clients=clients, rounds=1)
    (folder / "reviews.yaml").write_text(yaml.safe_dump(reviews), "utf-8")
    coterie.run(reviews, out=runs / "reviews")
    for link, target in {
        "BETTER": bases / "llama",
        "models/llama-2": other,
        "examples": ROOT / "examples",
    }.items():
        (folder / link).parent.mkdir(exist_ok=True)
        (folder / link).symlink_to(target)
    return folder


@pytest.fixture
def place(prepared, tmp_path, monkeypatch) -> Path:
    """Return a copy of the prepared folder, which becomes the current folder."""
    shutil.copytree(prepared, tmp_path / "place", symlinks=True)
    monkeypatch.chdir(tmp_path / "place")
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "examples")
    return tmp_path / "place"


def shortened(words: list[str]) -> list[str]:
    """Return the arguments of a command with small settings, its files being the prepared ones."""
    text = shlex.join(words)
    if "--field" in words or "evaluation.generate" in text:
        text = re.sub(r"\bmine\b", "reviews", text)
    text = text.replace("generate=40", "generate=4").replace("--seeds 3", "--seeds 1")
    if words[0] in ("run", "compare") and "--resume" not in words:
        text += SHORT
    if words[1] in DEMOS:
        text += FEW
    if words[:2] == ["run", "teach-one-another"]:
        text += " --set data.limits.public=4"
    if words[0] == "run" and "--resume" not in words:
        text += " --force"
    if words[0] in ("generate", "chat", "ask"):
        text += " --tokens 4"
    if words[0] == "ask":
        text = text.replace("runs/helpdesk", "runs/reviews")
    return [name for word in shlex.split(text) for name in (sorted(glob.glob(word)) or [word])]


@pytest.mark.slow
@examples("sh", "console")
def test_commands_can_be_executed(example, place) -> None:
    unlisted = example._replace(language="sh", text="\n".join(example.unlisted()))
    commands = list(unlisted.commands())
    assert len(commands) == len(unlisted.lines()), "list what is no command of coterie"
    if commands[0][0] == "keys" and commands[0][1] != "init":
        commands.insert(0, ["keys", "init"])
    if commands[1:] == [["keys", "renew", "anna"]]:
        commands.insert(1, ["keys", "add", "anna", "--out", "old.key"])
    for words in commands:
        done = CliRunner().invoke(app, shortened(words), input="Name a sea.\n")
        if done.exception is not None:
            raise done.exception
        assert done.exit_code == 0, done.output
        assert done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", dict.fromkeys(e.page for e in EXAMPLES if e.language == "python" and e.unlisted())
)
def test_python_can_be_executed(page, place) -> None:
    names: dict[str, Any] = {
        "small": coterie.load_config(place / "reviews.yaml").as_dict(),
        "config": coterie.load_config(place / "us.yaml"),
        "tokens": torch.arange(6).view(2, 3),
        "logprobs": torch.full((2, 3), 1 / 4).log(),
        "lognorm": torch.zeros(2),
    }
    for example in EXAMPLES:
        if (example.page, example.language) == (page, "python") and example.unlisted():
            shutil.rmtree(place / "runs", ignore_errors=True)
            exec(example.text.replace('"clients": [...]', "**small"), names)
