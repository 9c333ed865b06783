"""Auto: which rounds have trials, who is judged, and what is left of clients that leave."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from auto_runs import NAMES, auto, chosen, forged_round, noise, started
from every_method import some
from tensors import close_to, equal, mean_of
from turns import nth

from coterie.messages import Message, State
from coterie.methods.auto.choice import rounded
from coterie.methods.clusters import nearest
from coterie.methods.tensors import copied
from coterie.methods.value import PerClient
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, take


@pytest.fixture
def make(config):
    """A run of `auto` whose clients have joined; keyword arguments are settings of the method."""

    def make(rounds: int = 12, names: Iterable[str] = NAMES, **settings: Any) -> Any:
        texts = dict(zip(names, NAMES, strict=False))
        return started(config, texts, method=auto(samples=2, **settings), rounds=rounds)

    return make


def judges(downloads: dict[str, Message]) -> list[str]:
    """Return the clients whose downloads contain other clients' pairs."""
    return sorted(name for name, download in downloads.items() if download.peers)


@pytest.mark.parametrize("rounds", some({1, 3, 6}, [1, 3, 6, 14]))
def test_pairs_are_forwarded_after_these_rounds_only(rounds, make) -> None:
    local = make(rounds)
    seen = {r: judges(forged_round(local, r)[0]) for r in range(rounds)}
    trials = {t for t in (1, 3, 7) if t < rounds}
    assert seen == {r: [*NAMES] if r in trials else [] for r in range(rounds)}
    assert not any(down(local, name).peers for name in NAMES)
    take(local)


def test_the_download_of_a_trial_has_the_others_pairs_alone(make) -> None:
    local = make()
    _, uploads = forged_round(local, 0)
    for name in NAMES:
        download, peers = down(local, name), {*NAMES} - {name}
        assert download.peers.keys() == download.values["sizes"].keys() == peers
        for peer in peers:
            pairs = download.from_peer(peer)
            assert pairs.groups.keys() == {"adapter"}
            assert all(n.startswith("dense/") for n in pairs["adapter"])
            own = uploads[peer]["adapter"].items()
            sent = {n: t.to(torch.float16) for n, t in own if n.startswith("dense/")}
            assert equal(pairs["adapter"], sent)


def test_numbers_beyond_the_range_of_float16_stay_finite() -> None:
    largest = torch.finfo(torch.float16).max
    sent = rounded({"x": torch.tensor([1e30, -1e30, 3.0])})["x"]
    assert sent.tolist() == [largest, -largest, 3.0]


def test_a_client_that_joins_late_has_a_trial_of_its_own(make) -> None:
    local = make(12)
    hello, shared = local.clients["poet"].hello(), local.clients["poet"].shared
    initial = copied(shared)
    local.leave("poet")
    others, seen = ["diarist", "whaler"], []
    for r in range(4):
        seen.append(judges(forged_round(local, r, present=others)[0]))
    assert seen == [[], others, [], others]
    local.join("poet", hello)
    download = down(local, "poet")
    assert not download.peers
    assert equal(download["adapter"], {n: initial[n] for n in download["adapter"]})
    for r in range(4, 7):
        seen.append(judges(forged_round(local, r)[0]))
    assert seen[4:] == [[], ["poet"], []]
    assert local.value.tried["poet"] == 3
    assert judges({name: down(local, name) for name in NAMES}) == [*NAMES]


@pytest.mark.parametrize(
    ("away", "trials", "others"),
    [([1], [2, 3, 7], [1, 3, 7]), ([1, 3, 5, 7], [2, 4, 8], [1, 3, 7])],
    ids=["once", "in every second round"],
)
def test_a_client_that_was_away_has_its_trial_later(away, trials, others, make) -> None:
    local, seen = make(12), []
    for r in range(9):
        present = [n for n in NAMES if n != "poet" or r not in away]
        seen.append(judges(forged_round(local, r, present=present)[0]))
    assert [r for r, names in enumerate(seen) if "poet" in names] == trials
    assert [r for r, names in enumerate(seen) if "whaler" in names] == others
    assert not local.value.uploads


@pytest.mark.parametrize("name", some({"poet", "row"}, ["poet", "row", "tokens"]))
def test_nothing_is_left_of_a_client_that_leaves(name, make) -> None:
    # The client's name may be a key of a choice. A trial is due, and continues without the client.
    local, others = make(12, ("ann", name, "whaler")), ["ann", "whaler"]
    for r in range(3):
        forged_round(local, r)
    assert {*local.value.uploads} == {"ann", name, "whaler"}
    local.leave(name)
    value, rows = local.value, local.server.rows(local.value, local.exchange)
    assert {*value.held, *value.tokens, *value.means, *rows} == {*others}
    assert {*value.uploads} == {*others}
    assert all(row.keys() <= {*others} for row in rows.values())
    downloads, uploads = forged_round(local, 3, present=others)
    assert downloads["ann"].peers.keys() == {"whaler"}
    for client in others:
        row = local.server.rows(local.value, local.exchange)[client]
        mean = down(local, client)["adapter"]
        assert row.keys() <= {*others}
        expected = mean_of((uploads[c]["adapter"] for c in row), row.values())
        assert close_to(mean, {n: expected[n] for n in mean})


def test_a_client_whose_peers_have_left_goes_on_alone(make) -> None:
    local, uploads = make(12), {}
    only_whaler = {"poet": lambda u: chosen(u, row={"whaler": 1.0})}
    for r in range(2):
        _, uploads = forged_round(local, r, only_whaler)
    assert equal(down(local, "poet")["adapter"], uploads["whaler"]["adapter"])
    local.leave("whaler")
    for r in range(2, 4):
        _, uploads = forged_round(local, r, only_whaler, present=["diarist", "poet"])
    mean = down(local, "poet")["adapter"]
    assert equal(mean, uploads["poet"]["adapter"])
    assert b"whaler" not in local.value.state().encode()  # although the uploads name the client


@pytest.mark.parametrize("every", some({2}, [1, 2, 3]))
def test_the_second_expert_is_sent_every_few_rounds(every, make) -> None:
    local = make(8, every=every)
    for r in range(4):
        downloads, uploads = forged_round(local, r)
        for name in NAMES:
            due = (r + 1) % every == 0
            first = r == 0  # the initial values of all parameters
            sent = [n for n in uploads[name]["adapter"] if n.startswith("generalist.1")]
            assert len(sent) == (8 if due else 0)
            got = [n for n in downloads[name]["adapter"] if n.startswith("generalist.1")]
            assert len(got) == (8 if first or r % every == 0 else 0)
            for tensors in (uploads[name]["adapter"], downloads[name]["adapter"]):
                rest = [n for n in tensors if not n.startswith("generalist.1")]
                assert len(rest) == len(local.clients[name].shared) - 8


def test_bounds_compare_the_second_expert_with_what_was_last_received(make) -> None:
    # Clients then cannot hide a change of one round behind the changes of all earlier rounds.
    local = make(6)
    for r in range(4):
        forged_round(local, r)
    received = down(local, "poet")["adapter"]
    assert any(n.startswith("generalist.1") for n in received)
    _, uploads = forged_round(local, 4)
    references = local.server.reference(local.value, "poet", uploads["poet"], local.exchange)
    reference = references["adapter"]
    expert = {n: t for n, t in received.items() if n.startswith("generalist.1")}
    assert equal(expert, {n: reference[n] for n in expert})
    latest = down(local, "poet")["adapter"]
    assert latest.keys() & expert.keys() == set()
    assert equal(latest, {n: reference[n] for n in latest})


def test_half_of_the_peers_are_near_or_important_and_the_others_rotate(config) -> None:
    names = [f"c{i}" for i in range(9)]
    local = started(config, dict.fromkeys(names, "poet"), method=auto(peers=4), rounds=20)
    start = {n: t for n, t in local.value.adapter.items() if n.startswith("dense/")}
    moved = {name: noise(start, 1.0, seed // 2) for seed, name in enumerate(names)}
    uploads = {name: {n: start[n] + t for n, t in moved[name].items()} for name in names}
    value = replace(local.value, uploads=PerClient(uploads))
    local.open(nth(1), names)
    seen = set(local.server._peers(value, "c2", local.exchange))
    assert len(seen) == 4
    assert {*nearest(PerClient(uploads), start, 2)["c2"]} <= seen
    assert "c3" in seen  # whose change is the same
    row = {"c0": 0.1, "c1": 0.4, "c2": 0.2, "c5": 0.3}
    value = replace(value, rows=PerClient({"c2": PerClient(row)}))
    for number in (3, 7, 15):
        local.open(nth(number), names)
        peers = local.server._peers(value, "c2", local.exchange)
        assert len(peers) == 4
        assert {"c1", "c5"} < {*peers}
        seen |= {*peers}
    assert seen == {*names} - {"c2"}


def test_clients_with_equal_weights_share_a_mean_in_a_checkpoint(make) -> None:
    # The mean of all clients is stored once, also after a round without the second expert.
    local = make(8)
    same = dict.fromkeys(NAMES, 1 / 3)
    everyone = {name: lambda u: chosen(u, row=same) for name in NAMES}
    for r in range(5):
        forged_round(local, r, everyone)
    state = State.decode(local.value.state().encode())
    assert [part for part in state.parts if part.startswith("mean")] == ["means.0"]
    before = {name: down(local, name) for name in NAMES}
    local.value = local.value.restored(state)
    assert_equal(local.value.state(), state, "server")
    for name in NAMES:
        assert equal(down(local, name)["adapter"], before[name]["adapter"])
