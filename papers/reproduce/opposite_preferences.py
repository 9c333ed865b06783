"""Write preferences of opposite kinds over Coterie's demo texts: short answers against long ones.

    python -m reproduce.opposite_preferences FOLDER

For each writer there are FOLDER/opposite/NAME-short.jsonl and NAME-long.jsonl with the same prompts
and answers: runs of words from the text, and how they go on, for 3 to 5 words or for 12 to 20. One
file prefers the short answers, the other one the long ones. recipes/small/opposite.yaml reads them.
"""

import json
import random
import sys
from pathlib import Path

from coterie.bases import EMBEDDED

COUNT = 300
"""Records of each file."""


def main(folder: Path) -> None:
    """Write all files."""
    (folder / "opposite").mkdir(parents=True, exist_ok=True)
    for source in sorted((EMBEDDED / "demo-writers").glob("*.txt")):
        draw = random.Random(source.stem)
        words = source.read_text(encoding="utf-8").split()
        records = []
        for _ in range(COUNT):
            start = draw.randrange(len(words) - 40)
            prompt, after = words[start : start + 8], words[start + 8 :]
            short, long = after[: draw.randint(3, 5)], after[: draw.randint(12, 20)]
            records.append([" ".join(part) for part in (prompt, short, long)])
        for kind in ("short", "long"):
            with (folder / f"opposite/{source.stem}-{kind}.jsonl").open(
                "w", encoding="utf-8"
            ) as file:
                for prompt, short, long in records:
                    chosen, rejected = (short, long) if kind == "short" else (long, short)
                    record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
