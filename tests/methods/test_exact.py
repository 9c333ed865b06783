"""Exact averaging: clients' models against dense weights with the mean of their updates."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_mixture import WithPair, naive_mixture
from tensors import equal
from torch import Tensor, nn

import coterie
from coterie.adapters import detach, pairs_of
from coterie.adapters.layout import Layout
from coterie.bases import Base
from coterie.messages import Message, MessageError
from coterie.methods.adapter import AdapterClient
from coterie.runs import RunFolder
from coterie.testing.rounds import close, down, joined, step

METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "comigs-1g1s"},
    {"name": "comigs-2g"},
    {"name": "comigs-1g1s", "mlp": {"specialists": {"poet": 3, "others": 1}}},
]
IDS = ["averaged", "routed", "two generalists", "top 2 of 4"]
GAIN = 16 / 8**0.5


Start = Callable[..., tuple[Any, Base]]


@pytest.fixture(params=["gpt2", "llama"])
def start(request: pytest.FixtureRequest, bases: Path, config) -> Start:
    """Joined sides and their base."""

    def make(method: dict[str, Any]) -> tuple[Any, Base]:
        values = {"method": {**method, "exact": True}, "base": str(bases / request.param)}
        run = joined(config(**values))
        return run, run.clients.host(run.names[0]).base

    return make


def play(run: Any, round: int) -> dict[str, Message]:
    """Execute a round without its end, in which random numbers are added to all parameters."""
    run.open(run.config.turn(round), sorted(run.clients))
    uploads = {}
    for seed, name in enumerate(sorted(run.clients)):
        client = run.clients[name]
        client.training.run = lambda _, c=client, s=seed: move(c, 10 * round + s)
        uploads[name] = step(run, name, round)
    return uploads


def pairs(client: AdapterClient) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each pair, by the pair's name."""
    return {a.name[:-2]: (a.name, b.name) for a, b in pairs_of(client.parameters())}


def move(client: AdapterClient, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for parameter in client.adapter.tensors().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=chance)
    client.model()(torch.zeros(1, 2, dtype=torch.int64))  # so that there is routing to report


def dense_means(run: Any, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return each pair's mean update over clients, by pair; `held` contains earlier updates."""
    all_updates: dict[str, list[Tensor]] = {}
    for client in run.clients.values():
        for pair, names in pairs(client).items():
            if client.shared.keys() >= {*names}:
                A, B = (client.shared[name].detach().double() for name in names)
                all_updates.setdefault(pair, []).append(B @ A + held.get(pair, 0))
    return {pair: torch.stack(updates).mean(0) for pair, updates in all_updates.items()}


class Experts(nn.Module):
    """The MLPs of all experts."""

    def __init__(self, path: str, mlp: nn.Module, layout: Layout, p: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.path, self.mlp, self.layout, self.p = path, mlp, layout, p

    def forward(self, x: Tensor) -> Tensor:
        return naive_mixture(self.mlp, self.layout, self.path, self.p, x)


def naive(client: AdapterClient, base: Base, means: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Compute logits with dense updates instead of shared pairs, and one full MLP per expert."""
    adapter: Any = client.adapter
    detach(base.model)
    parameters = {name: tensor.detach() for name, tensor in adapter.tensors().items()}
    for pair, mean in means.items():  # the dense update is the product of itself and 1
        parameters |= {f"{pair}.A": mean.float(), f"{pair}.B": torch.eye(len(mean))}
    model, before = base.model, {}
    for path, module in list(model.named_modules()):
        A, B = (parameters.get(f"dense/{path}.{factor}") for factor in "AB")
        if path.endswith("mlp"):
            model.set_submodule(path, Experts(path, module, adapter.layout, parameters))
        elif A is not None and B is not None:
            model.set_submodule(path, WithPair(module, A, B, GAIN))
        else:
            continue
        before[path] = module
    logits = model(ids).logits
    for path, module in before.items():
        model.set_submodule(path, module)
    return logits


@pytest.mark.parametrize("method", METHODS, ids=IDS)
@torch.no_grad()
def test_models_have_the_mean_of_the_updates(method: dict[str, Any], start: Start) -> None:
    run, base = start(method)
    held: dict[str, Tensor] = {}
    for round in range(2):
        uploads = play(run, round)
        means = dense_means(run, held)
        close(run, round, uploads)
        ids = torch.arange(12).view(2, 6)
        for name in sorted(run.clients):
            client = run.clients[name]
            client.receive(down(run, name))
            expected = naive(client, base, means, ids)
            got = client.model()(ids).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            client.adapter.set_residual({})  # the means of A and B alone are something else
            assert (client.model()(ids).logits - expected).abs().max() > 1e-2
        for pair, mean in means.items():
            mean_of = run.message("poet")["adapter"]
            A, B = (mean_of[f"{pair}.{end}"].double() for end in "AB")
            held[pair] = mean - B @ A


def test_residuals_do_not_move_and_have_no_gradient(config, tmp_path: Path) -> None:
    run = config(method={"name": "comigs-1g1s", "exact": True}, rounds=2)
    done = coterie.run(run, out=tmp_path / "run")
    folder = RunFolder(done.path)
    states = [folder.load(f"client-{name}") for name in ("poet", "whaler")]
    residual = states[0]["residual"]
    parts = joined(run).clients["poet"].parameters()
    assert {parts[name].role for name in residual} == {"dense", "generalist"}
    assert equal(residual, states[1]["residual"])
    # No optimiser has moments of it.
    for _, state in states[0].parts["training"].walk():
        for kind, tensors in state.groups.items():
            shapes = {n: t.shape for n, t in tensors.items() if kind != "step"}
            assert shapes == {n: states[0]["adapter"][n].shape for n in shapes}
    # A loaded client has its residual.
    ids = torch.arange(16).view(1, -1)
    model = coterie.load(done.path, "poet")
    loaded = model(ids).logits
    assert torch.equal(loaded, done.model("poet")(ids).logits)


def test_one_client_alone_has_no_residual(start: Start) -> None:
    run, _ = start({"name": "fedavg"})
    run.open(run.config.turn(0), ["poet"])
    client = run.clients["poet"]
    client.training.run = lambda round: move(client, round)
    close(run, 0, {"poet": step(run, "poet", 0)})
    assert not run.message("poet")["residual"]


def test_residuals_of_a_wrong_shape_are_refused(start: Start) -> None:
    run, _ = start({"name": "fedavg"})
    close(run, 0, play(run, 0))
    client = run.clients["poet"]
    download = down(run, "poet")
    residual = download["residual"]
    a, b = next((a.name, b.name) for a, b in pairs_of(client.parameters()) if a.role == "dense")
    A, B = residual[a], residual[b]
    changes = [{a: A[:1]}, {a: A[:, :3]}, {b: B[:, :1]}, {b: B[:3]}, {a: A[0]}]
    wrong = [{**residual, **change} for change in (*changes, {"specialist.0/x.A": A})]
    wrong += [{n: t for n, t in residual.items() if n != missing} for missing in (a, b)]
    for tensors in wrong:
        with pytest.raises(MessageError, match=r"shape|missing|expected"):
            client.receive(Message(1, {**download.groups, "residual": tensors}))
    client.receive(Message(1, download.groups))
