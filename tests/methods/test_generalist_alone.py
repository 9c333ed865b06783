"""Clients with one expert, the generalist, beside clients with more (CoMiGS, figures 6 and 13)."""

from tensors import close_to, mean_of

from coterie.analysis.trial import first_exchange, start
from coterie.engines.session import Session


def test_a_client_with_the_generalist_alone_learns_with_the_others(config) -> None:
    # The client has no specialist and no router; generalists are averaged over all clients.
    specialists = {"poet": 0, "others": 3}
    method = {"name": "comigs-1g1s", "mlp": {"specialists": specialists}}
    run = start(Session(config()), config(method=method))
    for name, side in run.clients.items():
        more = set() if name == "poet" else {"specialist", "router"}
        roles = {part.role for part in side.parameters().values()}
        assert roles == {"dense", "generalist"} | more
    messages = first_exchange(run)
    uploads = [message["up"]["adapter"] for message in messages.values()]
    assert uploads[0].keys() == uploads[1].keys() == uploads[2].keys()
    assert close_to(messages["poet"]["down"]["adapter"], mean_of(uploads), atol=1e-7)
