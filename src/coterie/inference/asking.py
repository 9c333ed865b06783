"""Questions for the models of a finished run, and the models' answers."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.data import files
from coterie.data.chat import chat_template
from coterie.data.examples import Examples, Sample, samples_of
from coterie.data.files import Record
from coterie.data.items import Conversation, Instruction, Turn
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import DataSpec
from coterie.data.templates import fields
from coterie.errors import CoterieError
from coterie.evaluation.generation import generate_answers
from coterie.federation.participants import EVERYONE
from coterie.inference.finished import Loaded, Loader, recorded
from coterie.methods.contract import SERVER
from coterie.methods.pretrained import Pretrained, bare
from coterie.runs import RunFolder

BASE = "base"
"""The name of a run's base without an adapter, in `coterie ask` and in `coterie chat --with`."""
TOKENS = 120
"""The maximum number of tokens of an answer if the run file does not set `evaluation.generate`."""
Load = Callable[[str], Loaded]
Step = Callable[[str, int, int], None]


def read_questions(file: Path, owner: str) -> list[Record]:
    """Read the records of a JSON Lines file with the field `question`.

    Args:
        file: The file.
        owner: The option or the key that names the file. Error messages begin with it.

    Raises:
        CoterieError: The file cannot be read, or a record has no question.
    """
    if not file.is_file():
        raise CoterieError(f"{owner}: there is no file {file}; correct the path.")
    remedy = "Put the question into the field `question`."
    records = [replace(record, remedy=remedy) for record in files.read_records(file, owner)]
    check_questions(records)
    return records


def check_questions(records: Iterable[Record]) -> None:
    """Raise CoterieError if a record has no question, or an empty question."""
    for record in records:
        if not record.text(["question"]).strip():
            raise CoterieError(f"{record.where}: the question is empty; give it a text.")


def shown_questions(config: RunConfig) -> list[Record]:
    """Read the questions whose answers `coterie run` shows; see the key `evaluation.questions`."""
    if config.evaluation.questions is None:
        return []
    file = files.resolve(config.root, config.evaluation.questions)
    records = read_questions(file, "evaluation.questions")
    if not any("shown" in record.fields for record in records):
        return records
    shown = [record for record in records if record.fields.get("shown") is True]
    if not shown:
        raise CoterieError(
            f"evaluation.questions: no record of {file} has `shown: true`; mark the questions to "
            "show, or remove the field from all records."
        )
    return shown


def answers(
    path: Path,
    questions: Sequence[Record],
    clients: Sequence[str] = (),
    tokens: int | None = None,
    step: Step = lambda *_: None,
) -> dict[str, list[str]]:
    """Let every model of a finished run answer questions by greedy decoding.

    Args:
        path: The run folder.
        questions: Records with the field `question`.
        clients: The names of the clients whose models answer; by default, all clients.
        tokens: The maximum number of tokens of an answer; by default, `evaluation.generate`.
        step: Function that is called before each model is loaded. Its arguments are the name of the
            model, the number of models loaded so far, and the number of all models.

    Returns:
        A mapping from the names of the models to their answers: first the base, then the models of
        the baselines, then the models of the run's method. If all clients of a method have the same
        model, the model has the method's name. Otherwise, its name is "METHOD: CLIENT".

    Raises:
        CoterieError: The run is not finished, has no such client, or did not train on
            conversations or instructions.
    """
    folder = RunFolder(path)
    config = recorded(folder)
    limit = tokens or config.evaluation.generate or TOKENS
    items, methods = _items(config.data, questions), _methods(folder, config)
    names = list(dict.fromkeys(chain.from_iterable(methods.values())))
    for client in clients:
        if client not in names:
            raise CoterieError(
                f"The run {path} has no client {client!r} (clients: {', '.join(names)})."
            )

    def wanted(client: str) -> bool:
        return not clients or client in (*clients, EVERYONE)

    done, total = 0, sum(map(len, methods.values()))
    texts: dict[tuple[int, str], list[str]] = {}
    named: dict[str, list[str]] = {}
    for method, models in methods.items():
        keys: dict[str, tuple[int, str]] = {}
        for client, load in models.items():
            step(f"{method}: {client}", done, total)
            done += 1
            base, attach = load(client)
            frozen = {tensor.data_ptr() for _, tensor in _tensors(bare(base))}
            model = attach()
            keys[client] = key = (id(base), _digest(model, frozen))
            if wanted(client) and key not in texts:
                samples = _samples(items, base, config.data)
                texts[key] = generate_answers(base, model, samples, limit, len(items))
        is_shared = len(set(keys.values())) == 1
        for client in filter(wanted, keys):
            named[method if is_shared else f"{method}: {client}"] = texts[keys[client]]
    return named


def _methods(folder: RunFolder, config: RunConfig) -> dict[str, dict[str, Load]]:
    """Return, for the base and for each method of a run, the functions that load its models.

    The method `pretrained` is left out, because its model is the base.

    Returns:
        A mapping from methods to mappings from clients to functions. The argument of a function is
        the client's name.

    Raises:
        CoterieError: The run is not finished.
    """
    if folder.result is None:
        raise CoterieError(
            f"The run in {folder.path} is not finished; finish it with `coterie run --resume "
            f"{folder.path}`."
        )
    loader = Loader()

    def bare_base(client: str) -> Loaded:
        base = loader.base(config, client)
        return Loaded(base, partial(bare, base))

    methods: dict[str, dict[str, Load]] = {
        BASE: dict.fromkeys(_trained_by(folder, config), bare_base)
    }
    baselines = {name: RunFolder(folder.path / "baselines" / name) for name in config.baselines}
    for name, run in {**baselines, config.label: folder}.items():
        run_config = recorded(run)
        if not isinstance(run_config.method, Pretrained):
            load = partial(loader.load, run, run_config)
            methods[name] = dict.fromkeys(_trained_by(run, run_config), load)
    return methods


def _trained_by(run: RunFolder, config: RunConfig) -> list[str]:
    """Return the names of a run's clients, and "server" if the run scored a server's model."""
    has_server = "server" in (run.result or {}) and not config.pooled
    return [*run.description["clients"], *[SERVER] * has_server]


def _digest(model: PreTrainedModel, frozen: Collection[int]) -> str:
    """Return a hash of the tensors that an adapter adds to its base.

    Args:
        model: The base with the adapter attached.
        frozen: The memory addresses of the base's own tensors.
    """
    digest = blake2b(digest_size=16)
    for name, tensor in _tensors(model):
        if tensor.data_ptr() not in frozen:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())


def _items(
    data: DataSpec, questions: Sequence[Record]
) -> Sequence[Instruction] | Sequence[Conversation]:
    """Return questions as samples of a run's kind of data, with "A" in place of the answers."""
    if data.messages is not None:
        return [
            Conversation((Turn("user", record["question"]), Turn("assistant", "A")), record.where)
            for record in questions
        ]
    if data.instructions is None:
        raise CoterieError(
            "The models did not train on conversations or instructions, so they answer no "
            "questions; use `coterie generate`."
        )
    spec = data.instructions.model_copy(update={"answer": "{{ 'A' }}", "choices": None})
    names = fields(spec.template)
    return instructions([_with_field(record, names) for record in questions], spec)


def _with_field(record: Record, names: Sequence[str]) -> Record:
    """Return a record with the question in a field that a prompt template uses.

    Args:
        record: The record with the question.
        names: The fields that the template uses. If the record lacks some of them, the question is
            put into the field `instruction` or, if this field is not lacking, into the first one.
    """
    lacking = [name for name in names if name not in record.fields]
    field = "instruction" if "instruction" in lacking else next(iter(lacking), "question")
    return replace(record, fields={**record.fields, field: record["question"]})


def _samples(
    items: Sequence[Instruction] | Sequence[Conversation], base: Base, data: DataSpec
) -> Examples:
    """Return a split of which only the prompts are used; it contains no tokens."""
    template = chat_template(base.tokenizer, data.chat_template) if data.chats else None
    empty = [Sample([([], False), ([], True)], item) for item in items]
    return samples_of(empty, template=template)
