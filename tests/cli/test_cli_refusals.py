"""Commands that are refused: one sentence for what is wrong, and nothing is written."""

import shlex
import shutil
from pathlib import Path
from string import Template

import pytest
import yaml

import coterie.cli
from coterie.runs import RunFolder

WRONG_RUNS = [
    ("run $run --set method.router.top_k=5", "top_k is 5, but must be between 1 and 2"),
    ("run $run --set 'method.mlp.specialists={peot: 2, others: 1}'", "'peot', which is not a"),
    ("run $run --set data.window=65", "window is 65 tokens, but the base"),
    ("run $run --set base=./gone", "set `base` to a GGUF file or to a folder with config.json"),
    ("run $run --set 'clients=[{name: a, path: $texts/short.txt}]'", "needs at least 17"),
]
READ = "generate $finished --prompt I"
ANSWER = "generate $instructed --client anna"
BOTH = f"{ANSWER} --field who=anna --field what=rain"
ASK = "ask $chatted --questions $texts"
REFUSED = [
    *((f"{command} --out $out", sentence) for command, sentence in WRONG_RUNS),
    (f"{READ} --client zed", "has no client 'zed' (clients: diarist, poet, whaler)."),
    (f"{READ} --client poet --tokens 70", "exceed the base's context of 64"),
    (READ, "is a run; name the client"),
    ("generate $texts --client poet --prompt I", "is not a run folder"),
    ("run --resume $texts", "is not a run folder"),
    ("run --resume $out", "There is no folder"),
    ("run $run --out $finished", "--resume"),
    ("run $run --resume $finished", "--resume uses the saved configuration"),
    ("run $run --out $texts --force", "is not a run folder"),
    ("run $texts", "`coterie init $texts`"),
    ("compare $run --methods local,fedavgg", "Did you mean 'fedavg'?"),
    ("compare $run --methods ,", "Name at least one method"),
    ("base nosuch", "'nosuch' could not be loaded"),
    ("base nosuch.yaml", "There is no run file nosuch.yaml"),
    (ANSWER, "either --prompt, or --field"),
    (f"{BOTH} --prompt I", "either --prompt, or --field"),
    (f"{ANSWER} --field who=anna", "The prompt has no field what"),
    (f"{ANSWER} --field who", "--field who is invalid; give NAME=TEXT, and each name only once"),
    (f"{ANSWER} --field =x", "--field =x is invalid; give NAME=TEXT"),
    (f"{BOTH} --field who=ben", "--field who=ben is invalid"),
    (f"{BOTH} --tokens 60", "smaller --tokens"),
    ("generate $finished --client poet --field a=b", "did not train on instructions"),
    ("ask $chatted", "There is no question"),
    ("ask $chatted Sea? ' '", "Question 2: the question is empty"),
    ("ask $chatted Sea? --client zed", "has no client 'zed' (clients: anna, ben, everyone)."),
    (f"{ASK}/none.jsonl", "--questions: there is no file"),
    (f"{ASK}/short.txt", "is not valid JSON"),
    (f"{ASK}/other.jsonl", "has no field question; its fields are: text"),
    (f"{ASK}/empty.jsonl", "line 2 of"),
    (f"{ASK}/number.jsonl", "field question contains int, not text"),
    ("ask $finished Sea?", "did not train on conversations or instructions"),
    ("ask $stopped Sea?", "is not finished; finish it with"),
    ("ask $instructed Sea", "Question 1 has no field who"),
    ("chat $texts --client poet", "is not a run folder"),
    ("chat $out --client poet", "is no folder"),
]
FILES = {
    "short.txt": b"a few words",
    "other.jsonl": b'{"text": "Sea?"}\n',
    "empty.jsonl": b'{"question": "Sea?"}\n{"question": " "}\n',
    "number.jsonl": b'{"question": 3}\n',
}


@pytest.fixture(scope="module")
def places(values, finished, chatted, instructed, tmp_path_factory) -> dict[str, Path]:
    """The files and folders that commands name, of which `out` does not exist."""
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "small.yaml").write_text(yaml.safe_dump(values(rounds=1)))
    (folder / "texts").mkdir()
    for name, content in FILES.items():
        (folder / "texts" / name).write_bytes(content)
    shutil.copytree(chatted, folder / "stopped")
    (folder / "stopped" / "result.json").unlink()
    runs = {"finished": finished, "chatted": chatted, "instructed": instructed}
    own = {name: folder / name for name in ("texts", "stopped", "out")}
    return {"run": folder / "small.yaml", **own, **runs}


@pytest.mark.parametrize(("command", "sentence"), REFUSED)
def test_what_is_wrong_is_a_sentence_and_leaves_nothing(command, sentence, places, refuses) -> None:
    words = [Template(word).substitute(places) for word in shlex.split(command)]
    refuses(Template(sentence).substitute(places), *words)
    assert not places["out"].exists()
    assert not Path("nosuch").exists()
    assert {path.name for path in places["texts"].iterdir()} == FILES.keys()
    assert RunFolder(places["finished"]).result is not None


@pytest.mark.parametrize("words", ["rn", "comparee", "keys ad", "flower int"])
def test_a_misspelt_command_has_one_suggestion(words, coterie_command) -> None:
    result = coterie_command(*words.split())
    assert result.code == 2
    assert result.err.count("Did you mean") == 1


def test_a_traceback_is_shown_when_asked_for_only(coterie_command) -> None:
    with pytest.raises(coterie.CoterieError):
        coterie_command("run", "gone.yaml", "--debug")
