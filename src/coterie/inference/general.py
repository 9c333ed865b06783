"""The general samples of a client: requests with the base's own answers, and texts.

The base answers the requests once. Its answers are cached, because a large base takes minutes. The
cache folder is `general` in $COTERIE_CACHE, or else ~/.cache/coterie. It can be deleted at any
time.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base, Tokenizer
from coterie.config.run import RunConfig
from coterie.data.chat import ChatTemplate, chat_template
from coterie.data.examples import Examples, Sample, samples_of
from coterie.data.general import GeneralText, list_digest, shipped
from coterie.data.item_split import even
from coterie.data.items import Conversation
from coterie.data.parts import bare_encoder
from coterie.data.spec import DataSpec
from coterie.data.split import Split
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate, prompt_states
from coterie.evaluation.generation import (
    Sampling,
    ends_of,
    generate_answers,
    generated,
)
from coterie.federation.participants import Participant
from coterie.files import cache_path, parse_json, read_file, write_json
from coterie.inference.questions import answered, encoded, in_form
from coterie.methods.pretrained import bare
from coterie.training.general import GeneralSamples, Replay

FORMAT = 1
"""The version of the cached answers. A new version invalidates all cached answers."""
ANSWER = 12
"""The maximum number of tokens of an answer to a request."""
LONGEST = 40
"""The maximum number of tokens of a text, including texts that the base writes."""
Purpose = Literal["train", "held out"]
"""The use of general samples: to train models and to fit gates, or to measure drift and errors."""
WRITTEN: dict[Purpose, int] = {"train": 32, "held out": 8}
"""The numbers of texts that a base writes."""
AT_ONCE = 32
"""The number of requests that a base answers at once."""

Row = tuple[Tensor, Tensor]
"""The token ids of a sample, and a mask of the same shape of the tokens that count."""
MOST_PROMPTS = 512
"""The maximum number of a client's prompts to which its gate is fitted."""
_samples: WeakKeyDictionary[PreTrainedModel, dict[str, GeneralSamples]] = WeakKeyDictionary()
"""The samples of each base, which all clients with the same base and template share."""
_states: WeakKeyDictionary[PreTrainedModel, dict[str, Tensor]] = WeakKeyDictionary()
"""The states of each base after general prompts, likewise."""


def is_assistant(config: RunConfig, tokenizer: Callable[[], Tokenizer]) -> bool:
    """Return whether a run trains assistants, to which general requests make sense.

    Args:
        config: The run.
        tokenizer: Function that returns the base's own tokenizer.
    """
    answers = config.data.messages is not None or config.data.instructions is not None
    return answers and bool(tokenizer().chat_template)


def with_general(config: RunConfig, base: Base, participant: Participant) -> Participant:
    """Return a copy of a participant with its general samples and its gate.

    Args:
        config: The run.
        base: The participant's base. Any adapter that is attached to it is detached.
        participant: The participant. It is returned unchanged if the run neither has replay for its
            base, nor a gate, nor measures drift.

    Raises:
        CoterieError: The base gives no answers, or the run began with another version of the list
            that ships with Coterie.
    """
    spec = config.training.replay or None
    assistant = is_assistant(config, lambda: base.tokenizer)
    gated = assistant and config.training.gate
    measured = assistant and config.evaluation.general
    if spec is None and not gated and not measured:
        return participant
    maker = _Maker(base, config.data, participant)
    if gated:
        participant = replace(participant, gate=maker.gate())
    if spec is None and not measured:
        return participant
    written = participant.data.train.beginnings is None
    held_out = maker.written("held out") if written else maker.samples(shipped(held_out=True))
    participant = replace(participant, held_out=held_out)
    if spec is None:
        return participant
    if spec.digest not in (None, list_digest()):
        raise CoterieError(
            "training.replay: the run uses another version of Coterie's list of general requests; "
            "install the version of Coterie with which the run began, or set training.replay.text."
        )
    if written or spec.text == "sampled":
        trained = maker.written("train")
    else:
        texts = shipped(held_out=False) if isinstance(spec.text, str) else spec.text
        trained = maker.samples(texts)
    return replace(participant, replay=Replay(spec, trained))


def gated_drift(
    gate: Gate | None, base: Base, model: PreTrainedModel, samples: GeneralSamples
) -> float:
    """Return the drift on general samples; where the base answers, the divergence is 0."""
    if gate is None:
        return samples.drift(base, model)
    accepted = gate.accepts(base, samples.prompts())
    return samples.drift(base, model, [number for number, own in enumerate(accepted) if own])


class _Maker:
    """Makes general samples in the form of a participant's data.

    Args:
        base: The base.
        data: The run's data.
        participant: The participant.
    """

    def __init__(self, base: Base, data: DataSpec, participant: Participant) -> None:
        bare(base)  # the digest of the base is that of its own weights, and is computed once
        self.base, self.data, self.own = base, data, participant.data
        self.longest = min(LONGEST, data.window)
        beginnings = participant.data.train.beginnings
        self.template: ChatTemplate | None = None
        if beginnings is not None and isinstance(beginnings.items[0], Conversation):
            self.template = chat_template(base.tokenizer, data.chat_template)
        self._form = repr(data.instructions if self.template is None else self.template.source)

    def samples(self, texts: Sequence[GeneralText]) -> GeneralSamples:
        """Return texts, and requests with the base's answers, as samples."""
        key = self._key([text.model_dump() for text in texts], self._form)

        def make() -> list[Row]:
            requests = [text.request for text in texts if text.request is not None]
            plain = [text.text for text in texts if text.text is not None]
            return [*self._answered(requests, key), *map(self._plain, plain)]

        return self._shared(key, make)

    def gate(self) -> Gate | None:
        """Compute the participant's gate from its own prompts and general ones.

        The general prompts are those that ship with Coterie, and texts that the base writes.
        """
        train, validation = map(self._own_states, (self.own.train, self.own.validation))
        return Gate.fitted(train, validation, self._general_states())

    def _own_states(self, split: Split) -> Tensor:
        samples = split.beginnings
        assert samples is not None, "conversations and instructions have prompts"
        chosen = even(len(samples), MOST_PROMPTS).tolist()
        return prompt_states(self.base, samples.only(chosen).prompts(self.base))

    def _general_states(self) -> Tensor:
        """Return the states of general prompts, which clients with the same base share."""
        key = self._key(list_digest(), self._form, self.longest)
        shared = _states.setdefault(self.base.model, {})
        if key not in shared:
            listed = (text.request or text.text or "" for text in shipped(held_out=False))
            texts = [*listed, *filter(None, self._written("train"))]
            shared[key] = prompt_states(self.base, self._unanswered(texts).prompts(self.base))
        return shared[key]

    def written(self, purpose: Purpose) -> GeneralSamples:
        """Return texts that the base writes, each from its beginning, as samples."""

        def make() -> list[Row]:
            return list(map(self._plain, self._written(purpose)))

        return self._shared(self._key(purpose, self.longest), make)

    def _key(self, *parts: Any) -> str:
        base = self.base
        known = [FORMAT, ANSWER, base.digest, base.precision, base.device.type, *parts]
        return blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()

    def _shared(self, key: str, make: Callable[[], list[Row]]) -> GeneralSamples:
        """Return the samples that another client has made with the same key, or make them."""
        shared = _samples.setdefault(self.base.model, {})
        most = self.data.window + 1
        if (name := f"{key}-{most}") not in shared:
            rows = [(ids[:most], counted[1:most]) for ids, counted in make()]
            fitting = [row for row in rows if row[1].any()]
            if not fitting:
                raise CoterieError(
                    f"No general request with its answer fits `data.window: {self.data.window}`; "
                    "raise data.window, or set `training.replay: false` and "
                    "`evaluation.general: false`."
                )
            ids, counted = zip(*fitting, strict=True)
            shared[name] = GeneralSamples.of(self.base, bare(self.base), ids, counted)
        return shared[name]

    def _unanswered(self, requests: Sequence[str]) -> Examples:
        """Return requests as samples of which only the prompts are used."""
        items = in_form(self.data, self.template, requests)
        empty = [Sample([([], False), ([], True)], item) for item in items]
        return samples_of(empty, template=self.template)

    def _answered(self, requests: Sequence[str], key: str) -> list[Row]:
        """Return requests with the base's answers as rows."""
        prompts = self._unanswered(requests)

        def answer() -> list[str]:
            return generate_answers(self.base, bare(self.base), prompts, ANSWER, AT_ONCE)

        answers = _cached(key, len(requests), answer)
        pairs = [
            answered(item, answer)
            for item, answer in zip(prompts.items, answers, strict=True)
            if answer.strip()
        ]
        if requests and not pairs:
            raise CoterieError(
                "training.replay: the base answers none of the general requests; set "
                "`training.replay: false`, or use a base that was trained on conversations."
            )
        if not pairs:
            return []
        split = encoded(self.base, pairs, self.template)
        sizes = split.tokens.tolist()
        ids, counted = split.ids.long().split(sizes), split.counted.split(sizes)
        return list(zip(ids, counted, strict=True))

    def _written(self, purpose: Purpose) -> list[str]:
        """Return texts that the base writes, drawn from its distribution, from the cache."""
        base, count = self.base, WRITTEN[purpose]
        ends, _ = ends_of(base.tokenizer, ())
        ids = torch.full((count, 1), base.context_token, device=base.device)
        sampling = Sampling(self.longest, temperature=1.0).config(ends)

        def write() -> list[str]:
            devices = [base.device] if base.device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed([*WRITTEN].index(purpose))
                mask = torch.ones_like(ids)
                rows = generated(bare(base), ids, mask, generation_config=sampling)
            new = rows[:, 1:].tolist()
            return [str(base.tokenizer.decode(row, skip_special_tokens=True)) for row in new]

        return _cached(self._key(purpose, self.longest), count, write)

    def _plain(self, text: str) -> Row:
        encoder, end = bare_encoder(self.base.tokenizer)
        ids = encoder.encode(text, add_special_tokens=False).ids[: self.longest] or [end]
        row = torch.tensor([self.base.context_token, *ids])
        return row, torch.ones(len(row), dtype=torch.bool)


def _cached(key: str, count: int, make: Callable[[], list[str]]) -> list[str]:
    """Return texts from the cache; if they are missing or damaged, make and store them.

    Args:
        key: The name of the cache file.
        count: The number of texts.
        make: Function that makes the texts.
    """
    try:
        path = cache_path("general", f"{key}.json")
        texts = parse_json(read_file(path))
    except (OSError, RuntimeError, ValueError):
        texts = None
    if isinstance(texts, list) and [type(text) for text in texts] == [str] * count:
        return texts
    texts = make()
    with suppress(OSError, RuntimeError, CoterieError):  # the cache cannot be written
        path = cache_path("general", f"{key}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, texts)
    return texts
