"""The command line, as a stranger uses it."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import typer
import yaml

import coterie.cli
from coterie.cli import terminal
from coterie.engines.rounds import Rounds
from coterie.engines.session import Session
from coterie.runs import RunFolder

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


@pytest.fixture
def run_file(values, tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values(rounds=1)))
    return path


HELP = [
    ([], ["run", "compare", "report", "methods", "audit", "generate"]),
    (["run"], ["method: auto", "docs/use/run-file-keys.md", "coterie methods", "--resume"]),
    (["compare"], ["--methods", "--seeds", "saved and reused"]),
    (["methods"], ["whose settings are listed"]),
    (["audit"], ["a client sends and receives"]),
    (["generate"], ["--client", "--prompt", "I sing of"]),
    (["report"], ["--texts", "--out", "--layer"]),
    (["align"], ["nearest token", "tokenizer.model", "--worst", "--no-cache", "tiny-gpt2"]),
]


@pytest.mark.parametrize(("arguments", "words"), HELP)
def test_help_teaches_within_80_columns(arguments, words, succeeds) -> None:
    out = succeeds(*arguments, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert all(word in out for word in words)


def test_a_run_shows_its_table_and_what_to_do_next(run_file, tmp_path, coterie_command) -> None:
    result = coterie_command("run", run_file, "--out", tmp_path / "out", "--set", "rounds=2")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "comigs-1g1s: experts inside GPT2MLP (c_fc, c_proj) in all 2 layers"
    assert lines[2] == "comigs-1g1s: 2 rounds, 3 clients"
    assert lines[3].startswith("comigs-1g1s: round 1/2  loss ")
    assert "test perplexity" in lines[4]
    assert lines[-1] == f'  coterie generate {tmp_path / "out"} --client diarist --prompt "..."'
    scores = RunFolder(tmp_path / "out").result
    assert scores is not None
    poet = next(line for line in lines if line.startswith("poet"))
    assert poet.split()[1] == f"{scores['trained']['poet']['perplexity']:.2f}"


def test_a_run_says_who_learned_with_whom(values, tmp_path, coterie_command) -> None:
    method = {"name": "pcl-uniform", "warmup": 1, "every": 1}
    run = values(method=method, rounds=2, baselines=["local"], evaluation={"keep": "last"})
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(run))
    result = coterie_command("run", tmp_path / "small.yaml", "--out", tmp_path / "out")
    gain = r"test perplexity \d+\.\d % (lower|higher) than alone\npoet learns with diarist "
    others = r"\ndiarist learns with poet \(0\.33\) and whaler \(0\.33\); "
    assert re.search(others + gain, result.out), result.out


def test_a_finished_run_shows_its_table_again(finished, succeeds, monkeypatch) -> None:
    monkeypatch.setattr(Rounds, "run", None)  # nothing is run
    out = succeeds("run", "--resume", finished)
    assert out.splitlines()[2].split() == ["client", "pretrained", "local", "comigs-1g1s"]


def test_methods_are_listed_and_explained(coterie_command) -> None:
    result = coterie_command("methods")
    assert re.search(r"comigs-1g1s +arXiv 2409\.13931", result.out)
    assert "centralized" in result.out
    result = coterie_command("methods", "comigs-2g")
    assert max(map(len, result.out.splitlines())) <= 80
    assert "{name: comigs-2g, mlp: {rank: 8}}" in result.out
    assert "experts averaged over clients" in " ".join(result.out.split())


def test_an_audit_names_what_travels(run_file, succeeds) -> None:
    out = succeeds("audit", run_file)
    assert max(map(len, out.splitlines())) <= 80
    assert "generalist 1, mlp.up" in " ".join(out.split())
    assert "per public sample" not in out
    computed = out.index("peak memory of one client's process")
    assert computed < out.index("the only fields that messages may contain")


def test_compare_keeps_what_is_there(run_file, tmp_path, coterie_command) -> None:
    out = tmp_path / "out"
    first = coterie_command("compare", run_file, "--out", out, "--methods", "pretrained")
    second = coterie_command("compare", run_file, "--out", out, "--methods", "pretrained, local")
    assert (first.code, second.code) == (0, 0)
    lines = [line for line in second.out.splitlines() if line]
    assert lines[0] == "Run 1 of 2: pretrained-seed0 (already finished)"
    assert lines[1] == "Run 2 of 2: local-seed0"
    assert "local: 1 round, 3 clients" in second.out
    rows = [line.split()[0] for line in lines]
    note = rows.index("Column")
    assert rows[note - 2 : note] == ["pretrained", "local"]
    words = ("compare", run_file, "--methods", "pretrained,local", "--out", out, "--against")
    assert coterie_command(*words, "pretrained").code == 0
    page = (out / "compare.md").read_text()
    assert "| method | difference from pretrained | 95 % interval | p |" in page
    assert "no significant difference from pretrained" in page
    assert "no row 'fedavg' to compare with" in coterie_command(*words, "fedavg").err


def test_writing_with_a_clients_model(finished, coterie_command) -> None:
    ask = ["generate", finished, "--client", "poet", "--prompt", "I sing of", "--tokens", 5]
    first, same, other = (coterie_command(*ask, "--seed", seed) for seed in (0, 0, 1))
    assert first.out.startswith("I sing of")
    assert first.out == same.out != other.out
    for extreme in (["--top-p", 0], ["--top-p", 1], ["--temperature", 0]):
        assert coterie_command(*ask, *extreme).code == 0
    assert coterie_command(*ask[:4], "--prompt", "", "--tokens", 5).code == 0


def test_writing_with_an_unfinished_run_says_so(finished, tmp_path, coterie_command) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    ask = ["generate", run, "--client", "poet", "--prompt", "I sing of", "--tokens", 5]
    assert coterie_command(*ask).err == ""
    (run / "result.json").unlink()
    result = coterie_command(*ask)
    assert result.code == 0
    warning = f"The run in {run} is not finished, and its models may still improve; finish it with"
    assert result.err == f"{warning} `coterie run --resume {run}`.\n"
    shutil.rmtree(run / "checkpoints")
    result = coterie_command(*ask)
    assert result.code == 2
    assert f"The run in {run} is not finished and has no model yet; finish it" in result.err


def test_a_clients_model_answers_the_template(instructed, coterie_command) -> None:
    write = ["generate", instructed, "--client", "anna", "--tokens", 4]
    fields = ["--field", "who=ann=a", "--field", "what=rain"]
    result, again = (coterie_command(*write, *fields, "--seed", seed) for seed in (0, 1))
    model, words = coterie.load(instructed, "anna"), cast(Any, coterie.tokenizer(instructed))
    ids = words("Does ann=a like rain?", add_special_tokens=False)["input_ids"]
    ids = [words.bos_token_id or words.eos_token_id, *ids]
    before = len(ids)
    for _ in range(4):  # the likeliest token each time
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert words.eos_token_id not in ids[before:]
    assert result.out == again.out == words.decode(ids[before:]).strip() + "\n"
    assert coterie_command(*write, *fields, "--temperature", 2).code == 0
    whole = coterie_command(*write, "--prompt", "Does it", "--temperature", 0)
    assert whole.out.startswith("Does it")


def test_a_full_disk_names_the_file(run_file, tmp_path, coterie_command, monkeypatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    result = coterie_command("run", run_file, "--out", tmp_path / "out")
    assert result.code == 2
    assert result.err.endswith(f"Could not write {tmp_path / 'out'}: No space left on device.\n")
    monkeypatch.undo()
    coterie.resume(tmp_path / "out")


def test_ctrl_c_says_how_to_go_on(run_file, tmp_path, coterie_command, monkeypatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    # `run` is interrupted before there is a folder, so there is nothing to resume.
    for command, owner, name in (("compare", Rounds, "run"), ("run", Session, "check")):
        monkeypatch.setattr(owner, name, interrupted)
        result = coterie_command(command, run_file, "--out", tmp_path / command)
        assert result.code == 130
        assert "resume with the same command" in result.err


def start(*arguments: object) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "coterie", *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def test_two_processes_on_one_folder_and_a_real_ctrl_c(run_file, tmp_path, coterie_command) -> None:
    out = tmp_path / "out"
    working = start("run", run_file, "--out", out, "--set", "rounds=100000")
    try:
        while not RunFolder(out).turns():
            assert working.poll() is None
            time.sleep(0.05)
        for arguments in (["--resume", out], [run_file, "--out", out, "--force"]):
            result = coterie_command("run", *arguments)
            error = f"Error: Another process is using {out}; wait for it, or stop it.\n"
            assert (result.code, result.err) == (2, error)
        working.send_signal(signal.SIGINT)
        _, err = working.communicate(timeout=60)
    finally:
        working.kill()
    assert working.returncode == 130
    resume = f"resume with `coterie run --resume {out}`."
    assert err.splitlines() == [f"Stopped. Finished rounds are saved; {resume}"]
    assert RunFolder(out).turns() > 0


def test_too_little_gpu_memory_is_a_sentence(run_file, coterie_command, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("coterie.api.run", fail)
    result = coterie_command("run", run_file)
    assert result.code == 2
    assert "out of memory" in result.err


PLUGIN = {"plugins": {"mine": {"file": "/a/mine.py", "sha256": "0"}}}
HINTS = [
    ({}, "`coterie run --resume {folder}`"),  # a run of an earlier version
    ({"plugins": {}}, "`coterie run --resume {folder}`"),
    (PLUGIN, "`coterie run --resume {folder} --plugin /a/mine.py`"),
]


@pytest.mark.parametrize(("recorded", "hint"), HINTS)
def test_ctrl_c_names_the_plugins_of_the_run(recorded, hint, tmp_path, monkeypatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(terminal, "complain", errors.append)
    (tmp_path / "run.json").write_text(json.dumps(recorded), encoding="utf-8")
    with pytest.raises(typer.Exit), terminal.stoppable(tmp_path):
        raise KeyboardInterrupt
    assert errors[0].endswith(f"resume with {hint.format(folder=tmp_path)}.")
