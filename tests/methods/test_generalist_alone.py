"""Clients with one expert, the generalist, beside clients with more (CoMiGS, figures 6 and 13)."""

import torch

from coterie.analysis.trial import first_exchange, start
from coterie.engines.session import Session


def test_a_client_with_the_generalist_alone_learns_with_the_others(config) -> None:
    """It has no specialist and no router; generalists are averaged over all clients."""
    specialists = {"poet": 0, "others": 3}
    run = start(
        Session(config()),
        config(method={"name": "comigs-1g1s", "mlp": {"specialists": specialists}}),
    )
    held = {
        name: {part.role for part in side.parameters().values()}
        for name, side in run.clients.items()
    }
    alone = {"dense", "generalist"}
    assert held == {
        "diarist": alone | {"specialist", "router"},
        "poet": alone,
        "whaler": alone | {"specialist", "router"},
    }
    messages = first_exchange(run)
    uploads = [message["up"]["adapter"] for message in messages.values()]
    assert uploads[0].keys() == uploads[1].keys() == uploads[2].keys()
    for name, tensor in messages["poet"]["down"]["adapter"].items():
        mean = torch.stack([upload[name].double() for upload in uploads]).mean(0)
        assert torch.allclose(tensor.double(), mean, atol=1e-7)
