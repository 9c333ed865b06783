"""FedMKT: a large model and small ones with other tokenizers teach each other (arXiv 2406.02224).

Every client has a base of its own, and so has the server; all of them see a public set of prompts
with answers. In a round (the paper's algorithm 1)

1. clients train on their private samples;
2. they predict the public answers and upload how well they did, and their likeliest tokens;
3. the server moves these into its tokens (`alignment`), keeps for each sample those of the client
   that did best, where it did better than the server itself (DualMinCE), and learns from them:
   lambda * cross-entropy to the labels + (1 - lambda) * that to what it kept;
4. it sends what it predicts now, in each client's tokens, and clients choose and learn likewise.

How well a side did is compared in nats per byte of the answer, whatever its tokens. No weights
travel, and no private sample is predicted for others.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from coterie.adapters import Role
from coterie.errors import CoterieError
from coterie.messages import Field as Travels
from coterie.messages import Message, Schema
from coterie.methods.contract import SERVER, ClientContext, RunFacts, ServerContext
from coterie.methods.fedmkt.client import FedMKTClient
from coterie.methods.fedmkt.server import FedMKTServer
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import VOCABULARY

KNOWLEDGE = Travels(
    "knowledge",
    "predictions on public samples: sample hashes, losses, start of each sample, end of the "
    "text read at each position, most likely tokens and their log-probabilities",
    {
        "samples": "int64",
        "losses": "float32",
        "starts": "int64",
        "ends": "int32",
        "tokens": "int32",
        "logprobs": "float16",
        "lognorm": "float32",
    },
)


class FedMKT(FedMKTSettings):
    """Clients and the server learn from one another's predictions."""

    name: ClassVar[str] = "fedmkt"
    paper: ClassVar[str] = "arXiv 2406.02224"
    summary: ClassVar[str] = (
        "predictions on public samples exchanged; models and tokenizers may differ"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    learns_preferences: ClassVar[bool] = False
    shared_roles: ClassVar[tuple[Role, ...]] = ()

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Predictions both ways; the client's vocabulary once."""
        mean = super().schema()
        up = (*mean.up, KNOWLEDGE) if self.teaches else mean.up
        return Schema((*mean.hello, *VOCABULARY), up, (*mean.down, KNOWLEDGE))

    def exchanges(self, rounds: int) -> int:
        """Two a round where adapters are averaged, too."""
        return rounds * self.per_round

    @property
    def mixes_bases(self) -> bool:
        """Clients may have any base, unless their adapters are averaged, too."""
        return not self.shared_roles

    def check(self, run: RunFacts) -> None:
        """There are public samples and a server's model, which has an adapter, too."""
        super().check(replace(run, clients=(*run.clients, SERVER)))
        for there, remedy in (
            (
                run.instructions,
                "prompts with answers that no chat template renders: set "
                "data.instructions, with another template than chat",
            ),
            (run.public, "public samples: set data.public, or divide.public: true"),
            (run.server, "a model of the server's own: set server.base"),
        ):
            if not there:
                raise CoterieError(f"The method {self.name!r} needs {remedy}.")

    def counts(self, message: Message) -> dict[str, int]:
        """The public samples that a message tells of."""
        samples = message["knowledge"].get("samples")
        return {} if samples is None else {"public sample": len(samples)}

    def client(self, context: ClientContext) -> FedMKTClient:
        """Trains, then learns from the server."""
        return FedMKTClient(self, context)

    def server(self, context: ServerContext) -> FedMKTServer:
        """Learns from the clients."""
        return FedMKTServer(self, context)


PRESETS = {
    # The paper's homogeneous setting. Clients have learnt from the server before they average their
    # adapters, so a round takes two exchanges: of predictions, and then of adapters.
    "fedmkt-fedavg": {
        "summary": "as fedmkt, with averaged LoRA pairs; all clients have the same base",
        "shared_roles": ("dense",),
        "per_round": 2,
    },
    # The paper's baseline: the server learns nothing.
    "llm2slm": {
        "summary": "as fedmkt, in one direction: the server's model teaches and is not trained",
        "teaches": False,
    },
}
