"""Write the pages in docs/results, and the list in its index, anew from the result files there."""

from pathlib import Path

from coterie.results.pages import write_pages

FOLDER = Path(__file__).parents[1] / "docs" / "results"

if __name__ == "__main__":
    write_pages(FOLDER)
