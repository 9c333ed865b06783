"""Templates of prompts: Jinja text over the fields of a record, some of them shipped by name."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, UndefinedError
from jinja2.environment import TemplateExpression
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coterie.data.files import Record, read_text, resolve
from coterie.errors import CoterieError

SHIPPED = {
    file.stem: file
    for file in sorted((Path(__file__).parents[1] / "assets" / "templates").glob("*.jinja"))
}
"""Where the templates are that a run file can name."""

# What ends a prompt decides how its answer begins, so the last newline of a text counts. The lines
# of blocks such as {% if %} leave nothing behind.


def _printable(value: Any) -> Any:
    """Refuse what a template would print as a Python expression, such as a mapping."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str | Undefined) or (number and math.isfinite(value)):
        return value
    raise TypeError(f"it prints {value!r:.60}, not a text or a number")


_JINJA = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_printable,
)


def inlined(template: str, root: Path) -> str:
    """A template that needs no file: a shipped one's name, or Jinja text.

    Names and text come back as they are; a path, relative to `root`, as what is in the file but for
    the newline that ends its last line. Raises CoterieError if there is no such file, or if the
    text is not Jinja.
    """
    if template not in SHIPPED and not is_text(template):
        instead = (
            f"use a built-in template ({', '.join(SHIPPED)}), or write Jinja text, such as "
            "'{{ question }} Answer:'"
        )
        file, text = _read(template, root, "data.instructions.template", instead)
        template = text.removesuffix("\n")
        if not is_text(template):
            raise CoterieError(
                f"The template {file} uses no field; insert one, such as {{{{ question }}}}."
            )
    _compiled(template)
    return template


def inlined_chat(template: str, root: Path) -> str:
    """A chat template's text: the text itself, or what is in the file at a path, relative to
    `root`. Raises CoterieError if there is no such file."""
    if is_text(template):
        return template
    instead = "or leave it out for each base's own"
    file, text = _read(template, root, "data.chat_template", instead)
    if not is_text(text):
        raise CoterieError(
            f"data.chat_template: {file} is not a chat template, which is Jinja text over "
            "`messages`; give another file."
        )
    return text


def _read(path: str, root: Path, key: str, instead: str) -> tuple[Path, str]:
    """The file that a key of a run file names, and its text; `instead`: what else to do."""
    file = resolve(root, path)
    if not file.is_file():
        raise CoterieError(f"{key}: there is no file {file}; correct the path, {instead}.")
    return file, read_text(file, key)


def render(template: str, fields: Mapping[str, Any], where: str) -> str:
    """The prompt of one record, by a template as `inlined` gives it.

    Fields that hold None count as missing. Raises CoterieError, beginning with `where`, if the
    template needs a field that is missing, or if nothing comes of it.
    """
    compiled, names = _compiled(template)
    record = Record(where, {name: value for name, value in fields.items() if value is not None})
    for name in names & record.fields.keys():
        record[name]  # raises where it cannot be read
    try:
        prompt = compiled.render(record.fields)
    except Exception as error:  # whatever an expression of the template can raise
        for name in names - record.fields.keys() if isinstance(error, UndefinedError) else ():
            if str(error).startswith(f"{name!r} is"):
                if name in fields:
                    raise CoterieError(
                        f"{where} has null in the field {name}, which the template needs; fill it "
                        "in or remove the record."
                    ) from error
                record[name]  # raises, and says which fields there are
        raise CoterieError(
            f"{where} does not fit the template ({error}); fix one of them."
        ) from error
    if not prompt.strip():
        raise CoterieError(f"{where} gives an empty prompt; fix it or the template.")
    return Record(where, {"prompt": prompt}).text(["prompt"])


def holds(expression: str, record: Record) -> bool:
    """Whether a Jinja expression over a record's fields is true, such as `text | wordcount > 9`.

    Raises CoterieError, beginning with the record's place, if a field is missing, or if the
    expression cannot be evaluated.
    """
    compiled, names = _expression(expression)
    for name in sorted(names):
        record[name]  # raises where it is missing, and says which fields there are
    try:
        return bool(compiled(record.fields))
    except Exception as error:  # whatever an expression can raise
        raise CoterieError(
            f"{record.where} does not fit divide.where ({error}); fix one of them."
        ) from error


@cache
def _expression(expression: str) -> tuple[TemplateExpression, frozenset[str]]:
    """An expression, and the names of the fields that it uses."""
    try:
        names = find_undeclared_variables(_JINJA.parse(f"{{{{ {expression} }}}}"))
        return _JINJA.compile_expression(expression, undefined_to_none=False), frozenset(names)
    except TemplateSyntaxError as error:
        raise CoterieError(
            f"divide.where is not a valid Jinja expression ({(error.message or '').rstrip('.')}); "
            "write one over a record's fields, such as `text | wordcount > 9`."
        ) from error


def names_in(expression: str) -> frozenset[str]:
    """Return the names of the fields that a Jinja expression uses."""
    return _expression(expression)[1]


def fields(template: str) -> list[str]:
    """Names of the fields that a template may use, sorted."""
    return sorted(_compiled(template)[1])


def is_text(template: str) -> bool:
    """Whether it is Jinja text rather than a name."""
    return "{{" in template or "{%" in template


@cache
def _compiled(template: str) -> tuple[Template, frozenset[str]]:
    """A shipped template, by name, or Jinja text; and the names of the fields that it may use."""
    if file := SHIPPED.get(template):
        template = file.read_text(encoding="utf-8").removesuffix("\n")
    elif not is_text(template):
        raise CoterieError(
            f"There is no template {template!r}; the built-in templates are {', '.join(SHIPPED)}."
        )
    try:
        names = find_undeclared_variables(_JINJA.parse(template))
        return _JINJA.from_string(template), frozenset(names)
    except TemplateSyntaxError as error:
        raise CoterieError(
            f"The template is not valid Jinja, line {error.lineno}: "
            f"{(error.message or '').rstrip('.')}; fix that line."
        ) from error
