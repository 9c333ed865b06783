"""Prompt templates: built-in templates, and Jinja text that uses the fields of a record."""

import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, UndefinedError
from jinja2.environment import TemplateExpression
from jinja2.meta import find_undeclared_variables

from coterie.data.files import Record, read_text, resolve
from coterie.data.sandbox import Sandbox, TooCostly, limited
from coterie.errors import CoterieError

SHIPPED = {
    file.stem: file
    for file in sorted((Path(__file__).parents[1] / "assets" / "templates").glob("*.jinja"))
}
"""A mapping of each built-in template's name to the template's file."""


def _printable(value: Any) -> Any:
    """Return a text or a number that Jinja is about to print, and refuse any other value.

    Jinja would print a mapping, for example, as a Python expression.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str | Undefined) or (number and math.isfinite(value)):
        return value
    raise TypeError(f"it prints {value!r:.60}, which is neither text nor a number")


# The end of a prompt affects how a model begins its answer, so a text's last newline is kept. Lines
# with only a block, such as {% if %}, are removed.
_JINJA = Sandbox(
    undefined=StrictUndefined,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_printable,
)


def inlined(template: str, root: Path) -> str:
    """Replace the path of a template with the file's text, so that the result needs no file.

    Args:
        template: A built-in template's name, Jinja text, or the path of a file.
        root: The folder to which a relative path refers.

    Returns:
        The unchanged template if it is a name or Jinja text. If the template is a path, the text of
        the file without a final newline.

    Raises:
        CoterieError: The file does not exist, or the text is not valid Jinja.
    """
    if template not in SHIPPED and not is_text(template):
        alternatives = (
            f"use a built-in template ({', '.join(SHIPPED)}), or write Jinja text, such as "
            "'{{ question }} Answer:'"
        )
        file, text = _read(template, root, "data.instructions.template", alternatives)
        template = text.removesuffix("\n")
        if not is_text(template):
            raise CoterieError(
                f"The template {file} uses no field; insert one, such as {{{{ question }}}}."
            )
    _compiled(template)
    return template


def inlined_chat(template: str, root: Path) -> str:
    """Replace the path of a chat template with the file's text.

    Args:
        template: Jinja text, or the path of a file.
        root: The folder to which a relative path refers.

    Raises:
        CoterieError: The file does not exist, or is not a chat template.
    """
    if is_text(template):
        return template
    alternatives = "or remove data.chat_template to use each base's own template"
    file, text = _read(template, root, "data.chat_template", alternatives)
    if not is_text(text):
        raise CoterieError(
            f"data.chat_template: {file} is not a chat template, because it contains no Jinja; "
            "name a file with Jinja text that uses `messages`."
        )
    return text


def _read(path: str, root: Path, key: str, alternatives: str) -> tuple[Path, str]:
    """Read a file whose path is the value of a key of the run file.

    Args:
        path: The value of the key.
        root: The folder to which a relative path refers.
        key: The key, for error messages.
        alternatives: Remedies other than correcting the path, for error messages.

    Returns:
        The absolute path of the file, and the text of the file.
    """
    file = resolve(root, path)
    if not os.path.isfile(file):  # unlike Path.is_file, accepts names that are too long
        raise CoterieError(f"{key}: there is no file {file}; correct the path, {alternatives}.")
    return file, read_text(file, key)


def render(template: str, fields: Mapping[str, Any], where: str) -> str:
    """Render a template for one record.

    Args:
        template: A built-in template's name, or Jinja text; see `inlined`.
        fields: A mapping of the record's fields to values. A field whose value is None is treated
            as missing.
        where: The record's location, with which error messages begin.

    Raises:
        CoterieError: The template needs a missing field, cannot be rendered, or renders a blank
            text.
    """
    compiled, names = _compiled(template)
    record = Record(where, {name: value for name, value in fields.items() if value is not None})
    for name in names & record.fields.keys():
        record[name]  # raises if the value cannot be decoded
    try:
        with limited(record.fields):
            prompt = compiled.render(record.fields)
    except TooCostly as error:
        raise CoterieError(f"{where}: the template {error}; write a simpler template.") from error
    except Exception as error:  # an expression of the template can raise any exception
        for name in names - record.fields.keys() if isinstance(error, UndefinedError) else ():
            if str(error).startswith(f"{name!r} is"):
                if name in fields:
                    raise CoterieError(
                        f"{where} has null in the field {name}, which the template needs; give the "
                        "field a value or remove the record."
                    ) from error
                record[name]  # raises an error that lists the record's fields
        raise CoterieError(
            f"{where} does not fit the template ({error}); fix the record or the template."
        ) from error
    if not prompt.strip():
        raise CoterieError(f"{where} gives an empty text; fix the record or the template.")
    return Record(where, {"prompt": prompt}).text(["prompt"])


def holds(expression: str, record: Record) -> bool:
    """Evaluate a Jinja expression, such as `text | wordcount > 9`, on the fields of a record.

    Returns:
        Whether the expression is true for the record.

    Raises:
        CoterieError: A field is missing, or the expression cannot be evaluated.
    """
    compiled, names = _expression(expression)
    for name in sorted(names):
        record[name]  # raises an error that lists the record's fields if the field is missing
    try:
        with limited(record.fields):
            return bool(compiled(record.fields))
    except TooCostly as error:
        raise CoterieError(f"divide.where {error}; write a simpler expression.") from error
    except Exception as error:  # an expression can raise any exception
        raise CoterieError(
            f"divide.where cannot be evaluated for {record.where} ({error}); fix the record or "
            "divide.where."
        ) from error


@cache
def _expression(expression: str) -> tuple[TemplateExpression, frozenset[str]]:
    """Return a compiled expression, and the names of the fields that the expression uses."""
    try:
        with limited():
            names = find_undeclared_variables(_JINJA.parse(f"{{{{ {expression} }}}}"))
            compiled = _JINJA.compile_expression(expression, undefined_to_none=False)
        return compiled, frozenset(names)
    except TooCostly as error:
        raise CoterieError(f"divide.where {error}; write a simpler expression.") from error
    except TemplateSyntaxError as error:
        raise CoterieError(
            f"divide.where is not a valid Jinja expression ({(error.message or '').rstrip('.')}); "
            "write an expression over a record's fields, such as `text | wordcount > 9`."
        ) from error


def names_in(expression: str) -> frozenset[str]:
    """Return the names of the fields that a Jinja expression uses."""
    return _expression(expression)[1]


def fields(template: str) -> list[str]:
    """Return the sorted names of the fields that a template uses."""
    return sorted(_compiled(template)[1])


def is_text(template: str) -> bool:
    """Return whether a string is Jinja text rather than a name or a path."""
    return "{{" in template or "{%" in template


@cache
def _compiled(template: str) -> tuple[Template, frozenset[str]]:
    """Load a built-in template by name, or parse Jinja text.

    Returns:
        The template, and the names of the fields that the template uses.
    """
    if file := SHIPPED.get(template):
        template = file.read_text(encoding="utf-8").removesuffix("\n")
    elif not is_text(template):
        raise CoterieError(
            f"There is no template {template!r}; use a built-in template ({', '.join(SHIPPED)}) or "
            "Jinja text."
        )
    try:
        with limited():
            names = find_undeclared_variables(_JINJA.parse(template))
            return _JINJA.from_string(template), frozenset(names)
    except TooCostly as error:
        raise CoterieError(f"The template {error}; write a simpler template.") from error
    except TemplateSyntaxError as error:
        raise CoterieError(
            f"Line {error.lineno} of the template is not valid Jinja: "
            f"{(error.message or '').rstrip('.')}; fix that line."
        ) from error
