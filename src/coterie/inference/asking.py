"""Questions for the models of a finished run, and the models' answers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

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
from coterie.evaluation.gate import gated_answers
from coterie.federation.participants import EVERYONE
from coterie.inference.models import RunModels, Step

TOKENS = 120
"""The maximum number of tokens of an answer if the run file does not set `evaluation.generate`."""


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
        step: Function that is called before each model is loaded; see `Step`.

    Returns:
        A mapping from the names of the models to their answers: first the base, then the models of
        the baselines, then the models of the run's method. If all clients of a method have the same
        model and answers, the model has the method's name. Otherwise, its name is "METHOD: CLIENT".

    Raises:
        CoterieError: The run is not finished, has no such client, or did not train on
            conversations or instructions.
    """
    models = RunModels(path)
    config = models.config
    limit = tokens or config.evaluation.generate or TOKENS
    items = as_items(config.data, questions)
    models.check(clients)

    def wanted(client: str) -> bool:
        return not clients or client in (*clients, EVERYONE)

    texts: dict[tuple[str, str], tuple[str, ...]] = {}
    keys: dict[str, dict[str, tuple[str, str]]] = {}
    for method, client, base, model, digest, gate in models.attached(step=step):
        key = digest, "" if gate is None else gate.digest
        keys.setdefault(method, {})[client] = key
        if wanted(client) and key not in texts:
            samples = _samples(items, base, config.data)
            texts[key] = tuple(gated_answers(gate, base, model, samples, limit, len(items)))
    named: dict[str, list[str]] = {}
    for method, by_client in keys.items():
        known = {texts[key] for client, key in by_client.items() if key in texts}
        is_shared = len({digest for digest, _ in by_client.values()}) == len(known) == 1
        for client in filter(wanted, by_client):
            named[method if is_shared else f"{method}: {client}"] = [*texts[by_client[client]]]
    return named


def as_items(
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


def question_prompt(question: str, base: Base, data: DataSpec) -> list[int]:
    """Return the token ids of a question, rendered as the prompts that a run trained on.

    Args:
        question: The question.
        base: The base of the model that answers.
        data: The run's data, which are instructions or conversations.
    """
    items = as_items(data, [Record("The question", {"question": question})])
    [prompt] = _samples(items, base, data).prompts(base)
    return prompt.tolist()


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
