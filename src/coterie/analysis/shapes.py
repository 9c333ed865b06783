"""The objects of a run without the base's weights, from whose shapes needs are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from coterie.analysis.activations import is_known
from coterie.analysis.held import Held, held_by, kept_dtype, loaded_dtype
from coterie.analysis.sizes import Sizes, sizes_of, with_residuals
from coterie.bases import Base, load_skeleton, load_tokenizer
from coterie.bases.precision import prepare
from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import NOTHING, Participant, client_context
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId

WINDOWS = 20
"""The number of windows in the text of a client whose needs are computed."""


@dataclass(frozen=True)
class Shapes:
    """The objects of a run without the base's weights, whose shapes determine all needs."""

    client: ClientId
    side: ClientSide
    """The method's client-side object, whose base is on the meta device."""
    skeleton: PreTrainedModel
    kept: torch.dtype
    """The dtype of the base's checkpoint."""
    held: Held
    exchange: Sizes | None

    @property
    def trains_weights(self) -> bool:
        """Whether the adapter replaces weights of the base."""
        return any(p.kind.replaces_weights for p in self.side.parameters().values())


def shapes_of(config: RunConfig, client: ClientId) -> Shapes | None:
    """Create the objects of a run without the base's weights, and execute a dry run of exchanges.

    Args:
        config: The run.
        client: The client's name.

    Returns:
        The objects, or None if the needs are unknown; see `coterie.analysis.need.need_of`.

    Raises:
        CoterieError: If the base does not exist.
    """
    spec, training, method = config.base_of(client), config.training_of(client), config.method
    tokenizer = load_tokenizer(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    if not is_known(skeleton):
        return None
    kept = kept_dtype(skeleton)
    prepare(skeleton.to(loaded_dtype(spec, kept, training)), config.precision, config.data.window)
    base = Base(skeleton, tokenizer, config.precision, torch.device("meta"))
    make = cache(partial(_side, config, base))
    try:
        side = make(client)
    except NotImplementedError:  # the method computes with the base's weights
        return None
    parameters = side.parameters().values()
    if not parameters or any(p.kind.extends_input for p in parameters):
        return None
    if any(not isinstance(field.dtype, str) and not field.peers for field in method.schema().down):
        return None  # clients learn from predictions (FedMKT)

    def side_of(name: ClientId) -> ClientSide:
        alike = isinstance(method, AdapterMethod) and method.layout(name) == method.layout(client)
        return side if alike else make(name)

    held = held_by(side, config)
    exchange = with_residuals(config, side, sizes_of(config, skeleton, side_of))
    return Shapes(client, side, skeleton, kept, held, exchange)


def side_without_texts(
    config: RunConfig,
    base: Base,
    client: ClientId,
    tests: Sequence[str] = (),
    text: Tokens = NOTHING,
) -> ClientSide:
    """Create the method's client-side object without loading the client's texts.

    Args:
        config: The run.
        base: The client's base, possibly on the meta device.
        client: The client's name.
        tests: The names of the test texts on which the client would be scored.
        text: The text that replaces each of the client's texts.
    """
    data = ClientData(text, text, text)
    participant = Participant(client, data, dict.fromkeys(tests, text))
    return config.method.client(client_context(config, base, participant, lambda *_: None))


def _side(config: RunConfig, base: Base, client: ClientId) -> ClientSide:
    tokens = torch.zeros(WINDOWS * (config.data.window + 1), dtype=torch.int32)
    return side_without_texts(config, base, client, text=Tokens(tokens, len(tokens)))
