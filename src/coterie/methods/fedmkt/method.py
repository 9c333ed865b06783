"""FedMKT: mutual knowledge transfer between large and small models (arXiv 2406.02224).

The server has a large base, and each client has a small base with its own tokenizer. All
participants have the same public set of prompts with answers. In a round (the paper's algorithm 1),

1. clients train on their private samples;
2. clients predict the public answers and upload, for each sample, their loss and their most likely
   tokens at every position;
3. the server translates these tokens into its own vocabulary (`alignment`), selects for each sample
   the predictions of the client with the lowest loss, if the client's loss is lower than the
   server's (DualMinCE), and minimises lambda * cross-entropy to the labels + (1 - lambda) *
   cross-entropy to the selected predictions;
4. the server translates its new predictions into each client's vocabulary and sends them; clients
   select from the server's predictions and learn from the selected predictions in the same way.

Losses are compared in nats per byte of the answer, a unit that does not depend on the tokenizer.
Weights are never sent, and neither are predictions on private samples.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from coterie.errors import CoterieError
from coterie.messages import Field as MessageField
from coterie.messages import Message, Schema
from coterie.methods.contract import SERVER, ClientContext, RunFacts, ServerContext
from coterie.methods.fedmkt.client import FedMKTClient
from coterie.methods.fedmkt.server import FedMKTServer
from coterie.methods.fedmkt.settings import FedMKTSettings
from coterie.methods.fedmkt.vocabulary import VOCABULARY

KNOWLEDGE = MessageField(
    "knowledge",
    "predictions on public samples: for each sample, a hash, the loss and the index of the first "
    "token position of the sample's answer; for each token position in an answer, the number of "
    "the answer's characters before it, the most likely tokens and their log-probabilities",
    {
        "samples": "int64",
        "losses": "float32",
        "starts": "int64",
        "ends": "int32",
        "tokens": "int32",
        "logprobs": "float16",
        "lognorm": "float32",
    },
    when="every round",
)


class FedMKT(FedMKTSettings):
    """Mutual distillation: the clients and the server learn from each other's predictions."""

    name: ClassVar[str] = "fedmkt"
    paper: ClassVar[str] = "arXiv 2406.02224"
    summary: ClassVar[str] = (
        "predictions on public samples exchanged; models and tokenizers may differ"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    learns_preferences: ClassVar[bool] = False
    shared_roles: ClassVar[tuple[str, ...]] = ()

    def schema(self) -> Schema:  # pyright: ignore[reportIncompatibleMethodOverride]
        mean = super().schema()
        up, down = (
            [replace(field, when=KNOWLEDGE.when) for field in fields]
            for fields in (mean.up, mean.down)
        )
        up += [KNOWLEDGE] if self.teaches else []
        taught = replace(KNOWLEDGE, description="the server's predictions on public samples")
        return Schema((*mean.hello, *VOCABULARY), tuple(up), (*down, taught))

    def exchanges(self, rounds: int) -> int:
        return rounds * self.per_round

    @property
    def mixes_bases(self) -> bool:
        return not self.shared_roles

    def check(self, run: RunFacts) -> None:
        super().check(replace(run, clients=(*run.clients, SERVER)))  # the server has an adapter too
        for satisfied, need in (
            (
                run.instructions,
                "pairs of a prompt and an answer that are rendered without a chat template: set "
                "data.instructions, and set data.instructions.template to a value other than chat",
            ),
            (run.public, "public samples: set data.public, or divide.public: true"),
            (run.server, "a server that has its own model: set server.base"),
        ):
            if not satisfied:
                raise CoterieError(f"The method {self.name!r} needs {need}.")

    def counts(self, message: Message) -> dict[str, int]:
        samples = message["knowledge"].get("samples")
        return {} if samples is None else {"public sample": len(samples)}

    def client(self, context: ClientContext) -> FedMKTClient:
        return FedMKTClient(self, context)

    def server(self, context: ServerContext) -> FedMKTServer:
        return FedMKTServer(self, context)


PRESETS = {
    # The paper's homogeneous setting. Adapters are averaged after the clients have learnt from the
    # server, so a round takes two exchanges: first of predictions, then of adapters.
    "fedmkt-fedavg": {
        "summary": "like fedmkt, but LoRA pairs are averaged too; all clients have the same base",
        "shared_roles": ("dense",),
        "per_round": 2,
    },
    # The paper's baseline: the server learns nothing.
    "llm2slm": {
        "summary": "like fedmkt, but the server's model only teaches and is not trained",
        "teaches": False,
    },
}
