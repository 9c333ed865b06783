"""What the fields of a model mean: the docstrings below them, read when they are asked for.

pydantic's `use_attribute_docstrings` reads the source of every class at import instead, which
slows down every start.
"""

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the description of every field: the docstring below it, or its `description`.

    A field that a subclass or a preset declares again without either keeps that of its base class.
    A field without a description has an empty one, as has a field whose source cannot be read.
    """
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            fields = kind.model_fields.items()
            found |= _docstrings(kind) | {n: f.description for n, f in fields if f.description}
    return {name: found.get(name, "") for name in model.model_fields}


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the annotated names of a class; none without its source."""
    try:
        tree = ast.parse(dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    found: dict[str, str] = {}
    for statement in tree.body:
        for pair in pairwise(getattr(statement, "body", ())):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found
