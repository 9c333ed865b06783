"""Measure which prompts the gates of the demo `assistants` accept.

    python benchmarks/gate.py

The prompts in gate-prompts.yaml were written for this benchmark and are in no run: messages of
residents, for a person's model to answer, and four kinds of general requests, for the base to
answer. Passages of 80 words from books are further prompts for the base. AUC, the area under the
ROC curve, is the fraction of pairs (a resident's message, another prompt) in which the message has
the higher score. Tune changes to the gate here, and not on the demo's test messages.
"""

from pathlib import Path
from statistics import fmean

import torch
import yaml
from forgetting import ASSISTANTS, PEOPLE, run_values
from rich.console import Console

from coterie.analysis.tables import Table
from coterie.bases import load_base
from coterie.config.run import parse
from coterie.data.chat import chat_template
from coterie.evaluation.gate import prompt_states
from coterie.federation.participants import gathered
from coterie.inference.general import with_general
from coterie.inference.questions import encoded, in_form

PROMPTS = Path(__file__).parent / "gate-prompts.yaml"
BOOKS = ASSISTANTS.parent / "demo-writers"
STARTS = range(0, 10_000, 1000)
"""The first words of the passages in each book."""


def main() -> None:
    config = parse(run_values("local", 0))
    base = load_base(config.base, config.training.precision, config.data.window)
    template = chat_template(base.tokenizer, config.data.chat_template)
    kinds = yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))
    books = [book.read_text(encoding="utf-8").split() for book in BOOKS.glob("*.txt")]
    kinds["passages"] = [" ".join(words[s : s + 80]) for words in books for s in STARTS]
    states = {
        kind: prompt_states(
            base, encoded(base, in_form(config.data, template, texts), template).prompts(base)
        )
        for kind, texts in kinds.items()
    }
    people = {person.name: person for person in gathered(config, base.tokenizer).clients}
    rows: list[list[str]] = []
    for name in PEOPLE:
        gate = with_general(config, base, people[name]).gate
        if gate is None:
            rows.append([name, *["no gate"] * len(kinds), ""])
            continue
        scores = {kind: each @ gate.weights for kind, each in states.items()}
        own, *others = scores.values()
        auc = (own[:, None] > torch.cat(others)).double().mean()
        shares = [fmean((each >= gate.threshold).double().tolist()) for each in scores.values()]
        rows.append([name, *(f"{100 * share:.0f}" for share in shares), f"{auc:.3f}"])
    Console(width=120).print(Table("Accepted prompts (%)", ["", *kinds, "AUC"], rows))


if __name__ == "__main__":
    main()
