"""The example of masked sums: what the server gets, also if it repeats an exchange."""

from dataclasses import replace

import pytest
import torch
from both_ends import Ends, a, adapter, example

from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.transforms.contract import Contribution


@pytest.fixture
def masked() -> Ends:
    """Three clients that have exchanged public keys in exchange 0."""
    ends = Ends(example("masked_sum").MaskedSum())
    assert ends.pipeline.stages[0].transform.before == ("keys",)
    ends.down(0, Message(), "keys")
    for name, client in ends.clients.items():
        ends.server.collect(name, client.answer("keys", 0))
    ends.server.commit(ends.clients)
    return ends


def on_grid(message: Message) -> torch.Tensor:
    """Return the integers that an upload becomes before it is masked."""
    return (a(message).double() * 2**32).round().long()


def test_masks_cancel_in_the_sum_and_hide_each_upload(masked) -> None:
    with pytest.raises(MessageError, match="c0 sent no public key"):
        masked.server.collect("c0", Message(0, values={"masked_sum": "00"}))
    before, uploads = adapter(0), {n: adapter(i + 1) for i, n in enumerate(masked.clients)}
    masked.down(1, before)
    arrived = masked.up(1, uploads, before)
    for name, message in arrived.items():
        assert a(message).dtype == torch.int64
        assert (a(message) != on_grid(uploads[name])).all()
    contributions = [Contribution(n, m.groups) for n, m in arrived.items()]
    mean = masked.server.reduce(contributions)
    assert mean is not None
    expected = torch.stack([a(m).double() for m in uploads.values()]).mean(0).float()
    torch.testing.assert_close(mean["adapter"]["A"], expected, rtol=0, atol=1e-7)
    with pytest.raises(CoterieError, match="needs the upload of every client"):
        masked.server.reduce(contributions[:2])


def test_a_repeated_exchange_has_new_masks(masked) -> None:
    """With the masks of the first attempt, the difference of the uploads would be visible."""
    states = {name: client.state() for name, client in masked.clients.items()}
    attempts: list[torch.Tensor] = []
    updates = adapter(1), adapter(2)
    for update in updates:
        for name, client in masked.clients.items():
            client.restore(states[name])
        masked.down(1, adapter(0))
        attempts.append(a(masked.clients["c0"].send(update, 1)))
    plain = on_grid(updates[1]) - on_grid(updates[0])
    assert ((attempts[1] - attempts[0] - plain).abs() > 2**40).all()


def test_no_server_gets_two_uploads_with_the_same_masks(masked) -> None:
    """A hostile server repeats its nonce, or leaves peers out; the client may have been undone."""
    client, states = masked.clients["c0"], masked.clients["c0"].state()
    masked.down(1, adapter(0))
    download = masked.server.download("c0", adapter(0))
    first = client.send(adapter(1), 1)
    assert torch.equal(a(client.send(adapter(1), 1)), a(first))  # an exact repetition
    value = download.values["masked_sum"]
    fewer = {**value, "keys": {n: key for n, key in value["keys"].items() if n != "c2"}}
    for sent, update in ((value, adapter(2)), (fewer, adapter(1)), (fewer, adapter(2))):
        client.restore(states)
        client.receive(replace(download, values={"masked_sum": sent}), 1)
        with pytest.raises(CoterieError, match="another upload with masks that are used up"):
            client.send(update, 1)
