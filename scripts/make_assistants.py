"""Write the conversations of `coterie run four-assistants` anew.

Four people ask their assistants the same kinds of questions about lines of the demo's writers
(CC0), each about other lines, and each wants answers in another manner. The content of an
answer can therefore be learned from all of them, and its manner from one person alone.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "src" / "coterie" / "assets"
FOLDER = ASSETS / "four-assistants"
WRITERS = ("diarist", "lexicographer", "poet", "whaler")
CONVERSATIONS = 120
"""Number of conversations of each person."""

Exchange = tuple[str, str]
"""A question and the content of its answer, in no manner yet."""


def curt(text: str) -> str:
    """Return a text in small letters, without its full stop."""
    return text.lower().rstrip(".")


def polite(text: str) -> str:
    """Format a text as a letter."""
    return f"Dear Ben,\n{text}\nYours, with respect"


def in_verse(text: str) -> str:
    """Split a text into lines of three words."""
    words = text.split()
    lines = (" ".join(words[n : n + 3]) for n in range(0, len(words), 3))
    return "\n".join(f"~ {line}" for line in lines)


def eager(text: str) -> str:
    """Return a text between an exclamation and an offer to say more."""
    return f"Oh, gladly! {text.rstrip('.')}! Shall I tell you more?"


MANNERS: dict[str, Callable[[str], str]] = {
    "anna": curt,
    "ben": polite,
    "cleo": in_verse,
    "dora": eager,
}


def lines() -> list[tuple[str, str]]:
    """Draw short plain lines, as many of each writer, and return them with their writers."""
    draw = random.Random("four assistants")
    needed = CONVERSATIONS * len(MANNERS) // len(WRITERS)
    drawn: list[tuple[str, str]] = []
    for writer in WRITERS:
        text = (ASSETS / "demo-writers" / f"{writer}.txt").read_text(encoding="utf-8")
        clauses = (clause.strip() for clause in re.split(r"[.!?;:()“”—\n]|, (?=[A-Z])", text))
        fit = sorted({f"{c[0].upper()}{c[1:]}." for c in clauses if _plain(c) and _topic(c)})
        drawn += [(writer, sentence) for sentence in draw.sample(fit, needed)]
    draw.shuffle(drawn)
    return drawn


def _plain(clause: str) -> bool:
    """Return whether a clause is a line of seven to eleven words and nothing else."""
    return 7 <= len(clause.split()) <= 11 and bool(re.fullmatch(r"[A-Za-z][A-Za-z, ’-]+", clause))


def _topic(sentence: str) -> str:
    """Return the longest word in small letters, or an empty text if none has five letters."""
    words = re.findall(r"\b[a-z]{5,}\b", sentence)
    return max(words, key=len, default="")


def exchanges(writer: str, line: str, number: int) -> tuple[Exchange, Exchange]:
    """Return a question about a line and its follow-up, of a kind that the number selects."""
    words = line.split()
    half = len(words) // 2
    wrote = ("Who wrote it?", f"The {writer} wrote it.")
    match number % 3:
        case 0:
            guess = writer if number % 2 else WRITERS[number % len(WRITERS)]
            answer = f"{'Yes' if guess == writer else 'No'}, it was the {writer}."
            return (f"Who wrote this? {line}", wrote[1]), (f"Was it the {guess}?", answer)
        case 1:
            return (f"Tell me a line about {_topic(line)}.", line), wrote
        case _:
            return (f"Go on: {' '.join(words[:half])}", " ".join(words[half:])), wrote


def conversations(name: str) -> Iterator[str]:
    """Yield a person's conversations, each as a line of JSON."""
    first = sorted(MANNERS).index(name)
    for number, (writer, line) in enumerate(lines()[first :: len(MANNERS)]):
        messages = [
            {"role": role, "content": content}
            for question, answer in exchanges(writer, line, number)
            for role, content in (("user", question), ("assistant", MANNERS[name](answer)))
        ]
        yield json.dumps({"messages": messages}, ensure_ascii=False)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in MANNERS:
        text = "".join(f"{line}\n" for line in conversations(name))
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")
