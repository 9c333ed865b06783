"""FlexLoRA and HetLoRA against the papers' formulas on dense matrices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_method import some
from shortened import TOKENS, joined_with_tokens
from tensors import close_to, fill, mean_of
from torch import Tensor

import coterie
from coterie.adapters import of_roles
from coterie.engines.local import LocalRun
from coterie.messages import Message, MessageError, State, Tensors
from coterie.methods.hetlora import HetLora
from coterie.methods.low_rank import PaddedMean
from coterie.methods.ranks import present_rank, pruned_rank
from coterie.methods.settings import SharedSets
from coterie.runs import RunFolder
from coterie.testing.loop import flat
from coterie.testing.rounds import close, down, step

RANKS = {"diarist": 2, "poet": 3, "whaler": 7}
UP = "generalist.0/transformer.h.0.mlp.c_fc"
DOWN = "generalist.0/transformer.h.1.mlp.c_proj"
ATTENTION = "dense/transformer.h.0.attn.c_attn"


Start = Callable[..., LocalRun]


@pytest.fixture
def start(config: Callable[..., coterie.RunConfig]) -> Start:
    """Joined sides of a method whose clients have RANKS, and TOKENS to train on."""

    def make(name: str, **settings: Any) -> LocalRun:
        method = {"name": name, "mlp": {"rank": RANKS}, **settings}
        return joined_with_tokens(config(method=method))

    return make


def gain(client: str) -> float:
    return 16 / RANKS[client] ** 0.5


def upload(run: LocalRun, client: str, seed: int) -> Message:
    """Return an upload of random values with the shapes that a client sends."""
    chance = torch.Generator().manual_seed(seed)
    shapes = run.clients[client].hello().values["shapes"]
    groups: dict[str, dict[str, Tensor]] = {"adapter": {}, "experts": {}}
    for name, part in run.clients[client].parameters().items():
        group = groups["experts" if part.role == "generalist" else "adapter"]
        group[name] = torch.randn(shapes[name], generator=chance)
    return Message(0, groups)


def update(client: str, tensors: Tensors, pair: str, form: str = "paper") -> np.ndarray:
    """Return the dense `g B A` in float64; in the form released with CoMiGS, g is alpha / r."""
    B, A = (tensors[f"{pair}.{which}"].double().numpy() for which in "BA")
    return (gain(client) if form == "paper" else 16 / RANKS[client]) * B @ A


def one_round(run: LocalRun, clients: list[str]) -> dict[str, Message]:
    """Aggregate random uploads of some clients, and return the uploads."""
    run.open(run.config.turn(0), clients)
    uploads = {name: upload(run, name, seed) for seed, name in enumerate(clients)}
    close(run, 0, uploads)
    return uploads


@pytest.mark.parametrize("name", ["flexlora", "hetlora"])
def test_the_first_download_is_the_runs_first_values_cut(name: str, start: Start):
    run = start(name)
    run.open(run.config.turn(0), list(RANKS))
    largest = run.message("whaler")
    for client, rank in RANKS.items():
        download = run.message(client)
        experts, first = download["experts"], largest["experts"]
        assert torch.equal(experts[f"{UP}.A"], first[f"{UP}.A"][:rank])
        assert experts[f"{UP}.B"].shape == (128, rank)
        assert not experts[f"{UP}.B"].any()
        rest = f"{ATTENTION}.A"
        assert torch.equal(download["adapter"][rest], largest["adapter"][rest])


@pytest.mark.parametrize("name", ["flexlora", "hetlora"])
def test_attention_is_averaged_uniformly(name: str, start: Start) -> None:
    run = start(name)
    uploads = one_round(run, list(RANKS))
    mean = mean_of(message["adapter"] for message in uploads.values())
    assert close_to(run.message("poet")["adapter"], mean)


@pytest.mark.parametrize("clients", [["diarist", "poet", "whaler"], ["poet", "whaler"], ["poet"]])
@pytest.mark.parametrize("pair", some({UP}, [UP, DOWN]))
@pytest.mark.parametrize("form", some({"paper"}, ["paper", "released"]))
def test_flexlora_sends_the_best_update_of_each_rank(clients, pair, form, start: Start) -> None:
    run = start("flexlora", form=form)
    uploads = one_round(run, clients)
    weight = sum(TOKENS[name] for name in clients)
    mean = sum(TOKENS[n] / weight * update(n, uploads[n]["experts"], pair, form) for n in clients)
    U, S, Vt = np.linalg.svd(mean, full_matrices=False)  # pyright: ignore
    for name, rank in RANKS.items():  # also for clients that missed the round
        got = run.message(name)["experts"]
        best = (U[:, :rank] * S[:rank]) @ Vt[:rank]
        np.testing.assert_allclose(update(name, got, pair, form), best, atol=1e-5 * S[0])
        # Directions that no update has must not be dead: A is not zero where B is.
        assert got[f"{pair}.A"].norm(dim=1).min() > 0.9


@pytest.mark.parametrize("name", ["flexlora", "hetlora"])
def test_what_nobody_sent_stays(name: str, start: Start) -> None:
    run = start(name)
    one_round(run, list(RANKS))
    before = flat(run.message("whaler"))
    run.open(run.config.turn(1), [])
    close(run, 1, {})
    after = flat(run.message("whaler"))
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_flexlora_refuses_a_client_without_a_weight(start: Start) -> None:
    run = start("flexlora")
    hello = run.clients["poet"].hello()
    assert hello.values["tokens"] == TOKENS["poet"]
    for tokens in (None, 0, -3, 2.5, True):
        wrong = Message(values={**hello.values, "tokens": tokens})
        with pytest.raises(MessageError, match="training tokens"):
            run.server.join(run.value, "poet", wrong)


@pytest.mark.parametrize("clients", [["diarist", "poet", "whaler"], ["diarist", "poet"]])
@pytest.mark.parametrize("zero", [False, True], ids=["", "no update"])
def test_hetlora_pads_and_weighs_by_norm(clients: list[str], zero: bool, start: Start) -> None:
    run = start("hetlora")
    run.open(run.config.turn(0), clients)
    first = {end: run.message("whaler")["experts"][f"{UP}.{end}"] for end in "AB"}
    messages = {name: upload(run, name, seed) for seed, name in enumerate(clients)}
    uploads = {name: message["experts"] for name, message in messages.items()}
    for seed, name in enumerate(clients):
        uploads[name][f"{UP}.B"].mul_(0 if zero else seed + 1)
    close(run, 0, messages)

    norms = {n: float(np.linalg.norm(update(n, uploads[n], UP))) for n in clients}
    means = PaddedMean(first["A"]), PaddedMean(torch.zeros(128, 7))
    for name in clients:
        weight = 1 if zero else norms[name]
        means[0].add(uploads[name][f"{UP}.A"], weight)
        means[1].add(gain(name) * uploads[name][f"{UP}.B"], weight)
    A, B = (mean.result() for mean in means)
    for name, rank in RANKS.items():
        got = run.message(name)["experts"]
        torch.testing.assert_close(got[f"{UP}.A"], A[:rank], rtol=1e-5, atol=1e-5)
        expected = B[:, :rank] / gain(name)
        torch.testing.assert_close(got[f"{UP}.B"], expected, rtol=1e-5, atol=1e-5)


def test_hetlora_as_released_weighs_a_and_b_apart_by_their_own_norms(start: Start) -> None:
    run, clients = start("hetlora", form="released"), [*RANKS]
    run.open(run.config.turn(0), clients)
    messages = {name: upload(run, name, seed) for seed, name in enumerate(clients)}
    for scale, name in enumerate(clients, start=1):
        messages[name]["experts"][f"{UP}.B"].mul_(scale)
    close(run, 0, messages)
    for end, shape in (("A", (7, 32)), ("B", (128, 7))):
        padded = PaddedMean(torch.zeros(shape))
        for message in messages.values():
            tensor = message["experts"][f"{UP}.{end}"]
            padded.add(tensor, tensor.norm().item())
        mean = padded.result()
        for name, rank in RANKS.items():
            got = run.message(name)["experts"][f"{UP}.{end}"]
            cut = mean[:rank] if end == "A" else mean[:, :rank]
            torch.testing.assert_close(got, cut, rtol=1e-5, atol=1e-5)


def tails(client: Any, gamma: float) -> dict[str, float]:
    """Return the product of the norms of A's and B's tails, which begin at floor(gamma * rank)."""
    products = {}
    for a, b in client.pairs.items():
        A, B = client.shared[a].detach(), client.shared[b].detach()
        left = max(1, int(gamma * present_rank(A)))
        products[a] = (B[:, left:].square().sum().sqrt() * A[left:].square().sum().sqrt()).item()
    return products


def test_flexlora_as_released_has_the_penalty_of_hetlora(start: Start) -> None:
    client: Any = start("flexlora", form="released").clients["whaler"]
    plain: Any = start("flexlora").clients["whaler"]
    assert plain.training.levels[0].penalty is None
    fill(client.adapter.tensors(of_roles("generalist")), 1.0, 1)
    expected = 0.01 * sum(tails(client, 0.99).values())
    assert client.training.levels[0].penalty().item() == pytest.approx(expected, rel=1e-5)


def test_hetlora_takes_lower_ranks_and_never_higher_ones(start: Start) -> None:
    run = start("hetlora")
    run.open(run.config.turn(0), ["whaler"])
    whole = upload(run, "whaler", 0)
    A, B = (whole["experts"][f"{UP}.{end}"] for end in "AB")

    def sent(A: Tensor, B: Tensor) -> Message:
        experts = {**whole["experts"], f"{UP}.A": A, f"{UP}.B": B}
        return Message(0, {**whole.groups, "experts": experts})

    wrong = [(torch.randn(8, 32), torch.randn(128, 8)), (A, B[:, :5]), (A[:0], B[:, :0])]
    wrong += [(bad, B) for bad in (A[:5], A[:, :5], A[0], torch.tensor(1.0))]
    for bad_A, bad_B in wrong:
        with pytest.raises(MessageError, match="shape"):
            close(run, 0, {"whaler": sent(bad_A, bad_B)})
    close(run, 0, {"whaler": sent(A[:4], B[:, :4])})
    got = run.message("whaler")["experts"]
    assert got[f"{UP}.A"].shape == (4, 32)
    assert got[f"{DOWN}.A"].shape == (7, 128)
    # The gain stays that of rank 7: alone, the client gets back what it sent.
    torch.testing.assert_close(got[f"{UP}.B"], B[:, :4])
    # So does a server that was restarted.
    other = start("hetlora")
    other.value = other.value.restored(State.decode(run.value.state().encode()))
    assert other.message("whaler")["experts"][f"{UP}.A"].shape == (4, 32)


def test_hetlora_penalty(start: Start) -> None:
    method = HetLora(mlp=SharedSets(sets=1, rank=RANKS), gamma=0.6, penalty_weight=0.01)
    client: Any = start("hetlora").clients["whaler"]
    penalty, parameters = method.penalty(client), client.adapter.tensors(of_roles("generalist"))
    value = penalty()  # B is zero: so is the penalty, and its gradient is finite
    value.backward()
    assert value.item() == 0
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in parameters.values())
    fill(parameters, 1.0, 1)
    parameters[f"{UP}.A"].data[4:] = 0  # pruned before to rank 4
    parameters[f"{UP}.B"].data[:, 4:] = 0
    client.ranks = client.present_ranks()  # as at the start of local training
    expected = 0.01 * sum(tails(client, 0.6).values())
    assert penalty().item() == pytest.approx(expected, rel=1e-5)
    assert [pruned_rank(rank, 0.6) for rank in (1, 2, 7, 10)] == [1, 1, 4, 6]


def test_hetlora_prunes_where_the_tail_has_shrunk(start: Start) -> None:
    run = start("hetlora", gamma=0.6, penalty_weight=0.0)
    client: Any = run.clients["whaler"]
    one_round(run, list(RANKS))
    download = down(run, "whaler")
    # One layer's tail shrinks in training, all others' grow: local training made by hand.
    before = {}

    def train(round: int) -> None:
        before.update(tails(client, 0.6))
        for a, b in client.pairs.items():
            A, B = client.shared[a], client.shared[b]
            B.data[:, -3:] *= 0.5 if a == f"{UP}.A" else 2.0
            for p in (A, B):
                client.training._updaters["joint"].optimiser.state[p] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.ones_like(p),
                    "exp_avg_sq": torch.ones_like(p),
                }

    client.training.run = train
    sent = step(run, "whaler", 0, download)["experts"]
    assert before
    shared = client.shared
    ranks = {a: present_rank(shared[a]) for a in client.pairs}
    assert ranks == {a: 4 if a == f"{UP}.A" else 7 for a in ranks}
    assert sent[f"{UP}.A"].shape == (4, 32)
    assert sent[f"{UP}.B"].shape == (128, 4)
    assert sent[f"{DOWN}.A"].shape == (7, 128)
    state = client.state()
    moments = state.parts["training"].parts["joint"]
    for tensors in (state["adapter"], moments["exp_avg"], moments["exp_avg_sq"]):
        assert not tensors[f"{UP}.A"][4:].any()
        assert not tensors[f"{UP}.B"][:, 4:].any()
        assert tensors[f"{UP}.A"][:4].any()
        assert tensors[f"{DOWN}.B"][:, 4:].any()
    # A download of the first rank, from a server that lost the upload, is cut.
    client.receive(download)
    assert present_rank(shared[f"{UP}.A"]) == 4
    assert torch.equal(shared[f"{UP}.B"][:, :4], download["experts"][f"{UP}.B"][:, :4])
    assert not shared[f"{UP}.B"][:, 4:].any()


def test_hetlora_pruned_parts_stay_zero_and_the_model_is_restored(config, tmp_path: Path) -> None:
    method = {"name": "hetlora", "mlp": {"rank": RANKS}, "gamma": 0.6, "penalty_weight": 1.0}
    done = coterie.run(config(method=method, rounds=6), out=tmp_path / "run")
    lines = [line for line in RunFolder(done.path).metrics() if line["name"] == "rank"]
    last: dict[str, dict[str, int]] = {}
    for line in lines:
        former = last.get(line["client"], dict.fromkeys(line["value"], RANKS[line["client"]]))
        assert all(rank <= former[pair] for pair, rank in line["value"].items())
        last[line["client"]] = line["value"]
    assert min(last["whaler"].values()) < 7  # with such a penalty something is pruned
    state = RunFolder(done.path).load("client-whaler")
    moments = state.parts["training"].parts["joint"]
    for pair, rank in last["whaler"].items():
        for tensors in (state["adapter"], moments["exp_avg"], moments["exp_avg_sq"]):
            assert not tensors[f"{pair}.A"][rank:].any()
            assert not tensors[f"{pair}.B"][:, rank:].any()
    whaler = [line for line in RunFolder(done.path).metrics() if line["client"] == "whaler"]
    sizes = [line["value"] for line in whaler if line["name"] == "bytes/up"]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    assert torch.isfinite(done.model("whaler")(torch.arange(16).view(1, -1)).logits).all()
