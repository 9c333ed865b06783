"""Base classes of a method's two objects.

The client-side object runs where a client's data are, and the server-side object on the server.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, cast

from transformers import PreTrainedModel
from typing_extensions import TypeVar

from coterie.adapters import Parameter
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Groups, Message, Shapes, State, check_shapes
from coterie.methods.value import Value
from coterie.training.context import ClientId
from coterie.turn import Turn

V = TypeVar("V", bound=Value, default=Value)


class ClientSide:
    """The client-side object of a method, one per client. By default, it uploads no parameters.

    An engine calls `hello` once. In every exchange, it then calls `receive`, `train` and `upload`,
    in this order. After the last exchange, it calls `receive` once more. The engine does not tell
    the object when or how often the client's model is evaluated.
    """

    copies: ClassVar[int] = 0
    """The number of copies of its state that the object holds during training."""

    def hello(self) -> Message:
        """Return the message that the client sends when it joins.

        Returns:
            A message with the facts that the server needs only once, such as the client's ranks or
            vocabulary. The message may contain only fields in `Schema.hello`.
        """
        return Message()

    def receive(self, download: Message) -> None:
        """Apply a download from the server. The call may run for minutes.

        Args:
            download: The server's message; `download.exchange` counts the completed exchanges.

        Raises:
            MessageError: The download is not valid for this client. In this case, `receive` must
                not have changed the object.
        """

    def train(self, turn: Turn) -> None:
        """Train locally, starting from the last download.

        If a class does not override `train`, no client trains locally. The engine then ignores the
        setting `evaluation.keep: best`, which otherwise keeps each client's best model of all
        rounds.

        Args:
            turn: The numbers of the round and of the exchange.
        """

    def upload(self, turn: Turn) -> Message:
        """Return the upload of an exchange without changing the object's state.

        Args:
            turn: The numbers of the round and of the exchange.

        Returns:
            The message to send after training. It may contain only fields in `Schema.up`.
        """
        return Message(turn.exchange)

    def model(self) -> PreTrainedModel:
        """Return the client's model, ready for evaluation.

        Returns:
            A model that is valid until the model of another client is requested, because clients
            may share one base.
        """
        raise NotImplementedError

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the client's trained parameters.

        Returns:
            A mapping from names to parameters. A parameter for which `Method.shared` returns False
            never leaves the client.
        """
        return {}

    def state(self) -> State:
        """Return everything that must survive a restart.

        An engine may call `state` at any time between calls of the other methods.

        Returns:
            A copy of the state, from which `restore` can restore the client. The state is private
            and is never sent.
        """
        return State()

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`.

        Args:
            state: The state.
        """


class Server(Generic[V]):
    """The server-side object of a method. By default, it sends and averages nothing.

    Everything that the server learns is in a value of type V (see `Value`), which the engine
    stores. The object holds nothing else that changes, apart from results of `prepare` and caches.
    No method changes a value. To repeat an exchange, the engine therefore calls the same methods
    again with the same value.

    In the following methods, `exchange` contains the numbers of the exchange, its clients and, for
    `aggregate`, the clients' uploads.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: D105
        super().__init_subclass__(**kwargs)
        for name in ("averaged", "close", "end_round", "receive", "replaces", "restore", "state"):
            if name in vars(cls):
                raise CoterieError(
                    f"The class {cls.__name__} defines `{name}`, which Coterie does not call. A "
                    "server's algorithm is in `aggregate`; see docs/develop/add-a-method.md."
                )

    def initial(self) -> V:
        """Return the value at the start of a run.

        Returns:
            A value without data of clients.
        """
        return cast("V", Value())

    def prepare(self, client: ClientId, hello: Message) -> None:
        """Perform the slow part of a client's join. The engine calls `join` afterwards.

        A deployment calls `prepare` in a separate thread, so that the server can continue to serve
        other clients. Other methods of this object may run at the same time. Therefore, `prepare`
        may only store results for `join` and must not change anything else.

        Args:
            client: The client's name.
            hello: The message that the client's `hello()` returned.

        Raises:
            MessageError: The client is refused.
        """

    def join(self, value: V, client: ClientId, hello: Message) -> V:
        """Add a client that joins the run for the first time or joins it again.

        A client may join while an exchange is in progress. After a restart, the engine calls `join`
        for every client with the initial value, and then restores the saved fields.

        Args:
            value: The current value.
            client: The client's name.
            hello: The message that the client's `hello()` returned.

        Returns:
            The value with the client's data.

        Raises:
            MessageError: The client is refused.
        """
        return value

    def download(self, value: V, client: ClientId, exchange: Exchange) -> Message:
        """Return a client's download at the start of an exchange, or after the last exchange.

        Args:
            value: The current value.
            client: The client's name.
            exchange: The exchange. After the last exchange, this is the exchange that would follow;
                it has no clients.

        Returns:
            A message whose `exchange` is the number of completed exchanges. The message may contain
            only fields in `Schema.down`.
        """
        return Message(exchange.turn.exchange)

    def expects(self, value: V, client: ClientId, exchange: Exchange) -> Mapping[str, Shapes]:
        """Return the shapes of the tensors that a client must upload in this exchange.

        Args:
            value: The current value.
            client: The client's name.
            exchange: The exchange.

        Returns:
            A nested mapping of shapes. The outer keys are the groups in `Schema.up`, and the inner
            keys are the names of tensors. Groups that are missing may not be uploaded.
        """
        return {}

    def check(self, value: V, client: ClientId, upload: Message, exchange: Exchange) -> None:
        """Check a client's upload when it arrives.

        By default, shapes are compared with `expects`. An override can check values, or shapes that
        the server does not know in advance. It replaces this comparison unless it calls
        `super().check(...)`.

        Args:
            value: The current value.
            client: The client's name.
            upload: The client's upload.
            exchange: The exchange.

        Raises:
            MessageError: The upload is refused.
        """
        expected = self.expects(value, client, exchange)
        for group in sorted(expected.keys() | upload.groups.keys()):
            check_shapes(upload[group], expected.get(group, {}))

    def reference(self, value: V, client: ClientId, upload: Message, exchange: Exchange) -> Groups:
        """Return the tensors from which a client's training started in this exchange.

        The engine limits the distance between an uploaded group and the group's reference. For
        uploaded groups without a reference, such as predictions, the engine limits the norm.

        Args:
            value: The current value.
            client: The client's name.
            upload: The client's upload.
            exchange: The exchange.

        Returns:
            A nested mapping of tensors. The outer keys are groups, and the inner keys are the names
            of tensors. By default, the mapping contains all groups of the download.
        """
        return self.download(value, client, exchange).groups

    def aggregate(self, value: V, exchange: Exchange) -> V:
        """Return the value after an exchange. This is the algorithm of the method's server.

        Args:
            value: The value before the exchange.
            exchange: The exchange, with the accepted uploads.

        Returns:
            The new value. The value before the exchange must not have changed.
        """
        return value

    def model(self, value: V) -> PreTrainedModel | None:
        """Return the server's own model.

        Args:
            value: The current value.

        Returns:
            A model that is ready for evaluation, or None if the server has no model of its own.
        """
        return None
