"""Write the largest training tasks of Natural Instructions as one file, for FedAMoLE's tables.

    python -m reproduce.largest_tasks NATURAL_INSTRUCTIONS_FOLDER natural-instructions.jsonl

The folder is a copy of github.com/allenai/natural-instructions, version 2.8, with tasks/ and
splits/. Of the tasks in splits/default/train_tasks.txt, those with the most instances are written,
as FedAMoLE chooses them; of equals, the first in the list. A record has `task`, its `rank` (1 is
the largest), `instruction`, `input` and `output` (the first of the instance's). With
`divide: {by: label, label: task, where: rank <= 10}`, each of ten clients has a task.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def largest(folder: Path, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and contents of the largest tasks, the largest first."""
    names = (folder / "splits" / "default" / "train_tasks.txt").read_text("utf-8").split()
    sizes = {name: len(read(folder, name)["Instances"]) for name in names}
    chosen = sorted(sizes, key=sizes.__getitem__, reverse=True)[:count]
    return [(name, read(folder, name)) for name in chosen]


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read the file of a task."""
    return json.loads((folder / "tasks" / f"{name}.json").read_text("utf-8"))


def main(
    folder: Annotated[Path, typer.Argument(help="Copy of natural-instructions.")],
    out: Annotated[Path, typer.Argument(help="File to write, JSON lines.")],
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 50,
) -> None:
    """Write the largest training tasks of Natural Instructions as one file."""
    with out.open("w", encoding="utf-8") as file:
        for rank, (name, task) in enumerate(largest(folder, tasks), 1):
            instruction = " ".join(task["Definition"])
            for instance in task["Instances"]:
                record = {
                    "task": name,
                    "rank": rank,
                    "instruction": instruction,
                    "input": instance["input"],
                    "output": instance["output"][0],
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
