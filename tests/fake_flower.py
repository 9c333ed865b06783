"""The part of Flower's public interface that Coterie uses, in one process."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest


@dataclass
class Metadata:
    """The data that identify a message."""

    message_type: str
    dst_node_id: int
    reply_to_message_id: str = ""


class Message:
    """An order, or the reply to another message. An error has no content."""

    def __init__(
        self,
        content: dict[str, Any] | None,
        dst_node_id: int = 0,
        message_type: str = "",
        *,
        ttl: float | None = None,
        group_id: str = "",
        reply_to: "Message | None" = None,
    ) -> None:
        self.content, self.metadata = content, Metadata(message_type, dst_node_id)
        assert reply_to is not None or ttl

    def has_content(self) -> bool:
        """Return whether the message is not an error."""
        return self.content is not None


@dataclass
class Context:
    """The configuration of a node and of the app."""

    node_config: Mapping[str, Any] = field(default_factory=dict)
    run_config: Mapping[str, Any] = field(default_factory=dict)


class App:
    """A server app or a client app, with a function for each type of message."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, kind: str) -> Callable[[], Callable[[Any], Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.functions[kind] = function
            return function

        return lambda: register


class Grid:
    """Nodes that execute a client app as soon as they receive a message.

    Args:
        app: The client app.
        nodes: The configuration of each node that is online, by id.
    """

    def __init__(self, app: App, nodes: dict[int, dict[str, Any]]) -> None:
        self.app, self.nodes = app, nodes
        self.replies: dict[str, Message] = {}
        self.sent: list[tuple[int, str]] = []
        """The node and the type of each message."""
        self.lose: Callable[[int], bool] = lambda _: False
        """Function that returns whether the message with a number has an error as its reply."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Execute the client app for each message, and return the ids of the messages."""
        return [self._execute(message) for message in messages]

    def _execute(self, message: Message) -> str:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        if node not in self.nodes:
            return ""
        self.sent.append((node, kind))
        id = f"message-{len(self.sent)}"
        try:
            reply = self.app.functions[kind](message, Context(self.nodes[node]))
        except Exception:
            reply = Message(None, reply_to=message)
        if self.lose(len(self.sent)):
            reply = Message(None, reply_to=message)
        reply.metadata.reply_to_message_id = id
        self.replies[id] = reply
        return id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to some messages, each once."""
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]


def install(patch: pytest.MonkeyPatch) -> None:
    """Make `import flwr` import the classes of this file."""
    for name, content in {
        "flwr": {},
        "flwr.app": {"ConfigRecord": dict, "Message": Message, "RecordDict": dict},
        "flwr.serverapp": {"ServerApp": App},
        "flwr.clientapp": {"ClientApp": App},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
