"""Entry point of `python -m coterie`, which runs the command `coterie`."""

from coterie.cli import main

main()
