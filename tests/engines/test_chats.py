"""Runs on conversations: resumed, deployed or in several processes, they end in the same bits."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from looped import StopAfter, result_of

import coterie
from coterie.bases import load_tokenizer
from coterie.cli.use import answer
from coterie.config.run import parse
from coterie.data.chat import OURS
from coterie.data.examples import Examples
from coterie.errors import CoterieError
from coterie.evaluation.generation import Sampling
from coterie.federation.participants import digest_of, gathered, public_digest
from coterie.runs import RunFolder
from coterie.testing.loop import assert_as_local, deploy, folder

NAMES = ("diarist", "poet")
Run = Callable[..., coterie.RunConfig]


@pytest.fixture(scope="module")
def run(values: Callable[..., dict[str, Any]], talks: Path) -> Run:
    def make(data: dict[str, Any] | None = None, **changes: Any) -> coterie.RunConfig:
        chosen = {
            "rounds": 2,
            "data_root": str(talks),
            "data": {"window": 40, "messages": True, "limits": {"validation": 3, "test": 3}}
            | (data or {}),
            "clients": [{"name": name, "path": f"{name}.jsonl"} for name in NAMES],
        }
        return parse(values(**chosen | changes))

    return make


def test_a_run_on_conversations_says_what_it_read(run: Run, tmp_path: Path) -> None:
    done = coterie.run(run(evaluation={"generate": 3, "keep": "best"}), out=tmp_path / "run")
    description = RunFolder(done.path).description
    for name in NAMES:
        client = description["clients"][name]
        assert client["samples"]["test"] == 3
        assert client["cut"]["train"] > 0
        assert client["too_long"].keys() == client["cut"].keys()
        score = done.results["comigs-1g1s"]["trained"][name]
        assert {"exact_match", "rouge_l", "perplexity"} <= score.keys()
        assert "accuracy" not in score
    [(base, template)] = description["chat_templates"].items()
    assert base == description["config"]["base"]
    assert template["name"] == "Coterie's"


@pytest.mark.parametrize("method", ["fedavg", pytest.param("comigs-1g1s", marks=pytest.mark.slow)])
def test_conversations_have_the_same_bits_when_deployed(method, run, tmp_path) -> None:
    """Use a template that is a file that clients do not have."""
    file = tmp_path / "mine.jinja"
    file.write_text(OURS.read_text(encoding="utf-8").replace("Assistant:", "Coterie:"))
    rules = {"evaluation": {"generate": 2}, "deployment": {"share_metrics": True}}
    config = run({"chat_template": str(file)}, method=method, **rules)
    file.unlink()
    local = coterie.run(config, out=tmp_path / "local")
    loop = deploy(config, tmp_path)
    assert_as_local(config, tmp_path, RunFolder(local.path))
    assert any(b"Coterie:" in data for data in loop.seen)
    result = result_of(RunFolder(tmp_path / "server"))
    answers = [
        RunFolder(local.path).description["chat_templates"],
        *(folder(config, tmp_path, name).description["chat_templates"] for name in NAMES),
    ]
    assert [list(client.values()) for client in answers] == [list(answers[0].values())] * 3
    for name in NAMES:
        assert result["trained"][name] == local.results[method]["trained"][name]


def test_a_run_with_changed_conversations_is_not_resumed(run: Run, talks, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(talks, copy)
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run(data_root=str(copy)), out=tmp_path / "changed", callbacks=[StopAfter()])
    file = copy / "poet.jsonl"
    file.write_text(file.read_text(encoding="utf-8").replace("Be brief.", "Be long."))
    with pytest.raises(CoterieError, match=r"^The text of client 'poet' has changed since the run"):
        coterie.resume(tmp_path / "changed")


def test_what_counts_is_in_the_digest(run: Run) -> None:
    config = run()
    [client, _] = gathered(config, load_tokenizer(config.base)).clients
    train = client.data.train
    assert isinstance(train, Examples)
    assert digest_of([train]) == digest_of([replace(train, counted=train.counted.clone())])
    assert digest_of([train]) != digest_of([replace(train, counted=~train.counted)])


def test_prompts_with_answers_through_a_chat_template(values, questions, tmp_path) -> None:
    config = parse(
        values(
            rounds=1,
            data_root=str(questions),
            data={"window": 48, "instructions": {"template": "chat", "choices": ["yes", "no"]}},
            clients=[{"name": name, "path": f"{name}.jsonl"} for name in NAMES],
        )
    )
    done = coterie.run(config, out=tmp_path / "run")
    for name in NAMES:
        assert 0 <= done.results["comigs-1g1s"]["trained"][name]["accuracy"] <= 1
    assert "chat_templates" in RunFolder(done.path).description
    written = answer(done.path, "poet", {"instruction": "sea"}, Sampling(3, 0.0, 1.0, 0))
    model: Any = coterie.load(done.path, "poet")
    words = load_tokenizer(config.base)
    ids: Any = words("<|endoftext|>User: sea\nAssistant:", return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert written == str(words.decode(new, skip_special_tokens=True)).strip()


def test_fedmkt_refuses_conversations(teachers: Run, talks: Path, tmp_path: Path) -> None:
    for data in (
        {"messages": True, "public": "whaler.jsonl"},
        {"instructions": {"template": "chat"}, "public": "whaler.jsonl"},
    ):
        root = talks if "messages" in data else None
        changes = {} if root is None else {"data_root": str(root)}
        refusal = "^The method 'fedmkt' needs pairs of a prompt and an answer that are rendered "
        with pytest.raises(CoterieError, match=refusal):
            coterie.run(teachers(data={"window": 48, **data}, **changes), out=tmp_path / "run")


def test_a_public_set_of_conversations(run: Run, talks: Path, tmp_path: Path) -> None:
    config = run({"public": "whaler.jsonl"}, method="pcl-3", rounds=1)
    done = coterie.run(config, out=tmp_path / "run")
    assert done.results["pcl-3"]["trained"].keys() == set(NAMES)
    digest = public_digest(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copied = elsewhere / "copy.jsonl"
    copied.write_bytes((talks / "whaler.jsonl").read_bytes())
    assert public_digest(run({"public": str(copied)})) == digest
    copied.write_bytes((talks / "poet.jsonl").read_bytes())
    assert public_digest(run({"public": str(copied)})) != digest
