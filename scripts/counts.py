"""Count what a reader of the repository meets: files, lines of code, words and the wheel's size.

    python scripts/counts.py [COMMIT ...]

The counts of the working tree stand beside those of each commit. A line of code is a line without
blank lines, comments and docstrings; tests/test_counts.py holds the largest counts allowed.
"""

import ast
import io
import os
import subprocess
import sys
import tarfile
import tokenize
import tomllib
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
CODE = ("src", "tests", "papers", "benchmarks", "scripts", "examples")
PAGES = ("*.md", "docs/**/*.md")
IGNORED = ("runs", "papers/runs", "build", "dist", "keys", "src/coterie.egg-info")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines of a Python file without blanks, comments and docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        line
        for token in tokens
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case _:
                pass
    return len(lines)


def counts(root: Path) -> dict[str, int]:
    """Return the counts of a checkout, by name.

    Args:
        root: The root of the checkout.
    """
    result = {"files": len(_files(root, "**/*"))}
    for folder in CODE:
        texts = (path.read_text(encoding="utf-8") for path in _files(root, f"{folder}/**/*.py"))
        result[f"lines of {folder}"] = sum(map(code_lines, texts))
    pages = {path for pattern in PAGES for path in _files(root, pattern)}
    result["words"] = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = project["tool"]["setuptools"].get("exclude-package-data", {}).get("coterie", [])
    packed = (
        len(zlib.compress(path.read_bytes()))
        for path in _files(root, "src/coterie/**/*")
        if not any(path.match(f"coterie/{pattern}") for pattern in left_out)
    )
    result["kB of the wheel"] = sum(packed) // 1000
    return result


def _files(root: Path, pattern: str) -> list[Path]:
    ignored = tuple(f"{root / folder}{os.sep}" for folder in IGNORED)
    return [
        path
        for path in root.glob(pattern)
        if path.is_file()
        and "__pycache__" not in path.parts
        and not str(path).startswith(ignored)
        and not path.relative_to(root).parts[0].startswith(".")
    ]


def counts_of(commit: str) -> dict[str, int]:
    """Return the counts of a commit, by name."""
    command = ["git", "-C", str(ROOT), "archive", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return counts(Path(folder))


def main() -> None:
    """Print the counts of the working tree, and of the commits on the command line."""
    columns = {"now": counts(ROOT)} | {commit: counts_of(commit) for commit in sys.argv[1:]}
    print(f"{'':20}", *(f"{name[:12]:>12}" for name in columns))
    for name in columns["now"]:
        print(f"{name:20}", *(f"{column[name]:12,}" for column in columns.values()))


if __name__ == "__main__":
    main()
