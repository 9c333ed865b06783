"""The two sides of a method: one runs where a client's data are, the other on the server."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from coterie.adapters import Parameter
from coterie.messages import Groups, Message, Shapes, State
from coterie.training.context import ClientId

Holders = Mapping[str, Mapping[str, int]]
"""The number of clients whose uploads contain each tensor of an aggregate, by group and name."""


class ClientSide:
    """One client's side of a method. The default side shares nothing.

    An engine calls `hello` once; then `receive`, `train` and `upload` in every exchange; and
    `receive` once more after the last exchange. A client's side is never told how often its model
    is evaluated.
    """

    def hello(self) -> Message:
        """Return the message that the client sends when it joins.

        Returns:
            What the server must know once, such as the client's ranks or vocabulary. The message
            may contain only fields in `Schema.hello`.
        """
        return Message()

    def receive(self, download: Message) -> None:
        """Apply a download from the server. May run for minutes.

        Args:
            download: The server's message. Its `round` is the number of completed exchanges.

        Raises:
            MessageError: The download does not fit the client's side, which must be unchanged then.
        """

    def train(self, exchange: int) -> None:
        """Train locally, starting from the last download.

        A method whose client side does not override `train` learns nothing; its models are not
        compared.

        Args:
            exchange: The number of the exchange; the first is 0.
        """

    def upload(self, exchange: int) -> Message:
        """Return the upload of an exchange. Must not change any state.

        Args:
            exchange: The number of the exchange; the first is 0.

        Returns:
            The message to send after training. It may contain only fields in `Schema.up`.
        """
        return Message(exchange)

    def model(self) -> PreTrainedModel:
        """Return the client's model, ready for evaluation.

        Returns:
            A model that is valid until the model of another client is requested.
        """
        raise NotImplementedError

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the trained parameters.

        Returns:
            Each parameter by name. A parameter for which `Method.shared` is false never leaves the
            client.
        """
        return {}

    def state(self) -> State:
        """Return everything that must survive a restart, whichever method was called last.

        Returns:
            Copies from which the client's model can be restored. The state is private and is never
            sent.
        """
        return State()

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`.

        Args:
            state: The state.
        """


class ServerSide:
    """The server's side of a method. The default side shares nothing."""

    exchange: int = 0
    """The number of the exchange in progress, or of the next exchange."""

    def prepare(self, client: ClientId, hello: Message) -> None:
        """Prepare a join outside the lock.

        A deployment calls `prepare` in a thread, at the same time as the server's other methods, so
        it must only store results for `join`.

        Args:
            client: The client's name.
            hello: The message that the client's `hello()` returned.

        Raises:
            MessageError: The client is refused.
        """

    def join(self, client: ClientId, hello: Message) -> None:
        """Add a client, for the first time or again.

        Args:
            client: The client's name.
            hello: The message that the client's `hello()` returned.

        Raises:
            MessageError: The client is refused.
        """

    def leave(self, client: ClientId) -> None:
        """Delete a client's data between two rounds, except for its part in past aggregates.

        By default, the client is removed from the state. A side that holds clients' data outside
        its state must override this method.

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
            A message whose `round` is the number of completed exchanges. It may contain only fields
            in `Schema.down`.
        """
        return Message(self.exchange)

    def expects(self, client: ClientId) -> Mapping[str, Shapes]:
        """Return the shapes of the tensors that a client must upload in this exchange.

        Args:
            client: The client's name.

        Returns:
            The shapes by name, for every group that the schema reduces by `mean`.
        """
        return {}

    def reference(self, client: ClientId) -> Groups:
        """Return the tensors from which a client's training starts in this exchange.

        The engine bounds the distance between an upload and its reference. Uploaded groups without
        a reference, such as predictions, are bounded by their norm.

        Args:
            client: The client's name.

        Returns:
            The tensors by group and name. By default, all groups of the download.
        """
        return self.download(client).groups

    def replaces(self) -> Groups:
        """Return the parameters that their aggregate replaces.

        A server optimiser steps from these parameters towards the aggregate. Aggregates of other
        groups, such as statistics, are used unchanged.

        Returns:
            The parameters by group and name.
        """
        return {}

    def receive(self, client: ClientId, upload: Message) -> None:
        """Process one client's upload.

        Uploads are received in the order of the clients' names.

        Args:
            client: The client's name.
            upload: The fields that the schema reduces by `each`, and all values.

        Raises:
            MessageError: The upload is refused.
        """

    def end_round(self, mean: Message, held: Holders) -> None:
        """End the exchange. Later downloads belong to the next exchange.

        Args:
            mean: The aggregates of the fields that the schema reduces by `mean`.
            held: The number of clients whose uploads contain each tensor of `mean`, by group and
                name.
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
            A state in which one client's data are stored under the client's name, in `State.parts`
            or in one of the values, so that `leave` can delete them.
        """
        return State(values={"round": self.exchange})

    def restore(self, state: State) -> None:
        """Restore a state returned by `state()`.

        Args:
            state: The state.
        """
        self.exchange = state.values["round"]
