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
    """Values of a setting, each of which must change the run."""

    values: tuple[Any, ...]
    given: Given = field(default_factory=dict)
    """Other settings, with which it acts."""


def to(*values: Any, **given: Any) -> Row:
    """Return a row; two underscores in names of other settings stand for a dot."""
    return Row(values, {name.replace("__", "."): value for name, value in given.items()})


TEACHING = ("fedmkt", "fedmkt-fedavg", "llm2slm")
ALONE = ("comigs-2s", "local-moe", "local-moe-tr")
"""All of whose experts are specialists."""
SETS = ("grouped", "pcl-1", "pcl-2", "pcl-3", "pcl-uniform", "pcl-theoretical")
"""Whose experts are called sets, and may be routed."""


PLAIN = "fedit fedit-ft fedsa fed-alora rolora ditto feddpa fedalt cobo fdlora"
"""The methods whose LoRA is scaled by alpha / r."""
THIRDS = {"diarist": {"sea": 1.0}, "poet": {"sea": 0.5, "love": 0.5}, "whaler": {"sea": 1.0}}
HALVES = {**THIRDS, "whaler": {"love": 1.0}}

PHASES: Given = {"router.every": 2, "router.steps": 1}
EXCHANGES: Given = {"warmup": 1, "every": 1}
"""So that what comes late in a run comes in a short one."""

BALANCE = {"top_k": (1,), "load_balance": ("none", "uniform"), "load_balance_weight": (1.0,)}


CHANGED: list[tuple[str, Any]] = [
    ("mlp attention router", None),
    ("mlp.rank mlp.sets mlp.generalists mlp.specialists attention.rank router.every logits", 3),
    ("validation_batches public_batches local_steps sync_every clients_per_expert", 1),
    ("embeddings.samples peers fedlease:warmup auto:every", 1),
    ("warmup every router.steps epochs samples", 2),
    ("clusters", 3),
    ("baseline", "after"),
    ("text", "train"),
    ("virtual_tokens", 5),
    ("experts", 6),
    ("encoder_hidden_size", 24),
    ("pair_share gamma outer_learning_rate task_weight embeddings.share", 0.5),
    ("mu penalty_weight fedamole:router.load_balance_weight", 1.0),
    ("outer_momentum", 0.0),
    ("router.learning_rate proximity", 0.1),
    ("weight", 0.2),
    ("set_aside", 0.25),
    ("lora.dropout fusion_share", 0.3),
    ("trusted.threshold temperature", 2.0),
    ("lora.alpha trust", 3.0),
    ("weight_step", 5.0),
    ("mix shared_expert router.renormalise", False),
    ("router.leftover_gradients exact", True),
    ("mlp.placement", "beside"),
    ("attention.targets", "c_proj|o_proj"),
    ("lora.scale", "rank"),
    ("domain", "box"),
    ("trials", "gradients"),
    ("form", "released"),
    ("private", "trained"),
    ("align", "warping"),
    ("router.score_scale", "dim"),
    ("router.load", "first"),
    ("mixtures", HALVES),
    ("groups", {"diarist": "a", "poet": "a", "whaler": "b"}),
    ("embeddings.privacy", {"epsilon": 1.0}),
]
"""Settings that act alone, and the value that they are changed to."""

ROWS: dict[str, Row] = {
    **{name: to(value) for names, value in CHANGED for name in names.split()},
    **{f"router.{n}": to(*values, mlp__generalists=3) for n, values in BALANCE.items()},
    "max_clusters": to(1, warmup=1),
    "trusted.top": to(1, 2),
    "init_text": to(None, "Once upon a time"),
    "own": to("none", "self", "mean"),
    "choose": to(True, clusters=3),
    "epsilon": to(1.0, peers=1),
    "decay": to(1.0, peers=1, epsilon=1.0),
    "min_experts": to(0, experts=6, clients_per_expert=1),
    "max_experts": to(2, 3, experts=6, clients_per_expert=1, min_experts=0),
    "assignment": to("homogeneous", "random", "random-once"),
    **{
        f"embeddings.privacy.{setting}": to(value, embeddings__privacy={"epsilon": 1.0})
        for setting, value in {"epsilon": 0.1, "delta": 1e-2, "clip": 0.1}.items()
    },
    "router.kind": to("vanilla", assignment="random"),
    # Where a method wants others.
    **{
        f"{name}:router.{setting}": Row(values, {f"mlp.{experts}": 3})
        for experts, names in (("specialists", ALONE), ("sets", SETS))
        for name in names
        for setting, values in BALANCE.items()
    },
    "fedamole:router.top_k": to(1, 3),
    **{f"{name}:lora.scale": to("sqrt") for name in (*PLAIN.split(), *TEACHING)},
}
"""Rows by SETTING or METHOD:SETTING. A new setting needs a row here."""

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
    row = ROWS.get(f"{name}:{path}") or ROWS.get(path)
    assert row, f"The setting {path!r} of {name!r} is in no row of ROWS: add one that acts."
    return row


def first_methods() -> dict[str, list[str]]:
    """Return, by method, the settings that no method before it has tested.

    Two methods have the same setting if one class declares it for both, and if the same functions
    make layouts and adapters of it.
    """
    known: set[tuple[str, ...]] = set()
    methods: dict[str, list[str]] = {}
    for name in sorted(available(), key=lambda name: (name not in FAST, name not in BEHAVIOURS)):
        kind = available()[name]
        makers = [
            getattr(getattr(kind, f, None), "__qualname__", "") for f in ("layout", "adapter")
        ]
        keys = {p: (p, str(row_of(name, p)), of, *makers) for p, of in settings_of(kind)}
        if paths := [path for path, key in keys.items() if key not in known]:
            methods[name] = paths
        known |= set(keys.values())
    return methods


def always(kind: type[Method]) -> Given:
    """Return the settings with which a method's settings are tested."""
    paths = {path for path, _ in settings_of(kind)}
    given: dict[str, Any] = {}
    for late in (PHASES, EXCHANGES):
        given |= late if late.keys() <= paths else {}
    given |= {"mixtures": THIRDS} if "mixtures" in paths else {}
    return given | ({"groups": dict.fromkeys(THIRDS, "a")} if "groups" in paths else {})


def nested(settings: Given) -> dict[str, Any]:
    """Convert settings to the nested form of a run file."""
    section: dict[str, Any] = {}
    for path, value in settings.items():
        *parts, last = path.split(".")
        at = section
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = dict(value) if isinstance(value, dict) else value
    return section


def digest_of(session: Session, config: coterie.RunConfig, path: Path) -> str:
    """Return a digest of all messages, metrics, states and logits of a run."""
    digest, send, source = blake2b(), Schema.send, count()

    def seen(schema: Schema, *message: Any) -> bytes:
        data = send(schema, *message)
        digest.update(data)
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
            digest.update(json.dumps(line).encode())
    for state in sorted(folder.checkpoint(config.exchanges).iterdir()):
        digest.update(state.read_bytes())
    for model in (run.server.model(run.value), *(side.model() for side in run.clients.values())):
        if model is not None:
            with torch.no_grad():
                logits = model(input_ids=torch.arange(3, 15)[None]).logits
            digest.update(logits.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def digest(config, teachers, tmp_path_factory) -> Callable[..., str]:
    """The digest of a run of a method with some settings; kept, unless it is to be made anew."""
    data = {"window": 16, "limits": {"train": 600, "validation": 200, "test": 34, "public": 400}}
    data |= {"public": "poet.txt"}
    plain = Session(config(method="local", data=data))
    # With as many tokens in an answer as the server has, `align` would change nothing.
    several = Session(teachers(rounds=2, base="tiny-gpt2-2m"))
    sessions = {"fedmkt-fedavg": Session(teachers(rounds=2, method={"name": "fedmkt-fedavg"}))}

    @cache
    def made(name: str, settings: str, again: bool) -> str:
        session = sessions.get(name, several if name in TEACHING else plain)
        method = available()[name].model_validate(json.loads(settings))
        changes: dict[str, Any] = {"method": method}
        if name == "auto":  # the mean with new weights is scored from round 3 on
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
    assert not dead(digest, name, FIRST[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in available() if name not in FAST])
def test_every_setting_acts_with_every_method(digest, name) -> None:
    assert not dead(digest, name, paths_of(name))


def test_every_row_is_of_a_setting() -> None:
    paths = {f"{name}:{path}" for name in available() for path in paths_of(name)}
    known = paths | {path.partition(":")[2] for path in paths}
    assert ROWS.keys() <= known
