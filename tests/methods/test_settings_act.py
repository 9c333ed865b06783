"""Settings are what acts: each setting of each method is changed, and something else happens.

Compared is all that can be seen of a short run: every message's bytes, what is logged, the last
states of all sides, and what their models predict.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
import torch
from every_method import BEHAVIOURS, marks
from pydantic import BaseModel

import coterie
from coterie.engines.session import Session
from coterie.messages import Schema
from coterie.methods.contract import Method
from coterie.methods.registry import available
from coterie.privacy import secrets
from coterie.runs import RunFolder

Given = Mapping[str, Any]
"""Settings by dotted path."""


@dataclass(frozen=True)
class Row:
    """What a setting is changed to: values that all act, each in its own way."""

    values: tuple[Any, ...]
    given: Given = field(default_factory=dict)
    """Other settings, with which it acts."""


def to(*values: Any, **given: Any) -> Row:
    """A row; in names of other settings two underscores stand for a dot."""
    return Row(values, {name.replace("__", "."): value for name, value in given.items()})


TEACHING = ("fedmkt", "fedmkt-fedavg", "llm2slm")
ALONE = ("comigs-2s", "local-moe", "local-moe-tr")
"""All of whose experts are specialists."""
THIRDS = {"diarist": {"sea": 1.0}, "poet": {"sea": 0.5, "love": 0.5}, "whaler": {"sea": 1.0}}
HALVES = {**THIRDS, "whaler": {"love": 1.0}}

PHASES: Given = {"router.every": 2, "router.steps": 1}
EXCHANGES: Given = {"warmup": 1, "every": 1}
"""So that what comes late in a run comes in a short one."""

ROWS: dict[str, Row] = {
    "mlp": to(None),
    "mlp.rank": to(3),
    "mlp.placement": to("beside"),
    "mlp.sets": to(3),
    "mlp.generalists": to(3),
    "mlp.specialists": to(3),
    "attention": to(None),
    "attention.rank": to(3),
    "attention.targets": to("c_proj|o_proj"),
    "lora.alpha": to(3.0),
    "lora.scale": to("rank"),
    "lora.dropout": to(0.3),
    "router.top_k": to(1, mlp__generalists=3),
    "router.load_balance": to("none", "uniform", mlp__generalists=3),
    "router.load_balance_weight": to(1.0, mlp__generalists=3),
    "router.every": to(3),
    "router.steps": to(2),
    "router.learning_rate": to(0.1),
    "router.leftover_gradients": to(True),
    "exact": to(True),
    "mu": to(1.0),
    "proximity": to(0.1),
    "weight": to(0.2),
    "weight_step": to(5.0),
    "pair_share": to(0.5),
    "domain": to("box"),
    "max_clusters": to(1, warmup=1),
    "gamma": to(0.5),
    "penalty_weight": to(1.0),
    "warmup": to(2),
    "every": to(2),
    "mix": to(False),
    "form": to("released"),
    "trusted.top": to(1, 2),
    "trusted.threshold": to(2.0),
    "validation_batches": to(1),
    "public_batches": to(1),
    "mixtures": to(HALVES),
    "groups": to({"diarist": "a", "poet": "a", "whaler": "b"}),
    "local_steps": to(1),
    "private": to("trained"),
    "sync_every": to(1),
    "outer_learning_rate": to(0.5),
    "outer_momentum": to(0.0),
    "fusion_share": to(0.3),
    "virtual_tokens": to(5),
    "init_text": to(None, "Once upon a time"),
    "encoder_hidden_size": to(24),
    "logits": to(3),
    "task_weight": to(0.5),
    "temperature": to(2.0),
    "epochs": to(2),
    "own": to("none", "self", "mean"),
    "align": to("warping"),
    "experts": to(6),
    "clients_per_expert": to(1),
    "min_experts": to(0, experts=6, clients_per_expert=1),
    "max_experts": to(2, 3, experts=6, clients_per_expert=1, min_experts=0),
    "assignment": to("homogeneous", "random", "random-once"),
    "shared_expert": to(False),
    "embeddings.share": to(0.5),
    "embeddings.samples": to(1),
    "embeddings.privacy": to({"epsilon": 1.0}),
    "embeddings.privacy.epsilon": to(0.1, embeddings__privacy={"epsilon": 1.0}),
    "embeddings.privacy.delta": to(1e-2, embeddings__privacy={"epsilon": 1.0}),
    "embeddings.privacy.clip": to(0.1, embeddings__privacy={"epsilon": 1.0}),
    "router.kind": to("vanilla", assignment="random"),
    "router.score_scale": to("dim"),
    "router.renormalise": to(False),
    "router.load": to("first"),
    # Where a method wants others.
    **{f"{name}:router.top_k": to(1, mlp__specialists=3) for name in ALONE},
    **{f"{name}:router.load_balance": to("none", "uniform", mlp__specialists=3) for name in ALONE},
    **{f"{name}:router.load_balance_weight": to(1.0, mlp__specialists=3) for name in ALONE},
    "fedlease:warmup": to(1),
    "samples": to(2),
    "set_aside": to(0.25),
    "trust": to(3.0),
    "patience": to(-1000.0),
    "peers": to(1),
    "auto:every": to(1),
    "fedamole:router.top_k": to(1, 3),
    "fedamole:router.load_balance_weight": to(1.0),
    **{
        f"{name}:lora.scale": to("sqrt")
        for name in (
            "fedit",
            "fedit-ft",
            "fedsa",
            "fed-alora",
            "rolora",
            "ditto",
            "feddpa",
            "fedalt",
            "cobo",
            "fdlora",
            *TEACHING,
        )
    },
}
"""By setting, or METHOD:SETTING. A new setting needs a row here."""

FAST = ("fedit",)


def settings_of(kind: type[BaseModel], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path of every setting and of every optional section, and who declares it."""
    for name, info in kind.model_fields.items():
        path, kinds = before + name, (info.annotation, *get_args(info.annotation))
        parts = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if parts and NoneType in kinds:
            yield path, str(info.annotation)
        elif not parts:
            yield path, next(k for k in kind.__mro__ if name in vars(k)["__annotations__"]).__name__
        for part in parts:
            yield from settings_of(part, f"{path}.")


def paths_of(name: str) -> list[str]:
    """Return the dotted paths of all settings of a method."""
    return [path for path, _ in settings_of(available()[name])]


def row_of(name: str, path: str) -> Row:
    found = ROWS.get(f"{name}:{path}") or ROWS.get(path)
    assert found, f"The setting {path!r} of {name!r} is in no row of ROWS: add one that acts."
    return found


def first_methods() -> dict[str, list[str]]:
    """Return, by method, the settings that no method before it has tested.

    Two methods have the same setting if one class declares it for both, and if the same functions
    make layouts and adapters of it.
    """
    known: set[tuple[str, ...]] = set()
    found: dict[str, list[str]] = {}
    for name in sorted(available(), key=lambda name: (name not in FAST, name not in BEHAVIOURS)):
        kind = available()[name]
        makers = [
            getattr(getattr(kind, f, None), "__qualname__", "") for f in ("layout", "adapter")
        ]
        keys = {p: (p, str(row_of(name, p)), of, *makers) for p, of in settings_of(kind)}
        if paths := [path for path, key in keys.items() if key not in known]:
            found[name] = paths
        known |= set(keys.values())
    return found


def always(kind: type[Method]) -> Given:
    """With what a method's settings are changed."""
    paths = {path for path, _ in settings_of(kind)}
    given: dict[str, Any] = {}
    for late in (PHASES, EXCHANGES):
        given |= late if late.keys() <= paths else {}
    given |= {"mixtures": THIRDS} if "mixtures" in paths else {}
    return given | ({"groups": dict.fromkeys(THIRDS, "a")} if "groups" in paths else {})


def nested(settings: Given) -> dict[str, Any]:
    """The same as a run file says it."""
    found: dict[str, Any] = {}
    for path, value in settings.items():
        *parts, last = path.split(".")
        at = found
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = dict(value) if isinstance(value, dict) else value
    return found


def digest_of(session: Session, config: coterie.RunConfig, path: Path) -> str:
    """Of all that can be seen of a run."""
    found, send, source = blake2b(), Schema.send, count()

    def seen(schema: Schema, *message: Any) -> bytes:
        data = send(schema, *message)
        found.update(data)
        return data

    folder = RunFolder.create(path, session.description(config, session.participants(config)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schema, "send", seen)
        patch.setattr(secrets, "draw", lambda: next(source).to_bytes(secrets.KEY_BYTES))
        session.check(config)
        run = session.start(config, folder)
        run.run()
    for line in folder.metrics():
        if line["name"] != "seconds":
            found.update(json.dumps(line).encode())
    for state in sorted(folder.checkpoint(config.exchanges).iterdir()):
        found.update(state.read_bytes())
    for model in (run.server.model(run.value), *(side.model() for side in run.clients.values())):
        if model is not None:
            with torch.no_grad():
                logits = model(input_ids=torch.arange(3, 15)[None]).logits
            found.update(logits.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def digest(config, teachers, tmp_path_factory) -> Callable[..., str]:
    """The digest of a run of a method with some settings; kept, unless it is to be made anew."""
    data = {"window": 16, "limits": {"train": 600, "validation": 200, "test": 34, "public": 400}}
    data |= {"public": "poet.txt"}
    plain = Session(config(method="local", data=data))
    # With as many tokens in an answer as the server has, `align` would change nothing.
    several = Session(teachers(rounds=2, base="tiny-gpt2-2m"))
    one = Session(teachers(rounds=2, method={"name": "fedmkt-fedavg"}))

    @cache
    def made(name: str, settings: str, again: bool) -> str:
        session = plain if name not in TEACHING else one if name == "fedmkt-fedavg" else several
        method = available()[name].model_validate(json.loads(settings))
        changes: dict[str, Any] = {"method": method}
        if name == "auto":  # the first trial ends in round 3; small changes of pairs are ignored
            training = session.config.training.model_copy(update={"learning_rate": 0.007})
            changes |= {"rounds": 3, "training": training}
        run = session.config.model_copy(update=changes)
        return digest_of(session, run, tmp_path_factory.mktemp("run"))

    def of(name: str, given: Given, again: bool = False) -> str:
        return made(name, json.dumps(nested(given), sort_keys=True), again)

    return of


def dead(digest, name: str, paths: Iterable[str]) -> list[str]:
    """Return the settings that change nothing."""
    base = always(available()[name])
    assert digest(name, base) == digest(name, base, again=True), "the run is another each time"
    without_effect = []
    for path in paths:
        row = row_of(name, path)
        given = {**base, **row.given}
        whole = {n: v for n, v in given.items() if not n.startswith(f"{path}.")}
        digests = [digest(name, given), *(digest(name, {**whole, path: v}) for v in row.values)]
        if len(set(digests)) < len(digests):
            without_effect.append(path)
    return without_effect


FIRST = first_methods()


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n, FAST, FIRST)) for n in FIRST])
def test_every_setting_acts(digest, name) -> None:
    """Each setting with one method."""
    assert not dead(digest, name, FIRST[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in available() if name not in FAST])
def test_every_setting_acts_with_every_method(digest, name) -> None:
    assert not dead(digest, name, paths_of(name))


def test_every_row_is_of_a_setting() -> None:
    paths = {f"{name}:{path}" for name in available() for path in paths_of(name)}
    known = paths | {path.partition(":")[2] for path in paths}
    assert ROWS.keys() <= known
