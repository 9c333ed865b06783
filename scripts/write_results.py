"""Draw the pictures in docs/results, and write its pages and the list in its index, from the result
files there."""

from pathlib import Path

from reproduce.drawing import write_pictures
from reproduce.pages import read_result, write_pages

FOLDER = Path(__file__).parents[1] / "docs" / "results"

if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.json")):
        write_pictures(read_result(path), FOLDER)
    write_pages(FOLDER)
