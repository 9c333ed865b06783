"""Run files in which a comment above each key gives the key's meaning and default."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from coterie.config.keys import inline, keys
from coterie.config.sections import RunFile

WIDTH = 98
"""The maximum length of a line of a comment, in characters, without the indentation."""
INDENT = "  "


@dataclass
class _Key:
    """A key of the run file. If it is a section, `inner` contains the keys of the section."""

    default: str = ""
    meaning: str = ""
    inner: dict[str, "_Key"] = field(default_factory=dict)

    def comment(self, name: str = "") -> list[str]:
        """Return the lines of the comment above the key, which may begin with the key's name."""
        if not self.meaning:
            return []
        text = f"{name}: {self.meaning}" if name else self.meaning[0].upper() + self.meaning[1:]
        if self.default == "required":
            text += "; required"
        elif self.default and "default:" not in text:
            text += f"; default: {self.default}"
        lines = wrap(f"{text}.", WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        return [f"# {line}" for line in lines]

    def shown(self, name: str) -> str:
        """Return the line that gives the key its default."""
        return f"{name}: {self.default}".removesuffix("required").rstrip()


def commented(values: Mapping[str, Any], everything: bool) -> str:
    """Write a run file with a comment above each key.

    Args:
        values: The plain data of the run file, in which a section is a mapping.
        everything: Whether to write all other keys, too, as comments with their defaults. Such a
            key has a `#` without a space; without the `#`, the line is valid.
    """
    keys_of_file: dict[str, _Key] = {}
    for path, default, meaning in keys(RunFile):
        *sections, name = path.replace("[]", "").split(".")
        level = keys_of_file
        for section in sections:
            level = level.setdefault(section, _Key()).inner
        level[name] = _Key(default, meaning)
    blocks = _blocks(keys_of_file, values, RunFile.model_construct(), everything)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _blocks(
    level: Mapping[str, _Key],
    values: Mapping[str, Any],
    defaults: BaseModel | None,
    everything: bool,
) -> Iterator[list[str]]:
    """Yield the lines of each key of a section that is written.

    Args:
        level: The section's keys.
        values: The section's values. A key without a value is commented out.
        defaults: The section's defaults; None if the section is absent by default.
        everything: Whether keys without a value are written.
    """
    for name, key in level.items():
        given: Any = values.get(name)
        default = getattr(defaults, name, None)
        if name not in values and not everything:
            continue
        if isinstance(given, list) and key.inner:
            yield [*key.comment(), f"{name}:", *_indented(_entries(key, given, everything))]
        elif key.inner and (isinstance(given, Mapping) or isinstance(default, BaseModel)):
            inner = default if isinstance(default, BaseModel) else None
            section: dict[str, Any] = dict(given or {})
            blocks = _blocks(key.inner, section, inner, everything)
            head = f"{name}:" if given else f"#{name}:"
            yield [*key.comment(), head, *_indented(line for block in blocks for line in block)]
        elif key.inner and name not in values and default is None:
            block = [f"{name}:", *_indented(_example(key.inner))]
            yield [*key.comment(), *(f"#{line}" for line in block)]
        else:
            inner = (line for n, k in key.inner.items() if everything for line in k.comment(n))
            value = given if name in values else default
            value = [*value] if isinstance(value, tuple) else value  # YAML has no tuples
            line = f"{name}: {inline(value)}" if name in values or key.inner else key.shown(name)
            yield [*key.comment(), *inner, line if name in values else f"#{line}"]


def _entries(key: _Key, entries: list[Any], everything: bool) -> Iterator[str]:
    """Yield the lines of a list of mappings, after a comment on each of their keys."""
    used = {name for entry in entries for name in entry}
    for name, inner in key.inner.items():
        if everything or name in used:
            yield from inner.comment(name)
    yield from (f"- {inline(entry)}" for entry in entries)


def _example(level: Mapping[str, _Key]) -> Iterator[str]:
    """Yield the lines of a section that is absent by default, with the defaults of its keys."""
    for name, key in level.items():
        yield from key.comment()
        yield key.shown(name)
        yield from _indented(_example(key.inner))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)
