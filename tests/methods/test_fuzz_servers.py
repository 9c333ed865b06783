"""Whatever clients say of themselves and upload: a method's server takes it or refuses it in a
sentence, and a round that follows is as if the others had been there alone."""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import NAMES, replace_one
from torch import Tensor

from coterie.engines.local import LocalRun
from coterie.errors import CoterieError
from coterie.messages import Message, State
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import close, down, joined, step

ROGUE = "diarist"
Groups = dict[str, dict[str, Tensor]]
MOST_PASSED_ON = 6
SHAPES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t[:0],
    lambda t: t[:1],
    lambda t: torch.cat([t, t]),
    lambda t: t[..., None],
    lambda t: t.flatten(),
    lambda t: t.transpose(0, -1).contiguous(),
    lambda t: t.sum(),
    lambda t: t.new_zeros(0, 2**40, 2**40) if t.dim() else t,
    lambda t: t.double(),
    lambda t: t.half(),
    lambda t: t.long(),
    lambda t: t.bool(),
    lambda t: t.to(torch.float8_e4m3fn),
    lambda t: torch.full_like(t, 127),
    lambda t: torch.full_like(t, -1),
    lambda t: torch.zeros_like(t),
    lambda t: t * 3e38 if t.is_floating_point() else t * 2**20,
    lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t,
    lambda t: t.flip(0),
]


def changed(message: Message, rng: random.Random) -> Message:
    """Return a message with one wrong entry."""
    groups: Groups = {name: dict(tensors) for name, tensors in message.groups.items()}
    values, tensors = dict(message.values), [(g, n) for g in groups for n in groups[g]]
    if values and (not tensors or rng.randrange(3) == 0):
        values = json.loads(replace_one(json.loads(json.dumps(values)), rng))
    elif tensors:
        group, name = rng.choice(tensors)
        match rng.randrange(6):
            case 0:
                del groups[group][name]
            case 1:
                groups[group][rng.choice(NAMES)] = groups[group].pop(name)
            case 2:
                groups[rng.choice(["adapter", "values", "x"])] = groups.pop(group)
            case 3:
                other = rng.choice(list(groups[group]))
                in_group = groups[group]
                in_group[name], in_group[other] = in_group[other].clone(), in_group[name].clone()
            case _:
                groups[group][name] = rng.choice(SHAPES)(groups[group][name]).clone()
    return Message(message.exchange, groups, values)


def wrong(message: Message, rng: random.Random) -> bytes | None:
    """Return the bytes of a message with one or two wrong entries, or None if it has no bytes."""
    try:
        for _ in range(rng.choice([1, 1, 2])):
            message = changed(message, rng)
        return message.encode()
    except (ValueError, TypeError, AssertionError, RecursionError, RuntimeError):
        return None  # it cannot even be written down


def fuzz(run: Any, seed: int, count: int) -> Counter[str]:
    """Send a server wrong hellos and uploads, and count its answers."""
    local, twin = joined(run), joined(run)
    names, rng = sorted(local.clients), random.Random(seed)
    uploads = {}
    for side in (local, twin):
        side.open(side.config.turn(0), names)
        uploads[side.server] = {name: step(side, name, 0) for name in names}
    outcomes, accepted = Counter[str](), list[bytes]()
    hello = local.clients[ROGUE].hello()
    for number in range(count):
        of_hello = number % 4 == 0
        data = wrong(hello if of_hello else uploads[local.server][ROGUE], rng)
        if data is None:
            outcomes["unwritable"] += 1
            continue
        try:
            (say_hello if of_hello else upload)(local, data)
            outcomes["taken"] += 1
            accepted += [] if of_hello else [data]
        except CoterieError:
            outcomes["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"{error!r} on {data[:3000]!r}") from error
    say_hello(local, local.clients.host(ROGUE).hello())
    for data in accepted[:MOST_PASSED_ON]:
        pass_on(local, uploads[local.server] | {ROGUE: local.schema.receive("up", data)})
    for side in (local, twin):
        side.open(side.config.turn(0), names)
        close(side, 0, {n: u for n, u in uploads[side.server].items() if n != ROGUE})
    assert_equal(local.value.state(), twin.value.state(), "server")
    return outcomes


def pass_on(local: LocalRun, uploads: dict[str, Message]) -> None:
    """Check that the other clients can use the result of the accepted uploads."""
    before, names = State.decode(local.value.state().encode()), sorted(uploads)
    local.open(local.config.turn(0), names)
    try:
        close(local, 0, uploads)
    except CoterieError:  # such as a mean that is not finite
        local.value = local.value.restored(before)
        return
    for name in names:
        if name != ROGUE:
            local.clients[name].receive(down(local, name))
    local.value = local.value.restored(before)


def say_hello(local: LocalRun, data: bytes) -> None:
    message = local.schema.receive("hello", data)
    local.server.prepare(ROGUE, message)
    local.exchange.join(ROGUE, message)
    local.value = local.server.join(local.value, ROGUE, message)


def upload(local: LocalRun, data: bytes) -> None:
    local.exchange.begin()
    local.take(ROGUE, data)
    local.exchange.settle()


def test_a_server_takes_or_refuses_what_clients_say(each_run) -> None:
    outcomes = fuzz(each_run, seed=0, count=40)
    if each_run.method.schema().up:
        assert outcomes["refused"] > 12, outcomes


@pytest.mark.thorough
def test_a_server_takes_or_refuses_much_more(each_run) -> None:
    fuzz(each_run, seed=1, count=260)
