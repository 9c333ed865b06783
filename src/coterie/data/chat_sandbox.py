"""A sandbox that renders chat templates as transformers does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

from jinja2 import Environment, Template
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
)

from coterie.data.sandbox import Sandbox, limited


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """Render a chat template.

    Raises:
        TooCostly: The template exceeds a limit.
        Exception: The template is invalid or refuses the values; it can raise any exception.
    """
    with limited(values):
        return _compiled(source).render(values)


@cache
def _sandbox() -> Sandbox:
    """Return an environment that renders templates as transformers does."""
    original = _compile_jinja_template("").environment
    sandbox = Sandbox(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
    )
    sandbox.add_filters({"tojson": original.filters["tojson"]})
    added = original.globals.keys() & {"raise_exception", "strftime_now", "dict", "namespace"}
    sandbox.globals |= {name: original.globals[name] for name in added}
    return sandbox


@lru_cache
def _compiled(source: str) -> Template:
    return _sandbox().from_string(source)


class _Limited(NamedTuple):
    """A compiled chat template that counts its work whenever transformers renders it."""

    template: Template

    @property
    def environment(self) -> Environment:
        """The environment in which transformers parses the template again."""
        return self.template.environment

    def render(self, **values: Any) -> str:
        """Render the template."""
        with limited(values):
            return self.template.render(values)


@contextmanager
def sandboxed() -> Iterator[None]:
    """Let transformers compile and render chat templates in the same environment as Coterie.

    Other packages, such as lm-eval, render chat templates with `tokenizer.apply_chat_template`.
    """

    def compiled(source: str) -> _Limited:
        with limited():
            return _Limited(_compiled(source))

    _sandbox()  # it needs the original function
    with patch.object(chat_template_utils, "_compile_jinja_template", compiled):
        yield
