"""The example of masked sums: what the server gets, also if clients disconnect or it lies."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from both_ends import Ends, a, adapter, example
from turns import nth

from coterie.errors import CoterieError
from coterie.messages import Message, MessageError
from coterie.transforms.contract import Contribution


@pytest.fixture
def masked() -> Ends:
    """Four clients that have exchanged public keys in turn 0."""
    ends = Ends(example("masked_sum").MaskedSum(), clients=4)
    assert ends.pipeline.stages[0].transform.before == ("keys",)
    ends.down(0, Message(), "keys")
    for name, client in ends.clients.items():
        ends.server.collect(name, client.answer(replace(nth(0), phase="keys")))
    ends.server.commit(ends.clients)
    return ends


def on_grid(message: Message) -> torch.Tensor:
    """Return the integers that an upload becomes before it is masked."""
    return (a(message).double() * 2**32).round().long()


def unmask(ends: Ends, names: Iterable[str]) -> None:
    """Let the clients whose uploads have arrived reveal masks."""
    ends.down(2, Message(), "unmask", names)
    for name in names:
        answer = ends.clients[name].answer(replace(nth(2), phase="unmask"))
        ends.server.collect(name, answer)


@pytest.mark.parametrize("uploaded", [("c0", "c1", "c2", "c3"), ("c0", "c2", "c3"), ("c1", "c2")])
def test_masks_are_removed_from_the_sum_and_hide_each_upload(masked, uploaded) -> None:
    before, uploads = adapter(0), {name: adapter(i) for i, name in enumerate(uploaded, 1)}
    masked.down(1, before)
    arrived = masked.up(1, uploads, before)
    for name, message in arrived.items():
        assert a(message).dtype == torch.int64
        assert (a(message) != on_grid(uploads[name])).all()
    contributions = [Contribution(name, message.groups) for name, message in arrived.items()]
    with pytest.raises(CoterieError, match=f"needs an answer of {', '.join(uploaded)}, whose"):
        masked.server.reduce(contributions, [*masked.clients])
    unmask(masked, uploaded)
    mean = masked.server.reduce(contributions, [*masked.clients])["adapter"]["A"]
    integers = torch.stack([on_grid(message) for message in uploads.values()]).sum(0)
    assert torch.equal(mean, (integers.double() / 2**32 / len(uploaded)).float())
    for name in uploaded:  # the masks do not fit another sum
        fewer = [each for each in contributions if each.client != name]
        other = masked.server.reduce(fewer, [*masked.clients])["adapter"]["A"]
        assert (other.abs() > 2**8).all()


def test_invalid_answers_are_refused(masked) -> None:
    for phase, answers in (("keys", ["00", {}, None]), ("unmask", ["00" * 32, {}, {"c0": "00"}])):
        masked.begin(0, phase)
        for answer in answers:
            with pytest.raises(MessageError, match=f"no valid answer in the phase '{phase}'"):
                masked.server.collect("c0", Message(0, values={"masked_sum": answer}))


def test_a_repeated_exchange_has_new_masks(masked) -> None:
    # With the masks of the first attempt, the difference of the uploads would be visible.
    states = {name: client.state() for name, client in masked.clients.items()}
    attempts: list[torch.Tensor] = []
    updates = adapter(1), adapter(2)
    for update in updates:
        for name, client in masked.clients.items():
            client.restore(states[name])
        masked.down(1, adapter(0))
        attempts.append(a(masked.clients["c0"].send(update, nth(1))))
    plain = on_grid(updates[1]) - on_grid(updates[0])
    assert ((attempts[1] - attempts[0] - plain).abs() > 2**40).all()


def test_no_server_gets_two_uploads_with_the_same_masks(masked) -> None:
    # A hostile server repeats its nonce, or leaves peers out; the client may have been restored.
    client, states = masked.clients["c0"], masked.clients["c0"].state()
    masked.down(1, adapter(0))
    download = masked.server.download("c0", adapter(0))
    first = client.send(adapter(1), nth(1))
    assert torch.equal(a(client.send(adapter(1), nth(1))), a(first))  # an exact repetition
    value = download.values["masked_sum"]
    fewer = {**value, "keys": {n: key for n, key in value["keys"].items() if n != "c2"}}
    for sent, update in ((value, adapter(2)), (fewer, adapter(1)), (fewer, adapter(2))):
        client.restore(states)
        client.receive(replace(download, values={"masked_sum": sent}), nth(1))
        with pytest.raises(CoterieError, match="another upload with masks that are used up"):
            client.send(update, nth(1))


def test_no_client_reveals_the_masks_of_a_single_upload(masked) -> None:
    # A hostile server asks for a client's own mask, and for those that it shares with all.
    client, turn = masked.clients["c0"], replace(nth(2), phase="unmask")
    masked.down(1, adapter(0))
    client.send(adapter(1), nth(1))

    def asked(*names: str) -> Message:
        client.receive(Message(values={"masked_sum": [*names]}), turn)
        return client.answer(turn)

    for names in (["c0"], ["c1", "c2", "c3"], [], ["c0", "stranger"]):
        with pytest.raises(CoterieError, match="masks that hide a single upload"):
            asked(*names)
    state, answer = client.state(), asked("c0", "c1", "c2")
    assert answer.values["masked_sum"].keys() == {"c0", "c3"}
    for names in (["c0", "c1"], ["c0", "c1", "c2", "c3"]):
        client.restore(state)
        with pytest.raises(CoterieError, match="the masks of other clients than before"):
            asked(*names)
    assert asked("c0", "c1", "c2").values == answer.values
