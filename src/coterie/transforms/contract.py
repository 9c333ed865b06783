"""Aggregation transforms: method-independent modifications of all uploads, downloads or means.

A transform consists of settings and hooks. The transform's state is in a `Memory`, which the engine
passes to the hooks, saves in checkpoints, and rolls back when an upload is rejected. Transforms are
listed under `aggregation.transforms` in the run file. They encode messages in the order of the
list, and decode messages in the reverse order. For example, this complete transform sends updates
in half precision::

    class Half(Transform):
        name = "half"
        summary = "updates in float16"

        def schema(self, schema):
            return self.retyped(schema, "float16")

        def encode(self, update, context):
            return mapped(update, torch.Tensor.half)

        def decode(self, payload, context):
            return mapped(payload, torch.Tensor.float)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages import Groups, Json, Schema
from coterie.messages.schema import Reduce
from coterie.privacy.ledger import Budget
from coterie.registry import Section
from coterie.transforms.context import Context, Contribution, Memory, TransformFacts


class Transform(Section):
    """A method-independent modification of all uploads, all downloads or all means.

    Subclasses set `name` and `summary`, declare their settings as pydantic fields, and override the
    hooks that they need. An exception in a hook becomes an error that names the transform and the
    hook.
    """

    name: ClassVar[str]
    """The transform's name in run files."""
    summary: ClassVar[str]
    """A description in one line."""
    reductions: ClassVar[frozenset[Reduce]] = frozenset({"mean", "rows"})
    """The reductions of the upload fields that the transform encodes; no fields are encoded if the
    set is empty."""
    private: ClassVar[bool] = False
    """Whether the transform promises privacy. If so, the transform refuses a method that uploads
    floating-point fields which the transform does not encode."""
    downloads: ClassVar[bool] = False
    """Whether the transform also encodes downloads."""
    sealed: ClassVar[bool] = False
    """Whether the server can decode only the reduction of all uploads, but no individual upload."""
    forwards: ClassVar[str] = ""
    """A few words on the values of single clients that `tell` passes on to other clients, shown by
    audits and consent prompts; empty if there are none."""
    before: ClassVar[tuple[str, ...]] = ()
    """The names of additional phases before training, each with one download and one upload."""
    after: ClassVar[tuple[str, ...]] = ()
    """The names of additional phases after training, each with one download and one upload. The
    uploads of the training wait on the server, and are aggregated after the last phase."""
    least: ClassVar[int] = 1
    """The minimum number of clients that the transform needs in a run."""

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: D105
        super().__init_subclass__(**kwargs)
        for name in ("bounded", "declare", "figures", "join", "measure", "refuse", "weight"):
            if callable(getattr(cls, name, None)):
                raise CoterieError(
                    f"The class {cls.__name__} defines `{name}`, which Coterie does not call. The "
                    "section `aggregation` has keys for bounds and weights; for rules of your own, "
                    "derive the class from Reduction and define `reduce`; see "
                    "docs/use/transforms.md."
                )

    def covered(self, schema: Schema) -> set[str]:
        """Return the names of the groups that the transform encodes.

        Args:
            schema: The fields of the transform's input.

        Returns:
            The names of the groups that contain float32 tensors and whose reduction is listed in
            the attribute `reductions`.
        """
        fields = (f for f in schema.up if f.reduce in self.reductions)
        return {f.name for f in fields if f.dtype == "float32"}

    def retyped(self, schema: Schema, dtype: str) -> Schema:
        """Return a schema in which the encoded groups have another dtype on the wire.

        Args:
            schema: The fields of the transform's input.
            dtype: The dtype of the encoded tensors, such as `float16`.

        Returns:
            The schema with the new dtype. The dtype of downloads is changed only if the attribute
            `downloads` is true.
        """
        groups, ways = self.covered(schema), ("up", "down") if self.downloads else ("up",)
        fields = {
            way: tuple(
                replace(field, dtype=dtype) if field.name in groups and not field.peers else field
                for field in getattr(schema, way)
            )
            for way in ways
        }
        return replace(schema, **fields)

    def schema(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, schema: Schema
    ) -> Schema:
        """Declare the fields of messages that the transform has encoded.

        Args:
            schema: The fields of the transform's input.

        Returns:
            The fields of the transform's output. Fields that are not returned cannot be sent.
        """
        return schema

    def check(self, run: TransformFacts) -> None:
        """Check that the transform can be used in a run.

        Args:
            run: Facts about the run.

        Raises:
            CoterieError: If the transform cannot be used. The message says what to change.
        """
        if len(run.clients) < self.least:
            raise CoterieError(
                f"The transform {self.name!r} needs at least {self.least} clients, but the run has "
                f"only {len(run.clients)}."
            )
        if self.reductions and not self.covered(run.schema):
            raise CoterieError(
                f"The transform {self.name!r} has no effect with the method {run.method!r}, whose "
                "uploads contain no field that the transform encodes. Remove it, or choose another "
                "method."
            )
        exact = ("json", "uint8", "int64")
        floats = {
            field.name: field.description for field in run.schema.up if field.dtype not in exact
        }
        uncovered = sorted(floats.keys() - self.covered(run.schema))
        if self.private and uncovered:
            raise CoterieError(
                f"The transform {self.name!r} promises privacy, but the method {run.method!r} also "
                f"uploads {', '.join(f'{name!r} ({floats[name]})' for name in uncovered)}, which "
                "the transform does not protect; use another method, or remove the transform."
            )

    def described(self) -> dict[str, Any]:
        """Describe the transform.

        Returns:
            The name and the settings, as an entry of a run file.
        """
        return {"name": self.name, **self.model_dump(mode="json")}

    def budget(self, exchanges: int) -> Budget | None:
        """Return the privacy budget that a client spends in a run.

        Args:
            exchanges: The number of exchanges in which clients train.

        Returns:
            The budget, or None if the transform adds no noise.
        """
        return None

    def encode(self, update: Groups, context: Context) -> Groups:
        """Encode an update before it is sent.

        Args:
            update: Float32 tensors keyed by group and name. From each tensor, the tensor of the
                same group, name and shape that the client last received has been subtracted.
                Nothing is subtracted if there is no such received tensor, or if the attribute
                `sealed` is true.
            context: The circumstances of the call.

        Returns:
            Tensors that match the fields declared by `schema`, keyed by group and name.
        """
        return update

    def decode(self, payload: Groups, context: Context) -> Groups:
        """Decode a received payload.

        Args:
            payload: The tensors that `encode` returned, keyed by group and name.
            context: The circumstances of the call.

        Returns:
            The update, which consists of float32 tensors. The groups, names and shapes of the
            tensors are equal to those of the update that was passed to `encode`.

        Raises:
            MessageError: If the payload is invalid. The upload is then rejected.
        """
        return payload

    def tell(self, phase: str, client: str, clients: Sequence[str], memory: Memory) -> Json:
        """Return a value to send with a client's download. Runs on the server.

        Args:
            phase: The phase of the exchange: `train`, or a phase listed in the attribute `before`
                or `after`.
            client: The client that receives the download.
            clients: All clients that take part in the phase. In a phase after training, these are
                the clients whose uploads are accepted, even those that have disconnected since.
            memory: The transform's state on the server.

        Returns:
            The value, which the client's hooks read from `context.server_value`. If the value is
            None, no value is sent.
        """
        return None

    def answer(self, phase: str, context: Context) -> Json:
        """Return a client's upload in an additional phase. Runs on the client.

        Args:
            phase: A phase listed in the attribute `before` or `after`.
            context: The circumstances of the call.

        Returns:
            The value that the server passes to `collect`.
        """
        return None

    def collect(self, phase: str, client: str, answer: Json, memory: Memory) -> None:
        """Process a client's upload in an additional phase. Runs on the server.

        The hook is called once per client, in the order of client names.

        Args:
            phase: A phase listed in the attribute `before` or `after`.
            client: The client that sent the upload.
            answer: The value that `answer` returned on the client.
            memory: The transform's state on the server.

        Raises:
            MessageError: If the answer is invalid. The answer then does not count.
        """

    def on_mean(self, mean: Groups, before: Groups, memory: Memory) -> Groups:
        """Transform the mean of a group, and return the result. Runs on the server.

        The hook is called once per exchange for each group that the method averages over clients.

        Args:
            mean: The reduced uploads of the group, keyed by group and name.
            before: The server's parameters before the mean replaces them, keyed by group and name.
                The mapping is empty if the mean replaces no parameters.
            memory: The transform's state on the server.

        Returns:
            The transformed mean, with the same groups, names and shapes as the argument `mean`.
        """
        return mean


class Reduction(Transform):
    """A transform that replaces the weighted mean by another reduction of the uploads.

    A run has at most one reduction. It does not replace the means of methods that have a mean for
    each client (fields whose reduction is `rows`).
    """

    reductions: ClassVar[frozenset[Reduce]] = frozenset({"mean"})

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        """Reduce a round's uploads. Runs on the server.

        Args:
            contributions: The accepted uploads, in the order of client names.
            clients: All clients of the exchange, including clients whose uploads were rejected.
            memory: The transform's state on the server.

        Returns:
            One tensor for each group and name that occurs in a contribution. The tensor has the
            same shape as the uploaded tensors of this group and name.
        """
        raise NotImplementedError


def mapped(groups: Groups, change: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
    """Apply a function to every tensor in a mapping of groups.

    Args:
        groups: Tensors keyed by group and name.
        change: The function.

    Returns:
        The results, keyed by group and name.
    """
    return {g: {n: change(t) for n, t in tensors.items()} for g, tensors in groups.items()}
