"""Tables of the keys of run files and of methods' settings, with defaults and meanings."""

import re

from coterie.analysis.tables import Table
from coterie.config.keys import BY_CLIENT, keys
from coterie.config.sections import RunFile
from coterie.errors import CoterieError
from coterie.methods.adapter import AdapterMethod
from coterie.methods.registry import POOLED, available, method_from

COLUMNS = ("key", "default", "meaning")


def methods_table() -> Table:
    """Return a table of all methods that a run file can name."""
    rows = [(m.name, m.paper, m.summary) for m in available().values()]
    pooled = "one client with all clients' text: not private; shows the effect of sharing all text"
    rows.append((POOLED, "", pooled))
    return Table("Methods", ("name", "paper", "summary"), rows)


def method_table(name: str) -> Table:
    """Return a table of a method's settings.

    Raises:
        CoterieError: if the method does not exist, or if it is the baseline named by POOLED. This
            baseline has no settings of its own and uses the settings of the method `local`.
    """
    if name == POOLED:
        raise CoterieError(
            f"{POOLED} uses the settings of the method `local`; see `coterie methods local`."
        )
    method = method_from(name)
    kind = type(method)
    papers = f" ({kind.paper})" if kind.paper else ""
    rows = list(keys(kind)) or [("none", "", "this method has no settings")]
    if isinstance(method, AdapterMethod) and method.needs_one_rank:
        rows = [
            (key, value, meaning.removesuffix(BY_CLIENT) if key == "mlp.rank" else meaning)
            for key, value, meaning in rows
        ]
    rows.sort(key=lambda row: row[0].split(".")[0] != "mlp")  # the adapter's layout comes first
    return Table(f"{name}{papers}: {kind.summary}", COLUMNS, rows)


def run_file_keys() -> str:
    """Return the keys of a run file as Markdown lists for docs/use/run-file-keys.md."""
    rows = [(re.split(r"\W", key)[0], key, *row) for key, *row in keys(RunFile)]
    sections = {section for section, key, *_ in rows if "." in key}
    lists: dict[str, str] = {"Keys without a section": ""}
    for section, key, default, meaning in rows:
        title = f"`{section}`" if section in sections else "Keys without a section"
        brackets = f" (`{default}`)" if default else ""
        lists[title] = lists.get(title, "") + f"- `{key}`{brackets}: {meaning}\n"
    return "\n".join(f"## {title}\n\n{items}" for title, items in lists.items())
