"""Validated reading of the files in a run folder.

A run folder can be damaged or come from an untrusted source. The functions of this module return
values of the types that reports, tables and commands expect, or raise CoterieError.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from coterie.errors import CoterieError
from coterie.files import parse_json, read_inside
from coterie.messages.envelope import Entry
from coterie.messages.names import SERVER, TAUGHT, TEST

Score = dict[str, Annotated[float, Field(allow_inf_nan=False)] | None]
Rounds = Annotated[int, Field(ge=0, le=2**31)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Named(_Part):
    name: str


class _Evaluation(_Part):
    split: Literal["test", "validation"] = "test"
    metric: str | None = None


class _Training(_Part):
    steps: Rounds
    batch: Rounds


class _Deployment(_Part):
    anyone: bool


class _Config(_Part):
    """The few keys of a run's configuration that are validated when the run folder is read."""

    name: str
    seed: int
    method: _Named
    base: str | _Named
    pooled: bool
    rounds: Rounds
    data: dict[str, Any]
    clients: list[_Named]
    training: _Training
    evaluation: _Evaluation
    deployment: _Deployment


class _Plugin(_Part):
    file: str
    sha256: str


class _Client(_Part):
    tokens: dict[str, Any] | None = None
    labels: dict[str, int] | None = None


class Plugins(_Part):
    """The section `plugins` of run.json, which lists the plugins needed to resume the run."""

    plugins: dict[str, _Plugin] = {}


class Description(Plugins):
    """The content of run.json."""

    threads: int
    clients: dict[str, _Client]
    config: _Config
    server: dict[str, Any] = {}
    run: str = ""


class Result(_Part):
    """The content of result.json."""

    trained: dict[str, Score] = {}
    aggregated: dict[str, Score] = {}
    server: Score = {}
    kept: dict[str, Rounds] = {}
    drift: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    left_out: dict[str, dict[str, str]] = {}
    traffic: dict[Literal["up", "down"], int] = {}
    seconds: float = 0.0


class Outcome(Result):
    """The content of result.json, as reports and tables need it.

    The file must contain the keys `method` and `reports`, which `Result` does not require.
    """

    method: str
    reports: Literal["trained", "aggregated"]


class Listed(_Part):
    """The content of without.json and received.json, which list clients of a deployed run."""

    clients: list[str]


class Trained(_Part):
    """The content of a deployed client's trained.json.

    The keys are rounds, counted from 0. A value is the number of times that the client trained in
    the round. A client trains more than once if, for example, the server sends another download for
    the same round.
    """

    __pydantic_extra__: dict[str, Rounds]  # pyright: ignore


class About(_Part):
    """The content of about.json in a deployed client's checkpoint.

    The checkpoint contains the client's state after the client executed an order of the server. The
    file about.json identifies this order by its turn and the digest of its download, and contains
    the metrics that were recorded during its execution.
    """

    turn: int
    digest: str
    entries: list[dict[str, Any]]


class Items(_Part):
    """The content of scores/POINT/NAME.json: the scores of each window of the test text NAME.

    POINT names the model that was scored, such as `trained` or `aggregated`.
    """

    __pydantic_extra__: dict[str, list[float | None]]  # pyright: ignore
    of: str = ""


class TaskScore(_Part):
    """A score of a model on a task of lm-eval."""

    task: str
    metric: str
    value: Annotated[float, Field(allow_inf_nan=False)] | None
    error: Annotated[float, Field(allow_inf_nan=False)] | None
    """The standard error, if lm-eval computed one."""
    higher: bool
    """Whether higher values are better."""
    samples: int | None


class TaskScores(_Part):
    """The content of evaluations/CLIENT/METHOD/TASK.json: the scores of a model on a task."""

    client: str
    method: str
    task: str
    key: dict[str, str | int | bool | None]
    """The model, the task and the limit, on which the scores depend."""
    scores: list[TaskScore]
    replies: list[str] = []
    """The model's free replies to general questions."""


SCORE = TypeAdapter(Score)
CHECKSUMS = TypeAdapter(dict[str, str])


def hashes(checksums: Any) -> dict[str, str]:
    """Validate the hashes of a checkpoint's files; raise ValueError if they are malformed."""
    try:
        return CHECKSUMS.validate_python(checksums, strict=True)
    except ValidationError as error:
        raise ValueError("the file does not map names to hashes") from error


def read_json(folder: Path, name: str, kind: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run folder, unchanged.

    Args:
        folder: The run folder.
        name: The file's path inside the folder.
        kind: The pydantic model that validates the mapping; None: no validation.

    Raises:
        CoterieError: The file is missing, damaged, or reached through a link.
    """
    try:
        values = parse_json(read_inside(folder, name))
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
    except OSError as error:
        raise CoterieError(f"{folder} is not a run folder ({name}: {error.strerror}).") from None
    except ValueError as error:
        raise CoterieError(f"{folder / name} is damaged: {error}; {REMEDY}") from None
    if kind is not None:
        check(folder / name, values, kind)
    return values


def check(path: Path, values: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Raise CoterieError if the content of a JSON file does not fit a pydantic model.

    Args:
        path: The path of the file, which the error message names.
        values: The content of the file.
        kind: The pydantic model.
    """
    try:
        kind.model_validate(values)
    except ValidationError as error:
        raise CoterieError(f"{path} is damaged: {_first(error)}; {REMEDY}") from None


OUTDATED = "Use the version that wrote it, or start a new run in another folder."
REMEDY = "restore it from a copy, or run again in another folder."


def read_lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSON Lines file of metrics, without an incomplete last line.

    Raises:
        CoterieError: A line is damaged, or the file cannot be read.
    """
    try:
        lines = read_inside(folder, name).splitlines(keepends=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CoterieError(f"{folder / name}: {error.strerror}.") from None
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text)
            if not isinstance(line, dict):
                raise ValueError("it is not a JSON object")
            _check_line(line)
        except ValueError as error:
            if number == len(lines) and not text.endswith(b"\n"):
                return
            reason = _first(error) if isinstance(error, ValidationError) else error
            raise CoterieError(
                f"{folder / name}, line {number}, is damaged: {reason}; {REMEDY}"
            ) from None
        yield line


def _check_line(line: Mapping[str, Any]) -> None:
    entry = {key: value for key, value in line.items() if key != "during"}
    name = line.get("name")
    if isinstance(name, str) and name.startswith((TEST, SERVER)):
        SCORE.validate_python(entry.get("value"), strict=True)
        entry["name"] = "score"  # validated above; the rule of `Entry` is stricter
    elif line.get("client") is None and name == TAUGHT:
        entry["name"] = "taught by clients"  # has counts by teacher, which `Entry` rejects
    Entry.model_validate(entry)
    if type(line.get("during", 0)) is not int:
        raise ValueError("`during` is not a round")


def _first(error: ValidationError) -> str:
    """Format the first validation error with its location in the file."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = ".".join(map(str, first["loc"]))
    return f"{location}: {first['msg']}" if location else first["msg"]


def turn_of(line: Mapping[str, Any]) -> int:
    """Return the number of the turn in which a line of metrics.jsonl was recorded."""
    return line.get("during", line["round"])
