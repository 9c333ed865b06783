"""Train assistants with and without gate or replay, and measure what they learn and forget.

    python benchmarks/forgetting.py NAME[:KEY=VALUE,...] ... --out DIR --seeds 0 1 2 [--final]
    python benchmarks/forgetting.py --out DIR [--final] --table

With --table, the scores in DIR are shown: means over people and seeds, and the mean difference from
the same method without gate and replay, with a 95 % interval (Student's t over seeds).

Otherwise, each NAME is a method, trained as in the run file `assistants` with the changes that
follow it, such as `comigs-1g1s:training.replay.samples=4`. These changes are no keys of a run file:
  x.loss=reverse       KL(model || base) in place of KL(base || model); with `answers`, the
                       cross-entropy of the base's answers
  x.roles=generalist   only parameters of this role learn from replay
  x.step=own           replay takes its own optimiser steps, after those on private text
  x.null=1             the second generalist stays zero, so that tokens can be routed to the base
  x.scale=0.6          the trained adapter is multiplied by this factor before it is scored
  x.gate=off           the trained model answers all prompts

Without --final, the models are scored as during development, on validation messages and on the
questions in general-questions.yaml. With --final, they are scored on the test messages of all four
people, and on the questions that ship with Coterie.

Scores of a model:
  said       fraction of general questions that a free reply answers correctly
  intrusion  fraction of these replies that name a team of the house
  chosen     fraction of general questions whose right answer is likelier than three others
  drift      KL(base || model) on held-out general requests, in nats per token
  english    perplexity of plain English text (--english FILE); the gate reads it as requests
  right      fraction of replies with the right team in the person's manner; also `team`, `manner`
  replies    perplexity of the person's own replies
  accepted   fraction of messages that the gate accepts
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from rich.console import Console
from scipy import stats
from torch import Tensor

import coterie
from coterie.adapters import Adapter, Selects, attached, detached
from coterie.adapters.lora import LoraPair
from coterie.analysis.tables import Table
from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig
from coterie.config.values import apply_setting
from coterie.data.chat import chat_template
from coterie.evaluation.evaluate import ModelScorer
from coterie.evaluation.gate import Gate, gated_answers
from coterie.federation.participants import gathered
from coterie.inference.general import gated_drift, with_general
from coterie.inference.models import RunModels
from coterie.inference.questions import (
    SHIPPED,
    in_form,
    knowledge,
    questions,
)
from coterie.inference.questions import encoded as encoded_items
from coterie.losses.head import divergence
from coterie.losses.tokens import Batch, hidden_states, language_model_loss, token_losses
from coterie.training.general import GeneralSamples
from coterie.training.update import Updater

HERE = Path(__file__).parent
ASSISTANTS = HERE.parent / "src" / "coterie" / "assets" / "assistants.yaml"
PEOPLE = ("ada", "ben", "cleo", "dan")
[RIGHT_REPLY] = load_plugin(HERE.parent / "examples" / "lindenhof.py")
lindenhof: Any = sys.modules[RIGHT_REPLY.__module__]


def messages(split: str) -> list[tuple[str, str]]:
    """Return the messages of all four people in a split, each with its topic."""
    texts = [(ASSISTANTS.parent / "assistants" / p / f"{split}.jsonl").read_text() for p in PEOPLE]
    records = [json.loads(line) for text in texts for line in text.splitlines()]
    return [(record["messages"][0]["content"], record["topic"]) for record in records]


def total_nats(base: Base, model: Any, rows: Batch) -> float:
    with autocast(base.precision, base.device.type):
        losses = torch.cat([token_losses(model, *part).sum(1) for part in rows.split(16)])
    return float(losses.double().sum())


class Scorer:
    """Scores models of the demo on private and general text."""

    def __init__(self, config: RunConfig, base: Base, final: bool, english: Path | None) -> None:
        self.config, self.base = config, base
        self.template = chat_template(base.tokenizer, config.data.chat_template)
        asked = questions(SHIPPED if final else HERE / "general-questions.yaml")
        self.questions = [q for q in asked if q.is_free or final]
        self.split = "test" if final else "validation"
        self.messages = messages(self.split)
        items = in_form(config.data, self.template, [text for text, _ in self.messages])
        self.prompts = encoded_items(base, items, self.template)
        federation = gathered(config, base.tokenizer)
        self.people = {person.name: person for person in federation.clients}
        training = config.training.model_copy(update={"gate": True, "replay": False})
        measured = config.model_copy(update={"training": training})
        made = {n: with_general(measured, base, person) for n, person in self.people.items()}
        self.gates = {name: person.gate for name, person in made.items()}
        held_out = made[PEOPLE[0]].held_out
        assert held_out is not None, "drift is measured"
        self.held_out = held_out
        self.scored: dict[tuple[str, str], tuple[list[str], dict[str, Any]]] = {}
        self.english = None
        if english is not None:
            ids = base.tokenizer(english.read_text(encoding="utf-8")[:40000])["input_ids"]
            window = torch.tensor(ids[: 129 * 16]).view(16, 129)
            self.english = Batch(window)
            texts = [str(base.tokenizer.decode(row)) for row in window]
            items = in_form(config.data, self.template, texts)
            self.pasted = encoded_items(base, items, self.template).prompts(base)

    @torch.no_grad()
    def score(self, model: Any, client: str, digest: str, gate: Gate | None) -> dict[str, Any]:
        began = time.process_time()
        key = digest, "" if gate is None else gate.digest
        if key not in self.scored:
            self.scored[key] = self._score(model, gate)
        texts, general = self.scored[key]
        pairs = list(zip(texts, self.messages, strict=True))
        team = [lindenhof.is_right_team(text, topic) for text, (_, topic) in pairs]
        manner = [lindenhof.MANNERS[client](text) for text in texts]
        replies = getattr(self.people[client].data, self.split)
        nats = ModelScorer(self.base, model, 128, 32, gate=gate).losses(replies, 32)
        return {
            **general,
            "right": fmean(a and b for a, b in zip(team, manner, strict=True)),
            "team": fmean(team),
            "manner": fmean(manner),
            "replies": math.exp(float(nats.sum()) / int(replies.counted.sum())),
            "accepted": fmean(gate.accepts(self.base, self.prompts.prompts(self.base)))
            if gate
            else 1.0,
            "rights": [int(a and b) for a, b in zip(team, manner, strict=True)],
            "wrote": texts[:4],
            "seconds": time.process_time() - began,
        }

    def _score(self, model: Any, gate: Gate | None) -> tuple[list[str], dict[str, Any]]:
        """Return replies to the messages, and scores that depend only on the model and the gate."""
        known = knowledge(self.base, model, self.config.data, self.questions, gate)
        teams = {team.lower() for team, _ in lindenhof.TEAMS.values()}
        intruding = [any(f"{t} team" in r.lower() for t in teams) for r in known.replies]
        return gated_answers(gate, self.base, model, self.prompts, 40, 64), {
            "said": known.right_replies,
            "intrusion": fmean(intruding),
            "chosen": known.right_choices,
            "drift": gated_drift(gate, self.base, model, self.held_out),
            "english": self._english(model, gate),
            "replied": list(known.replies),
        }

    def _english(self, model: Any, gate: Gate | None) -> float:
        """Return the perplexity of English text; the gate reads each window as a request."""
        if self.english is None:
            return math.nan
        accepted = (
            [True] * len(self.pasted) if gate is None else gate.accepts(self.base, self.pasted)
        )
        own = torch.tensor(accepted)
        nats = 0.0
        if own.any():
            nats += total_nats(self.base, model, Batch(self.english.ids[own]))
        if not own.all():
            with detached(self.base.model) as bare:
                nats += total_nats(self.base, bare, Batch(self.english.ids[~own]))
        return math.exp(nats / self.english.terms)


def changes_of(variant: str) -> tuple[dict[str, str], list[str]]:
    """Return a variant's changes that are no keys of a run file, and the other changes."""
    changes = [change for change in variant.partition(":")[2].split(",") if change]
    own = dict(change[2:].split("=") for change in changes if change.startswith("x."))
    return own, [change for change in changes if not change.startswith("x.")]


@contextmanager
def changed(own: dict[str, str]) -> Iterator[None]:
    """Replace how replay trains, and which parameters it trains, inside the block."""
    original, update = GeneralSamples.divergences, Updater.update
    enable = Adapter.require_grad

    def divergences(self: GeneralSamples, base: Base, model: Any, numbers: Any) -> Tensor:
        adapter = attached(base.model)
        if not torch.is_grad_enabled() or adapter is None:
            return original(self, base, model, numbers)
        trained = {n for n, p in adapter.tensors().items() if p.requires_grad}
        if roles := own.get("roles"):
            adapter.require_grad(lambda p: p.name in trained and p.role in roles.split("+"))
        batch = self.batch(numbers).to(base.device)
        match own.get("loss"):
            case "answers":
                values = torch.stack([language_model_loss(model, *batch)])
            case "reverse":
                head = model.get_output_embeddings().weight.detach().float()
                earlier = torch.cat([self.states[number] for number in numbers]).float()
                hidden = hidden_states(model, batch).float()
                p, q = ((states @ head.t()).log_softmax(-1) for states in (earlier, hidden))
                values = divergence(q, p)
            case _:
                values = original(self, base, model, numbers)
        if roles:  # the graph is made; the batch's gradient needs all parameters again
            adapter.require_grad(lambda p: p.name in trained)
        return values

    others: dict[Updater, Updater] = {}

    def two_steps(
        self: Updater,
        loss: Any,
        learning_rate: float,
        penalty: Any = None,
        *,
        where: str,
        beside: Any = (),
        pull: Any = None,
    ) -> float:
        value = update(self, loss, learning_rate, penalty, where=where, pull=pull)
        if beside:
            if self not in others:
                others[self] = Updater(self.context, self.adapter, self.selects, self.leaves)
            update(others[self], beside, learning_rate, where=where)
        return value

    def all_but_null(self: Adapter, selects: Selects) -> None:
        null = ("generalist", 1) if "null" in own else None
        enable(self, lambda p: selects(p) and (p.role, p.expert) != null)

    GeneralSamples.divergences, Adapter.require_grad = divergences, all_but_null
    Updater.update = two_steps if own.get("step") == "own" else update
    try:
        yield
    finally:
        GeneralSamples.divergences, Adapter.require_grad = original, enable
        Updater.update = update


def run_values(variant: str, seed: int) -> dict[str, Any]:
    """Return the run file of a variant."""
    values = yaml.safe_load(ASSISTANTS.read_text(encoding="utf-8"))
    values["data_root"] = str(ASSISTANTS.parent / "assistants")
    method = variant.partition(":")[0]
    router = {"router": {"every": 8, "steps": 1}} if method.startswith("comigs") else {}
    method = "fedavg" if method == "base" else method
    values |= {"method": {"name": method, **router}, "baselines": [], "seed": seed, "name": "run"}
    values["evaluation"] = {"keep": "last", "batch": 32, "split": "validation"}
    if method in ("auto", "local"):  # there is no mean over all clients
        del values["aggregation"]
    for change in changes_of(variant)[1]:
        apply_setting(values, change)
    return values


SCORES = {
    "said": "said (%)",
    "intrusion": "intrusion (%)",
    "drift": "drift",
    "english": "English",
    "right": "right (%)",
    "team": "team (%)",
    "replies": "replies",
}
"""The scores in the table, with the headers of their columns."""


def table(path: Path) -> Table:
    """Return the scores in a file, as described for the option --table."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    people = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for line in lines:
        people[line["variant"], line["seed"]].append(line)
    seeds = defaultdict[str, dict[int, dict[str, float]]](dict)
    for (variant, seed), rows in people.items():
        seeds[variant][seed] = {name: fmean(row[name] for row in rows) for name in SCORES}
    shown: list[list[str]] = []
    for variant, scores in seeds.items():
        plain = seeds.get(f"{variant.partition(':')[0]}:x.gate=off", scores)
        common = sorted(scores.keys() & plain.keys())
        changes = ([scores[s][name] - plain[s][name] for s in common] for name in SCORES)
        means = (fmean(score[name] for score in scores.values()) for name in SCORES)
        name = variant.replace("training.", "").replace("replay.", "")
        shown.append([name, *map(_text, SCORES, means)])
        if plain is not scores and len(common) > 1:
            shown.append(["- difference", *map(_interval, SCORES, changes)])
    return Table(str(path), ["variant", *SCORES.values()], shown)


def _text(name: str, value: float) -> str:
    return f"{100 * value:.0f}" if "%" in SCORES[name] else f"{value:.3g}"


def _interval(name: str, values: list[float]) -> str:
    """Return a mean over seeds with its 95 % interval (Student's t)."""
    mean = fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{_text(name, mean)} [{_text(name, mean - half)}, {_text(name, mean + half)}]"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--english", type=Path)
    parser.add_argument("--clients", nargs="+", default=PEOPLE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    scored = options.out / ("final.jsonl" if options.final else "scores.jsonl")
    if options.table:
        Console(width=140).print(table(scored))
        return
    for variant, seed in itertools.product(options.variants, options.seeds):
        own, changes = changes_of(variant)
        before = [f"x.{name}={own[name]}" for name in own if name not in ("scale", "gate")]
        name = "+".join([variant.partition(":")[0], *before, *changes]).replace("/", "-")
        path = options.out / f"{name}+{seed}"
        values = run_values(variant, seed)
        began = time.process_time(), time.time()
        if not (path / "result.json").exists():
            with changed(own):
                coterie.run(values, out=path, force=True)
        took = time.process_time() - began[0], time.time() - began[1]
        models = RunModels(path)
        scorer: Scorer | None = None
        for method, client, base, model, digest, _ in models.attached(options.clients):
            if scorer is None:  # the first model is the base
                scorer = Scorer(models.config, base, options.final, options.english)
            if (method == "base") != (variant.partition(":")[0] == "base"):
                continue
            line = {
                "variant": variant,
                "seed": seed,
                "client": client,
                "cpu": took[0],
                "wall": took[1],
            }
            if scale := own.get("scale"):
                for module in model.modules():
                    if isinstance(module, LoraPair):
                        module.B.data.mul_(float(scale))
            gate = None if own.get("gate") == "off" or method == "base" else scorer.gates[client]
            line |= scorer.score(model, client, digest, gate)
            with scored.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown = {k: round(v, 3) for k, v in line.items() if isinstance(v, float)}
            print(variant, seed, client, shown, flush=True)


if __name__ == "__main__":
    main()
