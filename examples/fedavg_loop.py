"""FedAvg (McMahan et al., arXiv 1602.05629) with its round loop written by hand.

`python examples/fedavg_loop.py RUN.yaml` writes every client's state to CLIENT.safetensors. The
adapters are those of `coterie run RUN.yaml --set method=fedavg`, bit for bit.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import coterie
from coterie.config.run import RunConfig
from coterie.exchanges.mean import Contribution, weighted_mean
from coterie.messages import Message
from coterie.methods.contract import ClientSide
from coterie.testing import joined


def fedavg(config: RunConfig) -> Mapping[str, ClientSide]:
    """Train a run's clients, and return them by name."""
    clients = joined(config).clients
    names = sorted(clients)
    start = clients[names[0]].parameters().items()
    shared = {n: p.tensor.detach().clone() for n, p in start if config.method.shared(p)}
    for turn in map(config.turn, range(config.turns)):
        uploads: list[Contribution] = []
        for name in names:
            client = clients[name]
            client.receive(Message(turn.exchange, {"adapter": shared}))
            client.train(turn)
            uploads.append(Contribution(name, client.upload(turn).groups))
        shared = weighted_mean(uploads)["adapter"]
    for name in names:
        clients[name].receive(Message(config.rounds, {"adapter": shared}))
    return clients


if __name__ == "__main__":
    run = coterie.load_config(Path(sys.argv[1]), ["method=fedavg"])
    for name, client in fedavg(run).items():
        Path(f"{name}.safetensors").write_bytes(client.state().encode())
