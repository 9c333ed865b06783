"""Write docs/use/run-file-keys.md, the reference of the keys of a run file, from their models."""

from pathlib import Path

from coterie.analysis.settings import run_file_keys

PAGE = Path(__file__).parents[1] / "docs" / "use" / "run-file-keys.md"
HEAD = """# Keys of the run file

[The run file](run-file.md) explains the most common keys. Brackets contain the default. A dot
separates a section from its keys, as in `--set training.batch=8`, and `clients[].name` is a key of
each item of a list. `coterie methods NAME` lists the keys of `method`.

"""

if __name__ == "__main__":
    PAGE.write_text(HEAD + run_file_keys(), encoding="utf-8")
