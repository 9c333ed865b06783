"""One exchange on the server: uploads are measured and stored, then passed to the method."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, Unwritable, ran_out_of_memory
from coterie.exchanges import bounds
from coterie.exchanges.codec import EXCHANGE, ServerTransforms
from coterie.exchanges.lazy import Computed, InFile, PerClient, Upload, in_file
from coterie.exchanges.mean import means_of, memory_for_aggregation, selected, weighted_mean
from coterie.exchanges.optimiser import stepped
from coterie.exchanges.pipeline import Pipeline
from coterie.exchanges.spec import AggregationSpec
from coterie.exchanges.waiting import Waiting
from coterie.exchanges.weights import TOKENS, tokens_of, weight_of
from coterie.messages import Groups, Message, Schema, Tensors
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import CHANGE, LEFT_OUT
from coterie.messages.schema import Reduce
from coterie.network.link import LONGEST_LINE
from coterie.runs import Recorder
from coterie.runs.store import Store
from coterie.transforms.context import Contribution, Rows
from coterie.turn import FIRST, TRAIN, Turn

Reference = Callable[[Message, "Exchange"], Groups]
"""A function that returns the tensors from which the training for an upload started."""


class Exchange:
    """The exchange in progress: its numbers, its clients and their uploads.

    A method's server reads uploads with `mean`, `means` and `each`, and facts about them with
    `holders` and `weight`. Only engines call the functions from `join` on. Uploads wait in files,
    and are aggregated in the order of client names.

    Args:
        folder: The run folder, in which the uploads wait.
        pipeline: The pipeline of the run's transforms.
        schema: The fields that the method may send, before transforms encode them.
        rules: The section `aggregation` of the run file.
        strict: Whether an invalid upload raises an error instead of being excluded.
    """

    def __init__(
        self,
        folder: Path,
        pipeline: Pipeline,
        schema: Schema,
        rules: AggregationSpec,
        *,
        strict: bool = False,
    ) -> None:
        self.store = Store(folder)
        """The storage of uploads, and of the server's tensors of single clients."""
        self.transforms, self.schema = ServerTransforms(pipeline, self.store), schema
        self.rules, self.least_others, self.strict = rules, rules.least_others, strict
        self.turn: Turn = FIRST
        """The numbers of the exchange."""
        self.clients: tuple[str, ...] = ()
        """The names of the clients that take part, sorted."""
        self.asked: set[str] = set()
        """The clients that took part in any attempt at this exchange."""
        self.refused: dict[str, str] = {}
        """A mapping from each excluded client to the reason why the client's upload is excluded."""
        self.diverged: set[str] = set()
        """Excluded clients that have no upload because they diverged."""
        self.asked_again: set[str] = set()
        """Clients that were asked for a second upload."""
        self.replaces: bool | None = None
        """Whether a mean of this exchange replaced parameters; None if no mean was requested."""
        self.waiting: Waiting = {}
        """The uploads that wait for the phases after training."""
        self._uploads: dict[str, Upload] = {}
        self._limited: dict[str, Upload] = {}
        """The uploads that have limits, with their limits applied."""
        self._references: dict[str, Reference] = {}
        self._weights: dict[str, float] = {}
        """The weight of each client's upload, unless the upload is limited."""
        self._tokens: dict[str, int] = {}
        """The number of training tokens that each client declared when it joined, or 1."""
        self._measures: dict[str, bounds.Measure] = {}
        """The sizes of each client's upload, which are bounded."""
        self._limits: dict[str, bounds.Bound] = {}
        """The limits of uploads, by client."""
        self._means: Groups | None = None
        """The means of all groups; None before the uploads are averaged."""
        self._results: dict[str, Tensors] = {}
        """The means, by group, after transforms have changed them."""
        self._held: dict[str, Counter[str]] = {}

    @property
    def counted(self) -> list[str]:
        """The clients whose uploads are not excluded, sorted by name."""
        return [name for name in sorted(self._uploads) if name not in self.refused]

    def mean(self, group: str, start: Tensors | None = None) -> Tensors:
        """Return the weighted mean of a group, or the result of the reduction that replaces it.

        Args:
            group: The name of a field whose reduction is `mean`.
            start: The server's parameters that the mean will replace, by name. If the run has a
                server optimiser, it takes a step from these parameters towards the mean, and the
                result is returned. Without `start`, the server optimiser does not change the mean.

        Returns:
            The mean of each tensor over the clients that uploaded it. A tensor is missing if no
            client uploaded it or, with `least_others` above 1, if at most `least_others` clients
            did. If the mean of a group is requested again, the result is the same.

        Raises:
            CoterieError: The schema declares no such field with this reduction.
        """
        self._require(group, "mean")
        if self._means is None:
            self._means = self._all_means()
        if group not in self._results:
            before = {group: start} if start else {}
            self.replaces = bool(self.replaces or start)
            changed = self.transforms.on_mean({group: self._means.get(group, {})}, before)
            mean, optimiser = changed[group], self.rules.optimiser
            if optimiser and start:
                mean = stepped(optimiser, group, mean, start, self.transforms.memories[EXCHANGE])
            self._results[group] = mean
        return self._results[group]

    def holders(self, group: str) -> Mapping[str, int]:
        """Return the number of clients that uploaded each tensor of a mean, by the tensor's name.

        Args:
            group: The name of a field of which `mean` has been called.
        """
        return self._held.get(group, {})

    def means(self, group: str, rows: Rows) -> PerClient[Tensors]:
        """Return several means of a group, with different weights of the clients.

        Args:
            group: The name of a field whose reduction is `rows`.
            rows: A mapping from the name of each mean, usually the client that receives the mean,
                to the weights of the clients' uploads. Each weight is multiplied by the client's
                weight in the run's aggregation, such as its number of tokens. The weights of a
                mean need not sum to 1. Excluded uploads contribute to no mean. A mean with the name
                of a client is received by this client, and any other mean by the clients in its
                row.

        Returns:
            The tensors of each mean, in files. A mean is missing if no client with a weight above 0
            has sent an upload. With `least_others` above 1, a tensor of fewer other clients is
            missing.

        Raises:
            CoterieError: The schema declares no such field with this reduction.
        """
        self._require(group, "rows")
        means: dict[str, Any] = {}
        of = partial(self._contributions, {group})
        for names, groups in means_of(of, self.counted, rows, self.least_others):
            means |= dict.fromkeys(names, in_file(self.store, groups, group))
        return PerClient({name: means[name] for name in rows if name in means})

    def each(self, name: str | None = None) -> PerClient[Any]:
        """Return a group of tensors, or a JSON value, from each client that uploaded it.

        Args:
            name: The name of a field whose reduction is `each`; by default, all groups with this
                reduction.

        Returns:
            The group, the value or a mapping of groups by client, in the order of the clients'
            names. Tensors are in files; see `Lazy`.

        Raises:
            CoterieError: The schema declares no such field with this reduction.
        """
        groups = self.schema.reduced("each")
        if name is None:
            whole = PerClient({c: InFile(self._stored(c).tensors) for c in self.counted})
            return whole.replaced(
                lambda i: i if i.stored.groups.keys() <= groups else Computed(_only, (i, groups))
            )
        self._require(name, "each")
        items: dict[str, Any] = {}
        for client in self.counted:
            upload = self._stored(client)
            if name in upload.tensors.groups:
                items[client] = InFile(upload.tensors, name)
            elif name in (values := upload.values.load().values["values"]):
                items[client] = values[name]
        return PerClient(items)

    def weight(self, client: str) -> float:
        """Return the weight of a client's upload in the run's means.

        Args:
            client: The name of a client in `counted`.
        """
        if client in self._limits:
            return self._weight_of(client, self._stored(client).read())
        return self._weights[client]

    def join(self, client: str, hello: Message) -> None:
        """Store the number of training tokens that a client declares when it joins.

        Raises:
            MessageError: The number is invalid, or missing although clients weigh by it.
        """
        # Some methods declare the number, although their clients do not weigh by it.
        has_tokens = self.transforms.pipeline.weighted or TOKENS.name in hello.values
        self._tokens[client] = tokens_of(client, hello) if has_tokens else 1

    def leave(self, client: str) -> None:
        """Remove a client that leaves the run."""
        self.transforms.leave(client)
        self._tokens.pop(client, None)

    def open(self, turn: Turn, clients: Iterable[str]) -> None:
        """Set the numbers and the clients, when a turn starts or begins again."""
        if turn != self.turn and not turn.after:
            self.asked.clear()
        self.turn, self.clients = turn, tuple(sorted(clients))
        self.asked |= {*self.clients}
        self.transforms.begin(turn, self.uploaded if turn.after else self.clients)
        self.repeat()

    @property
    def uploaded(self) -> list[str]:
        """The clients whose uploads wait, which take part in the phases after training."""
        return [name for name, upload in self.waiting.items() if upload is not None]

    def wait(self) -> None:
        """Let the uploads of the training wait for the phases after training."""
        counted = {name: (self._stored(name), self.weight(name)) for name in self.counted}
        self.waiting = {name: counted.get(name) for name in self.clients}

    def resume(self) -> None:
        """Replace the answers of the last phase by the uploads that waited for it."""
        self.begin()
        self.clients = tuple(self.waiting)
        self.asked |= {*self.clients}
        for name, held in self.waiting.items():
            if held is not None:
                self._uploads[name], self._weights[name] = held
        self.waiting = {}

    def repeat(self) -> None:
        """Discard the means, so that the uploads that have arrived can be aggregated again."""
        self.transforms.repeat()
        self._means, self._results, self._held, self.replaces = None, {}, {}, None
        self._limits = {}
        self._limited.clear()

    def begin(self) -> None:
        """Remove all uploads."""
        for name in [*self._uploads, *self.refused]:
            self.drop(name)
        self.asked_again.clear()

    def put(self, name: str, message: Message, reference: Reference) -> None:
        """Measure and weigh a decoded upload, and store it.

        Args:
            name: The client that sent the upload.
            message: The upload.
            reference: A function that returns the tensors from which the client's training started.

        Raises:
            MessageError: The number of training tokens in the upload is invalid.
        """
        if self.turn.phase == TRAIN:
            measure = bounds.measured(message, reference(message, self), self._tokens.get(name, 1))
            self._weights[name] = self._weight_of(name, message)
            self._measures[name], self._references[name] = measure, reference
        self._uploads[name] = Upload.put(self.store, message)

    def settle(self) -> None:
        """Exclude or limit the uploads beyond the bounds. All uploads must have arrived.

        In a phase that a transform added, the uploads are passed to `Transform.collect`.
        """
        transforms = self.transforms
        if self.turn.phase == TRAIN:
            measures, memory = dict(sorted(self._measures.items())), transforms.memories[EXCHANGE]
            excluded, self._limits = bounds.exclusions_and_limits(self.rules, measures, memory)
            self.refused |= excluded
            with memory_for_aggregation():
                for name in [name for name in self.counted if name in self._limits]:
                    try:
                        self.weight(name)  # fails if the upload cannot be limited
                    except Unwritable:
                        raise
                    except Exception as error:
                        self.refuse(name, error)
            return
        for name in self.counted:
            try:
                transforms.collect(name, self._uploads[name].read())
            except CoterieError as error:
                self.refuse(name, error)

    def refuse(self, name: str, error: Exception) -> None:
        """Exclude a client's upload because of an error, or raise the error if `strict` is true."""
        if self.strict or ran_out_of_memory(error):
            raise error
        expected = isinstance(error, CoterieError)
        self.refused[name] = str(error) if expected else f"{type(error).__name__} in the method"

    def diverge(self, name: str) -> None:
        """Record that a client diverged and has no upload."""
        self.drop(name)
        self.refused[name] = FAULT_MESSAGES["diverged"]
        self.diverged.add(name)

    def ask_again(self, name: str) -> bool:
        """Remove a client's upload, because the server will request it again.

        Returns:
            Whether this is the first time in this exchange that the client is asked for another
            upload.
        """
        self.drop(name)
        first = name not in self.asked_again
        self.asked_again.add(name)
        return first

    def drop(self, name: str) -> bool:
        """Remove a client's upload, and the reason why the upload was excluded, if any.

        Returns:
            Whether an upload or a reason was removed.
        """
        self.diverged.discard(name)
        for of_client in (self._measures, self._references, self._limited, self._weights):
            of_client.pop(name, None)
        refused = self.refused.pop(name, None) is not None
        return self._uploads.pop(name, None) is not None or refused

    def record(self, recorder: Recorder) -> None:
        """Record the metrics of all uploads, and the reasons why uploads were excluded."""
        for name, figures in bounds.figures_of(dict(sorted(self._measures.items()))).items():
            recorder.log(name, CHANGE, figures)
        refused = {} if self.turn.after else self.refused  # the uploads of the training count
        for name, reason in sorted(refused.items()):
            recorder.log(name, LEFT_OUT, reason[:LONGEST_LINE])

    def _require(self, name: str, reduce: Reduce) -> None:
        if name not in self.schema.reduced(reduce):
            raise CoterieError(
                f"The method's server aggregates the field {name!r} in the form {reduce!r}, but "
                "the method's schema declares no upload field of this name with "
                f"reduce={reduce!r}."
            )

    def _contributions(self, groups: set[str], clients: Collection[str]) -> Iterator[Contribution]:
        for name in self.counted:
            if name in clients:
                tensors = _only(self._stored(name).tensors.load().groups, groups)
                yield Contribution(name, tensors, self.weight(name))

    def _stored(self, name: str) -> Upload:
        """Return a client's upload on disk, with its limits applied."""
        if (limit := self._limits.get(name)) is None:
            return self._uploads[name]
        if name not in self._limited:
            upload = self._uploads[name].read()
            limited = bounds.bounded(name, upload, self._references[name](upload, self), limit)
            self._limited[name] = Upload.put(self.store, limited)
        return self._limited[name]

    def _weight_of(self, name: str, upload: Message) -> float:
        weighted = self.transforms.pipeline.weighted
        return weight_of(name, upload, self._tokens[name]) if weighted else 1.0

    def _all_means(self) -> Groups:
        """Compute the means of all groups whose reduction is `mean` in one pass."""
        held: dict[str, Counter[str]] = defaultdict(Counter)

        def counted() -> Iterator[Contribution]:
            for contribution in self._contributions(self.schema.reduced("mean"), self.counted):
                for group, tensors in contribution.groups.items():
                    held[group].update(tensors.keys())
                yield contribution

        reduction = self.transforms.pipeline.reduction
        means = (
            self.transforms.reduce(counted(), self.clients)
            if reduction
            else weighted_mean(counted())
        )
        if self.least_others > 1:
            means = selected(means, lambda group, name: held[group][name] > self.least_others)
        self._held = {g: Counter({n: held[g][n] for n in ts}) for g, ts in means.items()}
        return means


def _only(groups: Groups, names: Collection[str]) -> Groups:
    return {name: tensors for name, tensors in groups.items() if name in names}
