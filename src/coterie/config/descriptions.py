"""Descriptions of a pydantic model's fields: the docstrings below the fields, read on demand.

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
    """Return a mapping from the name of each field to the field's description.

    The description is the field's `description` if this is set, and the docstring below the field
    otherwise. A field that a subclass redeclares without a description inherits the description in
    the base class. If a field has no description, or if the source code of the field's class cannot
    be read, the field's description is an empty string.
    """
    texts: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind is not BaseModel:
            fields = kind.model_fields.items()
            texts |= _docstrings(kind) | {n: f.description for n, f in fields if f.description}
    return {name: texts.get(name, "") for name in model.model_fields}


@cache
def _docstrings(kind: type) -> dict[str, str]:
    """Return a mapping from the name of each annotated field to the docstring below the field.

    The result is empty if the class's source code is not available.
    """
    try:
        tree = ast.parse(dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    docstrings: dict[str, str] = {}
    for statement in tree.body:
        for pair in pairwise(getattr(statement, "body", ())):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    docstrings[name] = " ".join(text.split())
    return docstrings
