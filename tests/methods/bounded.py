"""Exchanges with the bounds of uploads, in which a client may upload a larger change."""

from typing import Any

from torch import Tensor
from turns import nth

from coterie.testing.rounds import step


def bounded_round(
    local: Any, round: int, names: list[str], liar: str = "", times: float = 1, of: str = ""
) -> dict[str, str]:
    """Execute an exchange, and return the reasons for exclusions.

    Args:
        local: The run.
        round: The number of the exchange.
        names: The clients that take part.
        liar: The client that uploads a multiple of a change.
        times: The factor of the change, which is measured from the start of the training.
        of: The client whose change the liar uploads, which stands before the liar in `names`.
            The default is the liar.
    """
    local.open(nth(round), names)
    local.exchange.begin()
    changes: dict[tuple[str, str], Tensor] = {}
    for name in names:
        upload = step(local, name, round)
        starts = local.server.reference(local.value, name, upload, local.exchange)
        for group, start in starts.items() if name in (liar, of) else ():
            for n, tensor in upload.groups.get(group, {}).items():
                if name == (of or liar):
                    changes[group, n] = tensor - start[n]
                if name == liar:
                    tensor.copy_(start[n] + times * changes[group, n])
        local.take(name, local.schema.send("up", upload))
    local.exchange.settle()
    local.close()
    return dict(local.exchange.refused)
