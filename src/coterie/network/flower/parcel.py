"""Bytes as Flower's messages: one array of raw bytes, which Flower cuts into chunks."""

from collections.abc import Callable

from flwr.app import Array, ArrayRecord, Message, RecordDict

from coterie.messages import MessageError
from coterie.network.flower.private import (
    CHUNK,
    InflatableObject,
    ObjectTree,
    ProtoMessage,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    message_to_proto,
    no_object_id_recompute,
    pull_and_inflate_object_from_tree,
    remove_content_from_message,
)

NAME = "coterie"
AROUND = 8
"""Objects of a message that are not chunks of its array, at most."""


def content(data: bytes) -> RecordDict:
    """Bytes as the content of a Flower message."""
    array = Array(dtype="uint8", shape=(len(data),), stype=NAME, data=data)
    return RecordDict({NAME: ArrayRecord({NAME: array})})


def unpack(message: Message) -> bytes:
    """The bytes in a Flower message; raises MessageError if it holds anything else."""
    try:
        record = message.content[NAME]
        if isinstance(record, ArrayRecord):
            return bytes(record[NAME].data)
    except (KeyError, ValueError):
        pass
    raise MessageError("A Flower message without a Coterie envelope was received.")


def prepare(message: Message) -> tuple[ProtoMessage, ObjectTree, dict[str, InflatableObject]]:
    """What Flower's API takes to push a message: itself, its tree of objects, and these."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with no_object_id_recompute():
        tree, objects = get_object_tree(message), get_all_nested_objects(message)
        return message_to_proto(remove_content_from_message(message)), tree, objects


def fetch(
    tree: ObjectTree, pull: Callable[[str], bytes], confirm: Callable[[str], None], largest: int
) -> Message:
    """A message of at most `largest` bytes, by its tree; raises MessageError if it has more.

    Whoever proxies the network limits an object to little more than a chunk, so a message is no
    larger than the number of its objects allows.
    """
    if sum(1 for _ in iterate_object_tree(tree)) > largest // CHUNK + 1 + AROUND:
        confirm(tree.object_id)
        raise MessageError(f"The message exceeds {largest:,} bytes.")
    message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message
