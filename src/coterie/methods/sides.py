"""Base classes of a method's two objects.

The client-side object runs where a client's data are, and the server-side object on the server.
"""

from collections.abc import Mapping
from typing import ClassVar

from transformers import PreTrainedModel

from coterie.adapters import Parameter
from coterie.messages import Groups, Message, Shapes, State
from coterie.training.context import ClientId
from coterie.transforms.context import Rows
from coterie.turn import Turn

Holders = Mapping[str, Mapping[str, int]]
"""The number of clients whose uploads contained a tensor, for each tensor of an aggregate.

The outer keys are the names of groups, and the inner keys are the names of tensors.
"""


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
            download: The server's message; `download.round` is the number of completed exchanges.

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


class ServerSide:
    """The server-side object of a method. By default, it sends no parameters to clients."""

    exchange: int = 0
    """The number of the exchange in progress or, between exchanges, of the next exchange."""

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

    def join(self, client: ClientId, hello: Message) -> None:
        """Add a client that joins the run for the first time or joins it again.

        Args:
            client: The client's name.
            hello: The message that the client's `hello()` returned.

        Raises:
            MessageError: The client is refused.
        """

    def leave(self, client: ClientId) -> None:
        """Delete the data of a client that leaves the run.

        The engine calls this method only before it starts or repeats an exchange, or after the last
        exchange.

        Aggregates of past rounds do not change, even if the client contributed to them. By default,
        `leave` calls `state`, deletes the client's entries from the returned state, and passes this
        state to `restore`. A class that stores clients' data outside this state must override
        `leave`.

        Args:
            client: The client's name.
        """
        self.restore(self.state().without(client))

    def start_round(self, exchange: int, participants: list[ClientId]) -> None:
        """Begin an exchange, or repeat an exchange for which too few uploads arrived.

        Args:
            exchange: The number of the exchange; the first is 0.
            participants: The names of the clients that take part.
        """
        self.exchange = exchange

    def download(self, client: ClientId) -> Message:
        """Return a client's download at the start of an exchange, or after the last exchange.

        Args:
            client: The client's name.

        Returns:
            A message whose `round` is the number of completed exchanges. The message may contain
            only fields in `Schema.down`.
        """
        return Message(self.exchange)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Return the shapes of the tensors that a client must upload in this exchange.

        Args:
            client: The client's name.

        Returns:
            A nested mapping of shapes. The outer keys are the groups whose reduction in the schema
            is `mean`, and the inner keys are the names of tensors.
        """
        return {}

    def reference(self, client: ClientId, upload: Message) -> Groups:
        """Return the tensors from which a client's training started in this exchange.

        The engine limits the distance between an uploaded group and the group's reference. For
        uploaded groups without a reference, such as predictions, the engine limits the norm.

        Args:
            client: The client's name.
            upload: The client's upload.

        Returns:
            A nested mapping of tensors. The outer keys are groups, and the inner keys are the names
            of tensors. By default, the mapping contains all groups of the download.
        """
        return self.download(client).groups

    def replaces(self) -> Groups:
        """Return the server's parameters that `end_round` will replace by their aggregates.

        If the run has a server optimiser, the optimiser takes a step from these parameters towards
        the aggregates, and `end_round` receives the result of the step instead of the aggregates.

        Returns:
            A nested mapping of parameters. The outer keys are groups, and the inner keys are the
            names of parameters. If this mapping lacks an aggregated group (for example, a group of
            statistics), the server optimiser does not change the aggregates of that group.
        """
        return {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Process one client's upload.

        Uploads are received in the order of the clients' names.

        Args:
            client: The client's name.
            upload: The client's upload. The attribute `values` contains all values that the client
                uploaded. The attribute `groups` contains only the groups whose reduction in the
                schema is `each`, because the engine aggregates all other groups.

        Raises:
            MessageError: The upload is refused.
        """

    def rows(self) -> Rows:
        """Return the clients' weights in each mean of the fields whose reduction is `rows`.

        The engine calls this method after it has called `receive` with all uploads of an exchange.

        Returns:
            A mapping from the name of each mean, usually the client that receives the mean, to the
            weights of the clients' uploads. Each weight is multiplied by the client's weight in the
            run's aggregation, such as its number of tokens. The weights of a mean need not sum to
            1. Excluded uploads contribute to no mean.
        """
        return {}

    def end_round(self, mean: Message, held: Holders) -> None:
        """End the exchange that `start_round` began. Later downloads belong to the next exchange.

        Args:
            mean: The aggregates of the fields whose reduction in the schema is `mean`. The
                attribute `peers` contains the means that `rows` requested, by name. A mean is
                missing if no client with a weight above 0 has sent an upload.
            held: For each tensor of `mean`, the number of clients whose uploads contained the
                tensor. The keys are the same groups and names as in `mean`.
        """
        self.exchange += 1

    def model(self) -> PreTrainedModel | None:
        """Return the server's own model.

        Returns:
            A model that is ready for evaluation, or None if the server has no model of its own.
        """
        return None

    def state(self) -> State:
        """Return everything that must survive a restart.

        Returns:
            A state in which each client's data are stored under the client's name, so that `leave`
            can delete the data. The data must be in `State.parts` or in a mapping in
            `State.values`.
        """
        return State(values={"round": self.exchange})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`.

        Args:
            state: The state.
        """
        self.exchange = state.values["round"]
