"""Alternating LoRA, as in RoLoRA (Chen et al., arXiv 2502.01755): B in even rounds, A in odd ones.

With one factor fixed and equal for all clients, the mean of products is the product of means.
"""

from typing import ClassVar

from coterie.adapters import Adapter
from coterie.messages import Message
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer
from coterie.methods.settings import Attention, Lora


def factor(round: int) -> str:
    """Return the factor that a round trains."""
    return "A" if round % 2 else "B"


class AlternatingAdapter(Adapter):
    trained = "B"

    def require_grad(self, *roles):
        """Freeze the other factor. This is called before every update, with its level's roles."""
        super().require_grad(*roles)
        for parameter in self.parameters().values():
            if parameter.factor != self.trained:
                parameter.tensor.requires_grad_(False)


class Alternating(AdapterMethod):
    name: ClassVar[str] = "alternating"
    paper: ClassVar[str] = "arXiv 2502.01755"
    summary: ClassVar[str] = "B travels in even rounds, A in odd ones"

    attention: Attention = Attention()
    lora: Lora = Lora()

    def adapter(self, base, seed, client):
        return AlternatingAdapter(base, self.layout(client), seed, client, self.shared)

    def shared(self, parameter):
        return parameter.role == "dense"

    def client(self, context):
        return AlternatingClient(self, context)

    def server(self, context):
        return AlternatingServer(self, context)


class AlternatingClient(AdapterClient):
    def train(self, exchange):
        self.adapter.trained = factor(exchange)
        super().train(exchange)

    def upload(self, exchange):
        parts, tensors = self.parameters(), super().upload(exchange)["adapter"]
        sent = {n: t for n, t in tensors.items() if parts[n].factor == factor(exchange)}
        return Message(exchange, {"adapter": sent})


class AlternatingServer(AdapterServer):
    def expects(self, client):
        """Return the shapes of this round's factor; `self.parts` says what each tensor is."""
        shapes = self.held[client].items()
        return {
            "adapter": {
                n: s for n, s in shapes if self.parameters[n].factor == factor(self.exchange)
            }
        }
