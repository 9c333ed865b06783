"""Build the documentation's site in build/site, with its reference pages, and check its links.

The pages of docs/ are copied with two changes. A link to a file outside docs/ becomes a link to a
page that shows the file. An index page gets a table of contents: the pages that the items of its
lists begin with. The reference pages come from docstrings and from the command line's help.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import coterie

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "site"
PROJECT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?")
ITEM = re.compile(r"^- \**\[([^\]]*)\]\((?!\.\./|https?:)([^)#\s]+\.md)\)", re.MULTILINE)
COMMANDS = re.compile(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n")
INDEXES = ("index.md",)
LEXERS = {".py": "python", ".yaml": "yaml", ".service": "ini"}
INTERFACES = {
    "Methods": (
        "coterie.Method",
        "coterie.methods.contract.ClientSide",
        "coterie.methods.contract.Server",
        "coterie.methods.value.Value",
        "coterie.methods.value.PerClient",
        "coterie.exchanges.exchange.Exchange",
        "coterie.methods.contract.ServerContext",
        "coterie.methods.contract.RunFacts",
        "coterie.training.context.ClientContext",
    ),
    "Messages and states": (
        "coterie.messages.Schema",
        "coterie.messages.Field",
        "coterie.messages.Message",
        "coterie.messages.State",
    ),
    "Transforms": ("coterie.Transform", "coterie.Reduction"),
    "Metrics": ("coterie.Metric",),
    "Plugins": ("coterie.register", "coterie.load_plugin"),
}
"""The names that plugins use, by section of their reference page; the other names of
`coterie.__all__` are on the page of the library's functions."""


SITE_ONLY = {
    "use/index.md": """
- [Command line](command-line.md): all commands with their options.
- [Python functions](python-reference.md): what `import coterie` offers.
""",
    "develop/index.md": """
- [Interfaces](interface-reference.md): the classes that methods, transforms and metrics extend.
""",
}
"""The links from index pages to the reference pages, which only the site has."""


class Source:
    """The pages of the site in the form that Sphinx reads, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, path: Path) -> Path:
        """Return where a file or folder of the repository is in the site."""
        name = path.relative_to(ROOT)
        if name.parts[0] == "docs":
            return Path(*name.parts[1:])
        if str(name) in PROJECT_PAGES:
            return Path("project", name)
        return Path("source", f"{name}.md")

    def add(self, file: Path) -> None:
        """Add a Markdown page of the repository, and the pages of the files that it links."""
        place = self.place(file)

        def relinked(match: re.Match[str]) -> str:
            target = Path(os.path.normpath(file.parent / match[1]))
            if not target.exists():
                raise SystemExit(f"{file.relative_to(ROOT)}: {match[1]} does not exist.")
            if not (self.folder / self.place(target)).exists():
                self.show(target)
            shown = self.place(target).parts[0] == "source"  # as text, without anchors
            anchor = "" if shown else match[2] or ""
            return os.path.relpath(self.place(target), place.parent) + anchor

        text = LINK.sub(relinked, file.read_text(encoding="utf-8"))
        text += SITE_ONLY.get(str(place), "")
        if str(place).endswith(INDEXES):
            entries = "".join(f"{title} <{page}>\n" for title, page in ITEM.findall(text))
            text += f"\n```{{toctree}}\n:hidden:\n\n{entries}```\n"
        self.write(place, text)

    def show(self, target: Path) -> None:
        """Add a page that shows a file, or lists the files in a folder."""
        if target.is_dir():
            files = [path for path in sorted(target.rglob("*")) if path.is_file()]
            files = [path for path in files if path.suffix != ".pyc"]
            names = [str(path.relative_to(target)) for path in files]
            content = "".join(f"- [{name}]({target.name}/{name}.md)\n" for name in names)
            for path in files:
                self.show(path)
        else:
            code = target.read_text(encoding="utf-8")
            content = f"`````{LEXERS.get(target.suffix, 'text')}\n{code}`````\n"
        head = f"---\norphan: true\nnosearch: true\n---\n\n# {target.relative_to(ROOT)}\n\n"
        self.write(self.place(target), head + content)

    def write(self, place: Path, text: str) -> None:
        """Write a page."""
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def lay_out(folder: Path) -> None:
    """Write the source of the site into a new folder."""
    shutil.copytree(ROOT / "docs", folder)
    source = Source(folder)
    for file in [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PROJECT_PAGES)]:
        source.add(file)
    plugins = {name for names in INTERFACES.values() for name in names}
    names = [f"coterie.{name}" for name in coterie.__all__]
    functions = {"Functions and classes": [name for name in names if name not in plugins]}
    source.write(Path("use/python-reference.md"), reference("Python functions", functions))
    source.write(Path("develop/interface-reference.md"), reference("Interfaces", INTERFACES))
    source.write(Path("use/command-line.md"), command_line())


def reference(title: str, sections: Mapping[str, Sequence[str]]) -> str:
    """Return a page of the docstrings of classes and functions, by section."""
    page = f"# {title}\n"
    for section, names in sections.items():
        page += f"\n## {section}\n"
        for name in names:
            module, _, last = name.rpartition(".")
            is_class = inspect.isclass(getattr(import_module(module), last))
            directive = "autoclass" if is_class else "autofunction"
            options = "   :members:\n   :exclude-members: model_config\n" if is_class else ""
            page += f"\n```{{eval-rst}}\n.. {directive}:: {name}\n{options}```\n"
    return page


def command_line() -> str:
    """Return a page of the help of all commands, without its lists of them, which are cut off."""
    program = [sys.executable, "-m", "typer", "coterie.cli", "utils", "docs", "--name", "coterie"]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    return COMMANDS.sub("", printed).replace("# `coterie`", "# Command line", 1)


class Page(HTMLParser):
    """The anchors of a page of HTML, its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what a tag names."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("link", "script", "img"):
            self.loaded.append(given.get("href") or given.get("src") or "")


def faults(folder: Path) -> Iterator[str]:
    """Yield the links that lead nowhere, and the files that are loaded from another host."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{path}: loads {link}"
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path)))
            target = target if parts.path else path
            if not target.is_file():
                yield f"{path}: {link} does not exist"
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors | {""}:
                yield f"{path}: {link} has no such anchor"


def main() -> None:
    """Build the site, and exit with 1 if there is a warning or a faulty link."""
    source, pages = BUILD / "source", BUILD / "html"
    shutil.rmtree(BUILD, ignore_errors=True)
    lay_out(source)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--jobs", "2"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *options, source, pages])
    if built.returncode:
        sys.exit(1)
    faulty = list(faults(pages))
    print("\n".join(faulty) or f"Open {pages / 'index.html'}")
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
