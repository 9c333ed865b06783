"""The floor of a run on prompts with a few answers, from files to the tables."""

import json
from typing import Any

import pytest

import coterie
from coterie.analysis.significance import COMMONEST

TRAIN = ["red"] * 14 + ["blue"] * 10
TEST = ["blue"] * 5 + ["red"] * 3


@pytest.fixture
def choices(values, tmp_path) -> dict[str, Any]:
    """A run of two clients, of whom the second has the other answer more often."""
    clients = []
    for name, swap in (("ada", {}), ("ben", {"red": "blue", "blue": "red"})):
        client = {"name": name}
        for split, answers in (("train", TRAIN), ("validation", TEST), ("test", TEST)):
            path = tmp_path / f"{name}-{split}.jsonl"
            lines = [
                {"instruction": "Which?", "input": str(n), "output": swap.get(answer, answer)}
                for n, answer in enumerate(answers)
            ]
            path.write_text("\n".join(map(json.dumps, lines)))
            client[split] = str(path)
        clients.append(client)
    data = {"window": 32, "instructions": {"template": "plain"}}
    return values(rounds=1, clients=clients, data=data)


def test_run_and_compare_show_what_the_commonest_answer_scores(choices, tmp_path) -> None:
    naive = TEST.count(max(set(TRAIN), key=TRAIN.count)) / len(TEST)
    assert naive == 0.375
    table = coterie.run(choices, out=tmp_path / "run").table()
    assert table.columns[-1] == COMMONEST
    assert [row[-1] for row in table.rows[:2]] == ["37.50", "37.50"]
    comparison = coterie.compare(choices, ["pretrained", "centralized"], out=tmp_path / "compare")
    last = json.loads((tmp_path / "compare" / "compare.json").read_text())[-1]
    assert last["method"] == COMMONEST
    assert last["clients"] == {"ada": naive, "ben": naive}
    assert comparison.table().rows[-1][:4] == [COMMONEST, "37.50", "37.50", "37.50"]
