"""A Jinja environment for untrusted templates.

Templates come with bases and from servers. Jinja's own sandbox keeps them from running code, but
not from computing for ever or filling the memory. Here, compilation computes nothing, and rendering
has limits on the steps, the sizes of texts and lists, and the time. The time is checked at each
step, so a template ends soon after its limit.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from time import monotonic
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coterie.scoped import scoped

MAX_SOURCE = 100_000
"""The maximum length of a template in characters; published templates have up to 20,000."""
MAX_STEPS = 1_000_000
"""The maximum number of steps of a rendering: iterations, calls, filters, tests and operators."""
MAX_SIZE = 10_000_000
"""The maximum size of a text or list that a template makes, in characters."""
MAX_TOTAL = 20
"""The maximum total size of all texts and lists of a rendering, as a multiple of the largest."""
MAX_SECONDS = 10.0
"""The maximum time of a rendering in seconds."""
MAX_BITS = 10_000
"""The maximum size of a number in bits."""
ITEM = 100
"""The size of an item of a list in characters."""

FILTERS = frozenset((
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e",
    "escape", "first", "float", "forceescape", "format", "groupby", "indent", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "wordcount",
))  # fmt: skip
"""The filters that a template can use; each takes time in proportion to the sizes checked here."""
METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map",
    "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
    "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper", "zfill",
))  # fmt: skip
"""The methods of texts that a template can use."""
PRODUCTS = frozenset((
    "batch", "center", "indent", "join", "ljust", "lstrip", "replace", "rfind", "rindex",
    "rjust", "round", "rpartition", "rsplit", "rstrip", "slice", "strftime", "strip", "tojson",
    "trim", "zfill",
))  # fmt: skip
"""The filters and methods whose time or result grows with the product of their arguments."""
_WIDTH = re.compile(r"%(?:\([^()]*\))?[-+ #0]*[0-9.]+|\{[^{}]*:[^{}]*")
_NESTED = re.compile(r"%(?:\([^()]*\))?[-+ #0.]*\*|\{[^{}]*:[^{}]*\{")


class TooCostly(TemplateError):
    """A template exceeds a limit; the message is the predicate of a sentence about the template."""


class _Work:
    """The work that one rendering has done, and its limits.

    Args:
        inputs: The values that the template is given. The limits on steps and sizes grow with them,
            because a longer conversation needs more work.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        given = sum(_size(value, float("inf")) for value in inputs)
        self.largest = MAX_SIZE + MAX_TOTAL * given
        self.left, self.steps = MAX_TOTAL * self.largest, MAX_STEPS + given
        self.limit, self.end = self.steps, monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count a step, and check the time."""
        self.steps -= 1
        if self.steps < 0:
            raise TooCostly(f"needs more than {self.limit:,} steps, the highest accepted number")
        if monotonic() > self.end:
            raise TooCostly(f"needs more than {MAX_SECONDS:g} seconds, the longest accepted time")

    def check_size(self, size: float) -> None:
        """Check the size of a value before it is made."""
        if size > self.largest:
            raise TooCostly(f"makes a value of more than {self.largest:,} characters")

    def spend(self, size: int) -> None:
        """Count the size of a value that was made."""
        self.check_size(size)
        self.left -= size
        if self.left < 0:
            raise TooCostly(
                f"makes values of more than {MAX_TOTAL * self.largest:,} characters in total"
            )


_WORK: ContextVar[_Work] = ContextVar("work")


@contextmanager
def limited(*inputs: Any) -> Iterator[None]:
    """Count the work of the with statement's body, which compiles or renders one template.

    Args:
        inputs: The values that the template is given.

    Raises:
        TooCostly: The template exceeds a limit.
    """
    work = _Work(inputs)
    try:
        with scoped(_WORK, work):
            yield
    except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's compiler
        raise TooCostly("is nested too deeply, or needs too much memory") from error


def _size(value: Any, limit: float) -> int:
    """Return the size of a value as if it were printed, in characters.

    An item that occurs several times counts each time. Counting ends above the limit.
    """
    size, rest = 0, [value]
    while rest and size <= limit:
        match rest.pop():
            case str() as text:
                size += len(text)
            case int() as number:
                if number.bit_length() > MAX_BITS:
                    raise TooCostly(f"computes a number of more than {MAX_BITS:,} bits")
            case Mapping() as mapping:
                size += ITEM * len(mapping)
                rest += [*mapping.keys(), *mapping.values()]
            case list() | tuple() | set() | frozenset() as items:
                size += ITEM * len(items)
                rest += items
    return size


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield items, and count each as a step."""
    work = _WORK.get()
    for item in items:
        work.step()
        yield item


def _checked(value: Any) -> Any:
    """Count a value that was made, or the items of an iterator as they are made."""
    work = _WORK.get()
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return _counted(value)
    work.spend(_size(value, work.largest))
    return value


def _whole(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the arguments of a filter or method, with lists in place of iterators to be joined."""
    joins = name == "join"
    return [_checked(list(v)) if joins and isinstance(v, Iterator) else v for v in values]


def _check_growth(name: str, value: Any, *others: Any) -> None:
    """Check the time and the result of a filter, method or operator before it is applied.

    Args:
        name: The name of the filter or method, or the operator.
        value: The value that it is applied to.
        others: Its other arguments.
    """
    formats = name in ("%", "format", "format_map") and isinstance(value, str)
    if not formats and name not in PRODUCTS:
        return
    work = _WORK.get()
    sizes = [abs(o) if isinstance(o, int) else _size(o, work.largest) for o in others]
    growth = max(1000, _size(value, work.largest)) * max(sizes, default=1)
    if formats:
        widths = [int(n) for spec in _WIDTH.findall(value) for n in re.findall("[0-9]+", spec)]
        filled = (value.count("%") + value.count("{")) * sum(_size(o, work.largest) for o in others)
        nested = max(sizes, default=0) if _NESTED.search(value) else 0
        work.check_size(filled + sum(widths) + nested)
    elif name == "replace" and growth > work.largest and isinstance(value, str):
        old, new = (str(other) for other in others[:2])
        work.check_size(len(value) + value.count(old) * len(new))
    else:
        work.check_size(growth)


def _binary(operator: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator that predicts, and then checks, the size of its result."""

    def apply(left: Any, right: Any) -> Any:
        work = _WORK.get()
        work.step()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * max(right, 0) > MAX_BITS:
            raise TooCostly(f"computes a number of more than {MAX_BITS:,} bits")
        if operator == "*" and not numbers:
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, float):
                    work.check_size(max(1, _size(value, work.largest)) * times)
        if operator == "%":
            items = right if isinstance(right, tuple) else (right,)
            _check_growth(operator, left, *items)
        return _checked(function(left, right))

    return apply


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test that predicts, and then checks, the size of its result."""

    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        _WORK.get().step()
        whole = _whole(name, args)
        given = [a for a in whole if not isinstance(a, Environment | Context | EvalContext)]
        _check_growth(name, *given, *kwargs.values())
        return _checked(function(*whole, **kwargs))

    return apply


def _printed(value: Any) -> Any:
    """Return the text of a value that is printed."""
    _WORK.get().step()
    return value if isinstance(value, str) or hasattr(value, "__html__") else _checked(str(value))


class _Generator(CodeGenerator):
    """A compiler that computes no constants, and counts iterations and the values that are made."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted = nodes.EnvironmentAttribute("counted")
        node.iter = nodes.Call(counted, [node.iter], [], None, None).set_lineno(node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)(")
        self._visit_checked(self.visit_Tuple, nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_checked(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_checked(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_checked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _visit_checked(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.checked(")
        visit(node, frame)
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment that can compile and render only in the body of `limited`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    counted, checked = staticmethod(_counted), staticmethod(_checked)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"finalize": _printed, **options, "optimized": False})
        self.binop_table = {name: _binary(name, f) for name, f in self.binop_table.items()}
        self.filters = {}
        self.add_filters(Environment().filters)
        self.tests = {name: _filter(f"is {name}", test) for name, test in self.tests.items()}
        del self.globals["lipsum"]  # it makes random text

    def add_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Add those filters that templates can use."""
        self.filters |= {name: _filter(name, filters[name]) for name in FILTERS & filters.keys()}

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatible]
        """Join the parts of a text."""
        work, texts, size = _WORK.get(), [], 0
        for part in parts:
            texts.append(part)
            size += len(part)
            work.check_size(size)
            work.spend(len(part))
        return "".join(texts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method."""
        _WORK.get().step()
        method = getattr(obj, "__wrapped__", obj)
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        values: Iterable[Any] = map(_counted, args) if isinstance(obj, LoopContext) else args
        if isinstance(name, str) and name in METHODS | PRODUCTS:
            values = _whole(name, args)
            _check_growth(name, owner, *values, *kwargs.values())
        return _checked(super().call(context, obj, *values, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template can use an attribute of a value."""
        if (isinstance(obj, str) and attr not in METHODS) or isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TooCostly(f"has {len(source):,} characters; at most {MAX_SOURCE:,} are accepted")
        try:
            return super()._parse(source, name, filename)
        except ValueError as error:  # a number with too many digits
            raise TemplateSyntaxError(str(error), 1, name, filename) from error
