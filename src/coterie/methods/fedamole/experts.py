"""Names of FedAMoLE's experts in messages, used by clients and the server."""

Held = dict[str, list[int]]
"""For the path of each adapted layer, the ascending numbers of a client's domain experts."""


def expert_name(path: str, number: int) -> str:
    """Return the key under which a message contains a domain expert's mean embedding.

    The mean embedding is the mean of A x over the inputs x of a client's tokens, where A is the
    matrix A of the expert's LoRA pair.

    Args:
        path: The path of the layer to which the expert belongs.
        number: The expert's number on this layer.
    """
    return f"{path}.{number}"
