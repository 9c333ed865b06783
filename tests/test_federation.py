"""Participants of a run: their data, their test texts, and their records."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from public_text import public_text

import coterie
from coterie.bases import load_base, load_tokenizer
from coterie.config.run import RunConfig
from coterie.data.examples import Examples
from coterie.data.kinds.text import Tokens
from coterie.engines.session import Session
from coterie.federation.participants import EVERYONE, Participant, client_context, gathered
from coterie.methods.contract import RunFacts
from coterie.methods.pretrained import Pretrained

Config = Callable[..., RunConfig]


def participants(run: RunConfig) -> dict[str, Participant]:
    return {p.name: p for p in gathered(run, load_tokenizer("tiny-gpt2")).clients}


def with_public(run: RunConfig, name: str) -> RunConfig:
    return run.model_copy(update={"data": run.data.model_copy(update={"public": name})})


@pytest.mark.slow
def test_every_client_is_given_the_one_public_text(config: Config) -> None:
    run = with_public(config(), "whaler.txt")
    wanted = public_text(run.data, run.root, load_tokenizer("tiny-gpt2"))
    base = load_base(run.base, "fp32", run.data.window, run.root)
    everyone = participants(run)
    first = everyone["diarist"].public
    for participant in everyone.values():
        context = client_context(run, base, participant, lambda *_: None)
        assert context.public is first  # tokenised once
    assert torch.equal(first.ids, wanted.ids)
    together = participants(run.model_copy(update={"pooled": True}))[EVERYONE].public
    assert torch.equal(together.ids, wanted.ids)
    assert participants(config())["poet"].public is None


def test_a_changed_public_text_is_noticed(config: Config) -> None:
    def digests(run: RunConfig) -> set[str]:
        return {p.digest() for p in participants(run).values()}

    runs = [config(), *(with_public(config(), name) for name in ("poet.txt", "whaler.txt"))]
    assert len(set[str]().union(*map(digests, runs))) == 9


@pytest.mark.slow
def test_models_are_scored_on_the_split_that_is_named(config: Config) -> None:
    for split in ("test", "validation"):
        run = config(evaluation={"split": split})
        for name, participant in participants(run).items():
            assert participant.tests == {name: getattr(participant.data, split)}
        together = participants(run.model_copy(update={"pooled": True}))[EVERYONE]
        for name, participant in participants(run).items():
            assert torch.equal(together.tests[name].ids, participant.tests[name].ids)


def test_tokens_and_labels_are_recorded(config: Config, texts: Path) -> None:
    run = config(
        clients=(),
        divide={
            "by": "mixtures",
            "source": {"verse": "poet.txt", "prose": "whaler.txt"},
            "mixtures": {"anna": {"verse": 0.75, "prose": 0.25}, "ben": {"prose": 1}},
        },
    )
    everyone = participants(run)
    assert list(everyone) == ["anna", "ben"]
    assert everyone["ben"].labels is not None
    assert everyone["ben"].labels.keys() == {"prose"}
    for participant in everyone.values():
        sizes = {split: len(tokens.ids) for split, tokens in vars(participant.data).items()}
        described = {"data": participant.digest(), "tokens": sizes, "labels": participant.labels}
        assert participant.described() == described
    assert "labels" not in participants(config())["poet"].described()


def asking(config: Config, folder: Path, **changes: Any) -> RunConfig:
    """Return a run whose three clients are asked for the writers of pieces of text."""
    writers = {name: f"{name}.txt" for name in ("diarist", "poet", "whaler")}
    template = "{{ text | truncate(60, True, '') }}\nWho wrote this?"
    return config(
        clients=(),
        data={"window": 60, "instructions": {"template": template, "answer": "label"}},
        divide={"by": "label", "source": writers, "piece": 200, **changes},
    )


def test_instructions_are_recorded_in_samples(config: Config, texts: Path) -> None:
    run = asking(config, texts)
    everyone = participants(run)
    assert list(everyone) == ["diarist", "poet", "whaler"]
    for name, participant in everyone.items():
        splits = dict(vars(participant.data))
        assert all(isinstance(s, Examples) for s in splits.values())
        assert participant.described() == {
            "data": participant.digest(),
            "tokens": {split: len(s.ids) for split, s in splits.items()},
            "samples": {split: len(s) for split, s in splits.items()},
            "too_long": {split: s.too_long for split, s in splits.items()},
            "labels": {name: len(splits["train"]) + splits["train"].too_long},
        }
    together = participants(run.model_copy(update={"pooled": True}))[EVERYONE]
    assert together.described()["samples"]["train"] == sum(
        p.described()["samples"]["train"] for p in everyone.values()
    )


def test_the_digest_notices_where_samples_and_answers_begin(config: Config, texts: Path) -> None:
    participant = participants(asking(config, texts))["poet"]
    train = participant.data.train
    assert isinstance(train, Examples)
    seen = {participant.digest()}
    for part in ("ids", "tokens", "last"):
        changed = getattr(train, part).clone()
        changed[1] += 1
        data = replace(participant.data, train=replace(train, **{part: changed}))
        seen.add(replace(participant, data=data).digest())
    assert len(seen) == 4


def test_the_same_samples_whatever_the_method(config: Config, texts: Path) -> None:
    run = asking(config, texts, by="dirichlet", clients=3, alpha=1.0, balanced=True)
    runs = [run.with_method(name) for name in ("comigs-1g1s", "fedavg", "local")]
    assert len({tuple(p.digest() for p in participants(each).values()) for each in runs}) == 1


def test_a_run_whose_folder_records_only_hashes_is_resumed(config: Config, tmp_path: Path) -> None:
    coterie.run(config(method={"name": "pretrained"}, rounds=1), out=tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    description: dict[str, Any] = json.loads(path.read_text())
    described = description["clients"]
    description["clients"] = {name: {"data": c["data"]} for name, c in described.items()}
    path.write_text(json.dumps(description))
    (tmp_path / "run" / "result.json").unlink()
    assert coterie.resume(tmp_path / "run").results["pretrained"]["trained"]


def test_methods_are_told_whether_there_is_a_public_text(config: Config) -> None:
    seen: list[RunFacts] = []

    class Curious(Pretrained):
        name = "curious"

        def check(self, run: RunFacts) -> None:
            seen.append(run)

    run = config().model_copy(update={"method": Curious()})
    for public in (run, with_public(run, "poet.txt")):
        Session(public).check(public)
    assert [run.public for run in seen] == [False, True]
    assert {run.clients for run in seen} == {("diarist", "poet", "whaler")}


def test_a_public_mix_is_everybodys_and_the_servers_score_needs_a_text(config: Config) -> None:
    source = {name: f"{name}.txt" for name in ("diarist", "poet", "whaler")}
    divide = {"source": source, "by": "label", "piece": 500, "public": 0.2}
    words = load_tokenizer("tiny-gpt2")
    run = config(clients=[], divide=divide, server={}, method="fedmkt")
    parties = gathered(run, words)
    assert parties.server.tests == {}
    assert {id(p.public) for p in parties.clients} == {id(parties.server.data.train)}
    assert isinstance(parties.server.data.train, Tokens)
    tokens = sum(len(words(text)["input_ids"]) for text in texts_of(run))
    share = len(parties.server.data.train.ids) / tokens
    assert share == pytest.approx(0.2, abs=0.03)
    scored = gathered(config(**{**run.as_dict(), "server": {"test": "poet.txt"}}), words)
    assert scored.server.tests.keys() == {"server"}


def texts_of(run: RunConfig) -> list[str]:
    files = [run.root / f"{name}.txt" for name in ("diarist", "poet", "whaler")]
    return [file.read_text(encoding="utf-8") for file in files]
