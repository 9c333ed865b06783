"""The command that picks Natural Instructions' largest tasks, on tasks made up here."""

import json
from pathlib import Path

from reproduce.largest_tasks import main


def test_the_largest_training_tasks_are_written_in_order(tmp_path: Path) -> None:
    sizes = {"task1_a": 2, "task2_b": 3, "task3_c": 3, "task4_test": 9}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "splits" / "default").mkdir(parents=True)
    for name, size in sizes.items():
        instances = [{"input": f"{name} {n}", "output": ["yes", "no"]} for n in range(size)]
        task = {"Definition": ["Answer", name], "Instances": instances}
        (tmp_path / "tasks" / f"{name}.json").write_text(json.dumps(task))
    trained = [name for name in sizes if name != "task4_test"]
    (tmp_path / "splits" / "default" / "train_tasks.txt").write_text("\n".join(trained) + "\n")
    out = tmp_path / "out.jsonl"
    main(tmp_path, out, 2)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["task"], r["rank"]) for r in records] == [("task2_b", 1)] * 3 + [("task3_c", 2)] * 3
    assert records[0] == {
        "task": "task2_b", "rank": 1, "instruction": "Answer task2_b", "input": "task2_b 0",
        "output": "yes",
    }  # fmt: skip
