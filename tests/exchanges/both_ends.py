"""A server and clients whose messages are encoded by transforms, without methods."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from turns import nth

from coterie.exchanges.codec import ClientTransforms, ServerTransforms
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.pipeline import Pipeline
from coterie.exchanges.spec import AggregationSpec
from coterie.messages import Field, Message, Schema
from coterie.privacy.ledger import Ledger
from coterie.runs.store import Store
from coterie.transforms.contract import Transform
from coterie.turn import TRAIN, Turn

ADAPTER = Field("adapter", "pairs", reduce="mean")
SCHEMA = Schema(up=(ADAPTER, Field("note", "numbers")), down=(ADAPTER,))
EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"


def example(name: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


UNBOUNDED = AggregationSpec(largest_change=None, largest_norm=None, largest_weight=None)


def exchange_of(
    schema: Schema, *transforms: Transform, rules: AggregationSpec = UNBOUNDED, exchanges: int = 4
) -> Exchange:
    """Return an exchange of a run without clients."""
    weighted = rules.weights == "tokens" and bool(schema.averaged)
    pipeline = Pipeline(transforms, schema, exchanges, weighted=weighted)
    return Exchange(Path(gettempdir()), pipeline, schema, rules, strict=True)


class Ends:
    """A server and clients whose payloads go through bytes."""

    def __init__(self, *transforms: Transform, clients: int = 3, limit: Any = None) -> None:
        self.pipeline = Pipeline(transforms, SCHEMA, exchanges=4)
        self.server = ServerTransforms(self.pipeline, Store(Path(gettempdir())))
        names = [f"c{i}" for i in range(clients)]
        self.clients = {n: ClientTransforms(self.pipeline, n, Ledger(limit=limit)) for n in names}

    def wire(self, way: Any, message: Message) -> Message:
        return self.pipeline.schema.receive(way, self.pipeline.schema.send(way, message))

    def begin(self, number: int, phase: str = TRAIN, clients: Iterable[str] | None = None) -> Turn:
        turn = Turn(number, number, number, phase)
        self.server.begin(turn, self.clients if clients is None else clients)
        return turn

    def down(self, number: int, message: Message, phase: str = TRAIN, clients: Any = None) -> Any:
        turn = self.begin(number, phase, clients)
        return {
            name: client.receive(self.wire("down", self.server.download(name, message)), turn)
            for name, client in self.clients.items()
        }

    def up(self, number: int, uploads: dict[str, Message], before: Message) -> dict[str, Message]:
        decoded = {}
        for name, message in uploads.items():
            arrived = self.wire("up", self.clients[name].send(message, nth(number)))
            decoded[name] = self.server.upload(name, arrived, before)
        self.server.commit(uploads)
        return decoded


def adapter(seed: int, size: int = 6) -> Message:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return Message(0, {"adapter": {"A": x}})


def a(message: Message) -> torch.Tensor:
    return message["adapter"]["A"]
