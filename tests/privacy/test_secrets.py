"""Secret keys: one for each exchange, kept by a client, and the same again after a kill."""

import json
from typing import Any

import pytest
import torch

import coterie
from coterie.exchanges.lazy import server_state
from coterie.messages import Message, Schema, State
from coterie.messages.schema import Way
from coterie.privacy import secrets
from coterie.privacy.secrets import KEY_BYTES, Secrets
from coterie.runs import RunFolder
from coterie.testing.contract import Stop
from coterie.testing.rounds import down, joined, one_round, step

NAMES = ["diarist", "poet", "whaler"]


@pytest.fixture
def private(noisy) -> coterie.RunConfig:
    return noisy(1.0)


def test_each_exchange_has_its_own_key_and_keeps_it() -> None:
    secrets = Secrets()
    keys = [[secrets.of(exchange) for _ in range(3)] for exchange in range(4)]
    assert all(len(set(repeated)) == 1 for repeated in keys)
    assert len({repeated[0] for repeated in keys}) == 4
    assert keys[0][0] != Secrets().of(0)


def test_a_state_gives_this_key_and_later_keys_but_no_earlier_key() -> None:
    secrets = Secrets()
    earlier = secrets.of(1).hex()
    key, state = secrets.of(2), secrets.state()
    assert earlier not in json.dumps(state)
    restored = Secrets()
    restored.restore(json.loads(json.dumps(state)))
    assert restored.of(2) == key
    assert restored.of(5) == secrets.of(5)
    assert secrets.of(4) == secrets.of(5)  # the server has gone back
    assert secrets.of(6) == restored.of(6)


def test_a_client_s_state_holds_them_where_it_has_noise_to_draw(private, noisy) -> None:
    local, plain = joined(private), joined(noisy(None))
    one_round(local, 0)
    for name in NAMES:
        state = local.clients[name].state()
        assert state.values["secrets"].keys() == {"exchange", "key"}
        assert State.decode(state.encode()).values == state.values
        assert "secrets" not in plain.clients[name].state().values


@pytest.mark.slow
def test_noise_is_of_the_secret_and_not_of_the_run_s_seed(private, monkeypatch) -> None:
    def sums(secret: int, run: coterie.RunConfig) -> torch.Tensor:
        monkeypatch.setattr(secrets, "draw", lambda: bytes([secret] * KEY_BYTES))
        tokens = one_round(joined(run), 0)["poet"]["tokens"]
        return torch.cat([tokens[path] for path in sorted(tokens)])

    assert torch.equal(sums(1, private), sums(1, private))
    assert not torch.equal(sums(1, private), sums(2, private))


def test_no_message_and_no_server_s_state_holds_one(private) -> None:
    def holds_key(content: bytes) -> bool:
        return any(key in content or key.hex().encode() in content for key in keys)

    local = joined(private)
    clients: Any = local.clients
    for round in range(2):
        local.open(local.config.turn(round), NAMES)
        for name in NAMES:
            messages = [down(local, name), step(local, name, round)]
            keys = [client.secrets.of(round) for client in clients.values()]
            assert not any(holds_key(message.encode()) for message in messages)
        assert holds_key(clients["poet"].state().encode())
        assert not holds_key(local.value.state().encode())


@pytest.mark.slow
def test_an_interrupted_round_is_repeated_with_its_secret(private, monkeypatch, tmp_path) -> None:
    # The secret has its real source. The round is repeated from a checkpoint and by a resumed run.
    with pytest.raises(KeyboardInterrupt):
        coterie.run(private, out=tmp_path / "cut", callbacks=[Stop()])
    cut = RunFolder(tmp_path / "cut")
    assert cut.turns() == 1
    by_hand = []
    for _ in range(2):
        local = joined(private)
        local.value = local.value.restored(server_state(cut))
        for name in NAMES:
            local.clients[name].restore(cut.load(f"client-{name}"))
        by_hand.append({n: up.encode() for n, up in one_round(local, 1).items()})
    assert by_hand[0] == by_hand[1]
    sent: list[bytes] = []
    send = Schema.send

    def seen(schema: Schema, way: Way, message: Message) -> bytes:
        data = send(schema, way, message)
        sent.extend([data] if way == "up" else [])
        return data

    monkeypatch.setattr(Schema, "send", seen)
    coterie.resume(cut.path)
    assert dict(zip(NAMES, sent[: len(NAMES)], strict=True)) == by_hand[0]
    assert len(sent) == 2 * len(NAMES)


def test_two_runs_have_other_noise(private) -> None:
    first, second = (one_round(joined(private), 0)["poet"] for _ in range(2))
    for path, mean in first["tokens"].items():
        assert not torch.equal(mean, second["tokens"][path])
    for name, tensor in first["adapter"].items():  # of what has none, nothing changes
        assert torch.equal(tensor, second["adapter"][name])
