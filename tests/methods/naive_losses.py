"""Losses of adapters on all windows of a client's text, without the package's evaluation."""

from collections.abc import Mapping
from typing import Any

import torch
from auto_runs import window_losses
from torch import Tensor

from coterie.methods.tensors import copied, copy


def loss_of(
    local: Any, name: str, tensors: Mapping[str, Tensor], text: str = "validation"
) -> float:
    """Return the mean loss of an adapter, and leave the client unchanged."""
    client, length = local.clients[name], local.config.data.window + 1
    ids = getattr(local.clients.participants[name].data, text).ids.long()
    windows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    own = copied(client.shared)
    copy(tensors, client.shared)
    with torch.no_grad():
        loss = torch.stack(window_losses(client, windows)).mean().item()
    copy(own, client.shared)
    return loss
