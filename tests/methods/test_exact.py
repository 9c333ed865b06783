"""Exact averaging: clients' models against dense weights with the mean of their updates."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.adapters import detach, pairs_of
from coterie.bases import Base
from coterie.engines.local import LocalRun
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


@pytest.fixture(params=["gpt2", "llama"])
def start(
    request: pytest.FixtureRequest, bases: Path, config: Callable[..., coterie.RunConfig]
) -> Callable[..., tuple[LocalRun, Base]]:
    """Joined sides and their base."""

    def make(method: dict[str, Any]) -> tuple[LocalRun, Base]:
        values = {"method": {**method, "exact": True}, "base": str(bases / request.param)}
        run = joined(config(**values))
        return run, run.clients.host(run.names[0]).base

    return make


def play(run: LocalRun, round: int) -> dict[str, Message]:
    """A round, but for its end, in which local training moves every parameter, personal ones too,
    by chance."""
    run.open(run.config.turn(round), sorted(run.clients))
    uploads = {}
    for seed, name in enumerate(sorted(run.clients)):
        client = run.clients[name]
        assert isinstance(client, AdapterClient)
        client.training.run = lambda _, c=client, s=seed: move(c, 10 * round + s)  # pyright: ignore
        uploads[name] = step(run, name, round)
    return uploads


def pairs(client: AdapterClient) -> dict[str, tuple[str, str]]:
    """The names of A and B of each pair, by what they have in common."""
    return {a.name[:-2]: (a.name, b.name) for a, b in pairs_of(client.parameters())}


def move(client: AdapterClient, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for parameter in client.adapter.tensors().values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=chance)
    client.model()(torch.zeros(1, 2, dtype=torch.int64))  # so that there is routing to report


def dense_means(run: LocalRun, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over clients of each pair's whole update, by pair; `held` is what came before."""
    found: dict[str, list[Tensor]] = {}
    for client in run.clients.values():
        assert isinstance(client, AdapterClient)
        for pair, names in pairs(client).items():
            if not client.shared.keys() >= {*names}:
                continue
            A, B = (client.shared[name].detach().double() for name in names)
            found.setdefault(pair, []).append(B @ A + held.get(pair, 0))
    return {pair: torch.stack(updates).mean(0) for pair, updates in found.items()}


class Whole(nn.Module):
    """A linear layer with a dense addition to its weight."""

    def __init__(self, base: nn.Module, update: Tensor) -> None:
        super().__init__()
        self.base, self.update = base, update

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + GAIN * x @ self.update.to(x.dtype).t()


def naive(client: AdapterClient, base: Base, means: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits of the base with shared pairs replaced by dense updates, one full MLP per expert."""
    adapter, model = client.adapter, base.model
    detach(model)
    parameters = adapter.tensors()

    def update(pair: str) -> Tensor:
        if pair in means:
            return means[pair]
        return parameters[f"{pair}.B"].detach().double() @ parameters[f"{pair}.A"].detach().double()

    class Experts(nn.Module):
        def __init__(self, path: str, mlp: nn.Module) -> None:
            super().__init__()
            self.path, self.mlp = path, mlp
            linears = [n for n, m in mlp.named_children() if hasattr(m, "weight")]
            names = [n.split("/")[0] for n in parameters if n.endswith(f"/{path}.{linears[0]}.A")]
            self.names = sorted(names)  # generalists, then specialists
            self.linears = linears

        def expert(self, name: str, x: Tensor) -> Tensor:
            plain = {linear: getattr(self.mlp, linear) for linear in self.linears}
            for linear, module in plain.items():
                whole = Whole(module, update(f"{name}/{self.path}.{linear}"))
                setattr(self.mlp, linear, whole)
            y = self.mlp(x)
            for linear, module in plain.items():
                setattr(self.mlp, linear, module)
            return y

        def forward(self, x: Tensor) -> Tensor:
            outputs = torch.stack([self.expert(name, x) for name in self.names])
            router = parameters.get(f"router/{self.path}.weight")
            if router is None:
                return outputs.mean(0)
            best, chosen = (x @ router.detach().t()).topk(min(2, len(self.names)), dim=-1)
            weights = torch.zeros(*x.shape[:-1], len(self.names)).scatter(
                -1, chosen, best.softmax(-1)
            )
            return (outputs * weights.movedim(-1, 0).unsqueeze(-1)).sum(0)

    replaced = {}
    for path, module in list(model.named_modules()):
        if path.endswith("mlp"):
            replaced[path] = Experts(path, module)
        elif f"dense/{path}" in means:
            replaced[path] = Whole(module, means[f"dense/{path}"])
    before = {path: model.get_submodule(path) for path in replaced}
    for path, module in replaced.items():
        model.set_submodule(path, module)
    logits = model(ids).logits
    for path, module in before.items():
        model.set_submodule(path, module)
    return logits


@pytest.mark.parametrize("method", METHODS, ids=IDS)
@torch.no_grad()
def test_models_have_the_mean_of_the_updates(
    method: dict[str, Any], start: Callable[..., tuple[LocalRun, Base]]
) -> None:
    run, base = start(method)
    held: dict[str, Tensor] = {}
    for round in range(2):
        uploads = play(run, round)
        means = dense_means(run, held)
        close(run, round, uploads)
        ids = torch.arange(12).view(2, 6)
        for name in sorted(run.clients):
            client = run.clients[name]
            assert isinstance(client, AdapterClient)
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


def test_residuals_do_not_move_and_have_no_gradient(
    config: Callable[..., coterie.RunConfig], tmp_path: Path
) -> None:
    run = config(method={"name": "comigs-1g1s", "exact": True}, rounds=2)
    done = coterie.run(run, out=tmp_path / "run")
    folder = RunFolder(done.path)
    states = [folder.load(f"client-{name}") for name in ("poet", "whaler")]
    residual = states[0]["residual"]
    parts = joined(run).clients["poet"].parameters()
    assert {parts[name].role for name in residual} == {"dense", "generalist"}
    assert residual.keys() == states[1]["residual"].keys()
    assert all(torch.equal(tensor, states[1]["residual"][n]) for n, tensor in residual.items())
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


def test_one_client_alone_has_no_residual(start: Callable[..., tuple[LocalRun, Base]]) -> None:
    run, _ = start({"name": "fedavg"})
    run.open(run.config.turn(0), ["poet"])
    client = run.clients["poet"]
    assert isinstance(client, AdapterClient)
    client.training.run = lambda round: move(client, round)  # pyright: ignore
    close(run, 0, {"poet": step(run, "poet", 0)})
    assert not run.message("poet")["residual"]


def test_residuals_of_a_wrong_shape_are_refused(
    start: Callable[..., tuple[LocalRun, Base]],
) -> None:
    run, _ = start({"name": "fedavg"})
    close(run, 0, play(run, 0))
    client = run.clients["poet"]
    assert isinstance(client, AdapterClient)
    download = down(run, "poet")
    residual = download["residual"]
    a, b = next((a.name, b.name) for a, b in pairs_of(client.parameters()) if a.role == "dense")
    A, B = residual[a], residual[b]

    def told(tensors: Mapping[str, Tensor]) -> Message:
        return Message(1, {**download.groups, "residual": tensors})

    wrong = [
        {a: A[:1]},
        {a: A[:, :3]},
        {b: B[:, :1]},
        {b: B[:3]},
        {a: A[0]},
        {"specialist.0/x.A": A},
    ]
    for change in wrong:
        with pytest.raises(MessageError, match=r"shape|expected"):
            client.receive(told({**residual, **change}))
    for missing in (a, b):
        rest = {name: tensor for name, tensor in residual.items() if name != missing}
        with pytest.raises(MessageError, match=r"missing|expected"):
            client.receive(told(rest))
    client.receive(told(residual))
