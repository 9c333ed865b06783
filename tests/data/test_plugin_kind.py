"""A kind of data in a file of one's own: examples/ranked.py in runs, deployed, killed, resumed."""

import json
import math
import sys
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from questions import records

import coterie
from coterie import CoterieError
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.data.kind import DATA_KINDS
from coterie.data.spec import DataSpec
from coterie.deployment.client import Worker
from coterie.deployment.orders import join_fields
from coterie.evaluation.evaluate import evaluate
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_as_local, assert_same_states, server, site, workers
from coterie.testing.rounds import joined

EXAMPLE = Path(__file__).parents[2] / "examples" / "ranked.py"
NAMES = ("diarist", "poet", "whaler")
ANSWERS = ("yes, always", "maybe", "no", "never")


class Stopped(coterie.Callback):
    """Ends a run after its first round."""

    def on_round_end(self, round: int, scores: str) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def module() -> dict[str, Any]:
    """The names that the example defines."""
    [kind] = load_plugin(EXAMPLE)
    return vars(sys.modules[kind.__module__])


@pytest.fixture(scope="session")
def ranked(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions of three writers and two to four answers to each."""
    folder = tmp_path_factory.mktemp("ranked")
    for name in NAMES:
        lines = (questions / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        asked = [json.loads(line)["instruction"] for line in lines]
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, prompt in enumerate(asked):
                record = {"prompt": prompt, "answers": ANSWERS[: 2 + number % 3]}
                file.write(json.dumps(record) + "\n")
    return folder


@pytest.fixture
def run(values, ranked, module):
    """Make a run of ranked answers; keyword arguments replace keys."""

    def make(**changes: Any) -> coterie.RunConfig:
        whole: dict[str, Any] = {"method": "fedavg", "rounds": 3, "data_root": str(ranked)}
        whole["data"] = {"window": 40, "kind": "rankings"}
        whole["clients"] = [{"name": name, "path": f"{name}.jsonl"} for name in NAMES]
        rates = {"precision": "fp32", "learning_rate": 0.02}
        whole["training"] = {"steps": 4, "batch": 4, **rates}
        return parse(values(**whole | changes))

    return make


def probability(scores: list[float]) -> float:
    """Return the probability of a ranking by Plackett and Luce, eq. 18."""
    product = 1.0
    for k in range(len(scores)):
        product *= math.exp(scores[k]) / sum(math.exp(score) for score in scores[k:])
    return product


def test_the_probabilities_of_all_rankings_sum_to_one(module) -> None:
    scores = [0.3, -1.2, 2.0, 0.0]
    orders = [[scores[n] for n in order] for order in permutations(range(4))]
    probabilities = (-module["plackett_luce"]([torch.tensor(o) for o in orders])).exp()
    assert probabilities.sum().item() == pytest.approx(1)
    assert probabilities.tolist() == pytest.approx([probability(order) for order in orders])


@pytest.mark.parametrize("at_once", [None, 3])
def test_loss_and_scores_are_those_of_answers_read_alone(run, at_once) -> None:
    config = run(data={"window": 40, "kind": {"name": "rankings", "beta": 0.7}})
    part = joined(config).clients.host("poet")
    base = part.base
    split: Any = part.participant.data.validation
    rewards, start = [], iter(split.rows.starts.tolist())
    begin = next(start)
    for item in split.items:
        own = []
        for _ in item.answers:
            end = next(start)
            ids, counted = split.rows.ids[begin:end].long(), split.rows.counted[begin:end]
            with torch.no_grad():
                logprobs = base.model(ids[None, :-1]).logits[0].double().log_softmax(-1)
            tokens = [logprobs[n - 1, ids[n]].item() for n in range(1, len(ids)) if counted[n]]
            own.append(0.7 * sum(tokens) / len(tokens))
            begin = end
        rewards.append(own)
    expected = sum(-math.log(probability(own)) for own in rewards) / len(rewards)
    batch = split.batch(torch.arange(len(split))).by_length()
    assert batch.terms == len(split)
    loss = batch.mean_loss(base.model, base.device, at_once or len(split))
    assert loss == pytest.approx(expected, rel=1e-4)
    pieces = [(piece.terms, piece.loss(base.model)[0]) for piece in batch.split(at_once or 99)]
    loss = sum(terms * loss.item() for terms, loss in pieces) / batch.terms
    assert loss == pytest.approx(expected, rel=1e-4)
    score = evaluate(base, base.model, split, config.data.window, batch=2)
    pairs = [[a > b for a, b in combinations(own, 2)] for own in rewards]
    shares = [sum(own) / len(own) for own in pairs]
    assert score.shares["reward_accuracy"] == pytest.approx(shares)
    assert score.figures["ranking_loss"] == score.learnt == pytest.approx(expected, rel=1e-4)
    assert score.as_dict()["rankings"] == len(split)


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_methods_learn_it_and_are_scored_by_it(method, run, tmp_path) -> None:
    done = coterie.run(run(method=method), out=tmp_path / "run")
    folder = RunFolder(done.path)
    assert done.results[method]["trained"]["poet"]["reward_accuracy"] > 0.75
    losses = [m["value"] for m in folder.metrics() if m["name"].startswith("loss/")]
    assert min(losses) < 0.8 * losses[0]
    assert "reward accuracy (%)" in str(done.table().title)
    assert max(m["value"] for m in folder.metrics() if m["name"] == "kept") > 0
    assert folder.description["config"]["data"]["kind"] == {"name": "rankings", "beta": 2.0}
    assert folder.description["plugins"]["data kind rankings"]["file"] == str(EXAMPLE)


def test_killed_resumed_and_deployed_runs_have_the_same_bits(run, tmp_path) -> None:
    whole = run(deployment={"quorum": 3, "deadline": 60})
    local = RunFolder(coterie.run(whole, out=tmp_path / "local").path)
    with pytest.raises(KeyboardInterrupt):
        coterie.run(whole, out=tmp_path / "half", callbacks=[Stopped()])
    assert_same_states(RunFolder(coterie.resume(tmp_path / "half").path), local)

    def kill(loop: Loop) -> None:
        raise KeyboardInterrupt

    def restart(loop: Loop) -> None:
        loop.reconnect("poet", Worker(site(whole, "poet", tmp_path)))

    clients = workers(whole, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        server(whole, tmp_path / "server", Loop(clients, {3: kill})).rounds()
    server(whole, tmp_path / "server", Loop(clients, {2: restart})).rounds()
    assert_as_local(whole, tmp_path, local)


def test_hash_and_settings_are_what_clients_agree_to(run, monkeypatch, tmp_path) -> None:
    digest = run().digest()
    gentle = run(data={"window": 40, "kind": {"name": "rankings", "beta": 1.0}})
    assert gentle.digest() != digest
    sent: Any = join_fields(run(), "poet", 3, None)
    assert sent["plugins"].keys() == {"data kind rankings"}
    assert sent["config"]["data"]["kind"] == {"name": "rankings", "beta": 2.0}
    changed = tmp_path / "mine.py"
    changed.write_text(EXAMPLE.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    monkeypatch.setattr(DATA_KINDS, "registered", {})
    load_plugin(changed)
    assert run().digest() != digest
    monkeypatch.setattr(DATA_KINDS, "registered", {})
    with pytest.raises(CoterieError, match="no data kind 'rankings'"):
        run()


def test_an_object_is_a_kind_too(run, module, config) -> None:
    assert "kind" not in config().as_dict()["data"]  # a run without a kind describes none
    assert parse(config().as_dict()).digest() == config().digest()
    given = module["Rankings"](beta=2.0)
    assert run(data={"window": 40, "kind": given}).digest() == run().digest()


RANKINGS = {"kind": "rankings"}
NO_PUBLIC = "no method can learn rankings from a public set; remove data.public or data.kind"


REFUSED_RUNS = [
    ({"data": {"kind": "ranking"}}, r"no data kind 'ranking'. Did you mean 'rankings'\?"),
    ({"data": {"kind": "text"}}, "text is a built-in kind; leave data.kind out"),
    ({"data": {"kind": "messages"}}, "messages is a built-in kind; set data.messages instead"),
    ({"data": {"kind": {"name": "rankings", "beat": 1}}}, r"Did you mean 'data\.kind\.beta'"),
    ({"data": {"kind": {"name": "rankings", "beta": -1}}}, r"data\.kind\.beta should be gre"),
    ({"data": {"kind": 5}}, r"data\.kind should be"),
    ({"data": {"kind": {}}}, r"data\.kind\.name is missing"),
    ({"data": RANKINGS | {"messages": True}}, "data.messages and data.kind are mutually"),
    ({"data": RANKINGS | {"public": "x.jsonl"}}, NO_PUBLIC),
    ({"method": "pcl-3"}, r"'pcl-3' cannot train on rankings; remove data\.kind"),
    ({"server": {}}, r"data\.kind` and `server` are mutually exclusive: clients' data can"),
    ({"training": {"dpo": {"beta": 1}}}, "has no effect without data.preferences"),
    ({"evaluation": {"generate": 3}}, "evaluation.generate` needs answers"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED_RUNS)
def test_what_cannot_be_is_refused(changes, sentence, run, tmp_path) -> None:
    with pytest.raises(CoterieError, match=sentence):
        coterie.run(run(**changes), out=tmp_path / "run")


@pytest.mark.parametrize("answers", ["yes", ["yes"], ["yes", " "], ["yes", 3], None])
def test_a_record_that_ranks_nothing_is_refused(answers, module) -> None:
    kind = DataSpec.model_validate({"kind": "rankings"}).bound
    with pytest.raises(CoterieError, match=r"^line 1 of x\.jsonl: field answers"):
        kind.items(records({"prompt": "So?", "answers": answers}))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [({}, "data kind Mine needs a `name`"), ({"name": "text"}, "A data kind named 'text' already")],
)
def test_a_class_that_is_no_proper_kind_is_refused(name, sentence) -> None:
    kind = type("Mine", (coterie.DataKind,), {"summary": "x", **name})
    with pytest.raises(CoterieError, match=sentence):
        coterie.register(kind)


def test_an_example_is_short() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 80
