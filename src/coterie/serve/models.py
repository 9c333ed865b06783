"""The models of finished runs, under the names by which requests choose them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from coterie.adapters import expert_roles, fix_factors
from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.data.chat import ChatTemplate, chat_template
from coterie.data.items import Turn
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.evaluation.generation import context_length
from coterie.federation.participants import EVERYONE
from coterie.inference.asking import question_prompt
from coterie.inference.finished import Loaded, Loader
from coterie.inference.models import BASE, RunModels, Step, adapter_digest
from coterie.methods.pretrained import bare

Kind = Literal["base", "averaged", "personal"]
"""The kind of a model: the base, a model that all clients share, or a client's own model."""


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of one or several served models: a base and an adapter.

    Models of several names share one object if their weights are equal, so that their requests are
    decoded in one batch.
    """

    base: Base
    attach: Callable[[], PreTrainedModel]
    """Function that attaches the adapter to the base and returns the model."""
    context: int | None
    """The maximum number of tokens that the model reads; None if it is unlimited."""
    routed: bool
    """Whether a router weights experts of several roles."""


@dataclass(frozen=True)
class ServedModel:
    """A model that requests can choose.

    Attributes:
        name: The model's name: METHOD:CLIENT, or `base` if all clients have one base.
        client: The client's name; None for `base`, and for the single model of a pooled run.
        method: The method's name.
        kind: The kind of the model; see `Kind`.
        own: Whether the method is the run's own method, instead of a baseline.
        weights: The model's weights.
        fallback: The client's gate, and the weights of its base, which answers what the gate does
            not accept; None if the model answers all requests.
        config: The configuration of the run.
    """

    name: str
    client: str | None
    method: str
    kind: Kind
    own: bool
    weights: Weights
    fallback: tuple[Gate, Weights] | None
    config: RunConfig

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the run trained on other data and the base has no template."""
        tokenizer = self.weights.base.tokenizer
        if not self.config.data.chats and not tokenizer.chat_template:
            return None
        return chat_template(tokenizer, self.config.data.chat_template)

    @property
    def chats(self) -> bool:
        """Whether the model answers questions, in a chat template or in a prompt template."""
        return self.config.data.instructions is not None or self.template is not None

    @cached_property
    def _encoder(self) -> PartEncoder:
        return PartEncoder(bare_encoder(self.weights.base.tokenizer)[0])

    def chat_prompt(self, turns: Sequence[Turn]) -> tuple[list[int], tuple[str, ...]]:
        """Encode a conversation as the prompt for the next answer.

        Args:
            turns: The conversation; the last turn is the user's.

        Returns:
            The token ids of the prompt, and the texts that end an answer.

        Raises:
            CoterieError: The model has no chat, or the template refuses the conversation.
        """
        data = self.config.data
        if data.instructions is not None and not data.chats:
            if len(turns) > 1:
                raise CoterieError(
                    f"The model {self.name} was trained on single instructions; send one message, "
                    "with the role user."
                )
            return question_prompt(turns[0].content, self.weights.base, data), ()
        if self.template is None:
            raise CoterieError(
                f"The model {self.name} was trained on plain text, and its tokenizer has no chat "
                "template; use /v1/completions."
            )
        parts = self.template.opening_and_answer(turns)
        return self._encoder.opening(parts), self.template.markers

    def text_prompt(self, text: str) -> list[int]:
        """Encode a text that the model continues, as `coterie generate --prompt` does."""
        tokenizer: Any = self.weights.base.tokenizer
        return tokenizer(text or tokenizer.bos_token or tokenizer.eos_token)["input_ids"]


class Models:
    """All models that a server offers.

    Args:
        runs: The folders of finished runs.
        step: Function that is called before each model is loaded. Its arguments are the name of
            the model, the number of models loaded so far, and the number of models of the run.

    Raises:
        CoterieError: A folder contains no finished run, or two runs have different models with
            the same name.
    """

    def __init__(self, runs: Sequence[Path], step: Step = lambda *_: None) -> None:
        self._loader, self._step = Loader(), step
        self._weights: dict[tuple[int, str], Weights] = {}
        self.by_name: dict[str, ServedModel] = {}
        for run in [RunModels(run, self._loader) for run in runs]:
            for model in self._models_of(run):
                earlier = self.by_name.setdefault(model.name, model)
                if earlier.weights is not model.weights:
                    raise CoterieError(
                        f"The run {run.path} and an earlier run both have a different model "
                        f"named {model.name}; serve the runs in separate processes."
                    )
        bases = [model for model in self.by_name.values() if model.kind == "base"]
        if len({id(model.weights) for model in bases}) == 1:
            for model in bases:
                del self.by_name[model.name]
            self.by_name = {BASE: replace(bases[0], name=BASE, client=None), **self.by_name}
        own = [model for model in self.by_name.values() if model.own and model.client]
        clients = [model.client for model in own]
        aliases = {m.client: m for m in own if m.client and clients.count(m.client) == 1}
        self.names = self.by_name | {a: m for a, m in aliases.items() if a not in self.by_name}
        """All names by which requests can choose models: those in `by_name`, and clients' names."""

    def _models_of(self, run: RunModels) -> Iterator[ServedModel]:
        done, total = 0, sum(len(loads) for _, loads in run.methods.values())
        for method, (_, loads) in run.methods.items():
            weights: dict[str, Weights] = {}
            fallbacks: dict[str, tuple[Gate, Weights]] = {}
            for client, load in loads.items():
                self._step(f"{method}: {client}", done, total)
                loaded = load(client)
                weights[client] = self._unique(loaded)
                if loaded.gate is not None:
                    untrained = Loaded(loaded.base, partial(bare, loaded.base))
                    fallbacks[client] = loaded.gate, self._unique(untrained)
                done += 1
            is_equal = len(weights) > 1 and len(set(map(id, weights.values()))) == 1
            is_shared = is_equal or EVERYONE in weights
            kind: Kind = "base" if method == BASE else "averaged" if is_shared else "personal"
            for client, own in weights.items():
                name, is_own = f"{method}:{client}", method == run.config.label
                owner = None if client == EVERYONE else client
                fallback = fallbacks.get(client)
                yield ServedModel(name, owner, method, kind, is_own, own, fallback, run.config)

    def _unique(self, loaded: Loaded) -> Weights:
        """Return the weights of a loaded model, or those of an earlier model if they are equal."""
        base, attach, _ = loaded
        key = id(base), adapter_digest(base, attach)
        if key not in self._weights:
            base.tokenizer("")  # the first call changes the tokenizer; later calls are thread-safe
            model = attach()
            fix_factors(model)
            routed = len(set(expert_roles(model))) > 1
            self._weights[key] = Weights(base, attach, context_length(model), routed)
        return self._weights[key]
