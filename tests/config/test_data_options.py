"""Limits of one's own, and texts without duplicates, wherever a client works."""

import re
from typing import Any

import pytest

from coterie.bases import load_tokenizer
from coterie.config.run import parse
from coterie.deployment.site import Site
from coterie.errors import CoterieError
from coterie.federation.checks import check
from coterie.federation.participants import gathered
from coterie.messages.envelope import Order
from coterie.testing.loop import site


def tokens(run) -> dict[str, tuple[int, ...]]:
    clients = gathered(run, load_tokenizer("tiny-gpt2")).clients
    return {p.name: tuple(len(split.ids) for split in vars(p.data).values()) for p in clients}


LIMITS = {"train": 500, "validation": 100, "test": 90}


def test_a_clients_own_limits_come_before_the_runs(config, texts) -> None:
    own = {"poet": {"train": 300}, "whaler": {"test": 50, "validation": 60}}
    data = {"window": 16, "limits": LIMITS, "limits_of": own}
    wanted = {"diarist": (500, 100, 90), "poet": (300, 100, 90), "whaler": (500, 60, 50)}
    assert tokens(config(data=data)) == wanted
    divide = {"source": {name: f"{name}.txt" for name in wanted}, "by": "label"}
    assert tokens(config(data=data, divide=divide, clients=[])) == wanted
    for name, counts in wanted.items():  # on a machine of its own
        limits = {name: own[name]} if name in own else {}
        alone = [{"name": name, "path": f"{name}.txt"}]
        run = config(data=data | {"limits_of": limits}, clients=alone)
        assert tokens(run) == {name: counts}


def test_limits_of_an_unknown_client_are_refused(config, values) -> None:
    run = config(data={"window": 16, "limits_of": {"pote": {"train": 300}}})
    with pytest.raises(CoterieError, match=r"data\.limits_of names the unknown client 'pote'"):
        check(run, ("poet", "whaler"), False)
    for limits, sentence in (
        ({"public": 300}, r"Unknown key 'data\.limits_of\.poet\.public'"),
        ({"test": 16}, "limit of 16 test tokens is too small"),
    ):
        with pytest.raises(CoterieError, match=sentence):
            parse(values(data={"window": 16, "limits_of": {"poet": limits}}))


def joining(visible: dict[str, Any]) -> Order:
    """Return a server's order to join."""
    return Order(run="0" * 16, client="poet", kind="join", turn=0, config=visible)


def test_a_client_elsewhere_knows_its_own_limits_alone(config, tmp_path) -> None:
    own = {"poet": {"train": 300}, "whaler": {"train": 200}}
    run = config(data={"window": 16, "limits": LIMITS, "limits_of": own})
    for name, size in (("poet", 300), ("whaler", 200), ("diarist", 500)):
        visible = run.visible_to(name)
        others = {client.name for client in run.clients} - {name}
        assert not any(re.search(other, repr(visible)) for other in others)
        at_home = site(run, name, tmp_path).config(joining(visible))
        assert tokens(at_home) == {name: (size, 100, 90)}


def test_duplicates_are_left_out_at_home_too(config, texts, tmp_path) -> None:
    book = (texts / "poet.txt").read_text(encoding="utf-8")
    (tmp_path / "train.txt").write_text(book, encoding="utf-8")
    (tmp_path / "test.txt").write_text(book[:12_000], encoding="utf-8")
    files = {"train": str(tmp_path / "train.txt"), "test": str(tmp_path / "test.txt")}
    clients = [{"name": "poet", **files, "validation": "whaler.txt"}]

    def size(run) -> int:
        return tokens(run)["poet"][0]

    data = [{"window": 16, "deduplicate": on} for on in (False, True)]
    plain, clean = (config(clients=clients, data=each) for each in data)
    assert size(clean) == pytest.approx((1 - 12_000 / len(book)) * size(plain), rel=0.1)
    files |= {"validation": str(texts / "whaler.txt")}
    at_home = Site("poet", files, tmp_path, clean.base.name)
    assert size(at_home.config(joining(clean.visible_to("poet")))) == size(clean)
