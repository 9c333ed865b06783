"""Coterie: fine-tune language models together and personally; the text never leaves its machine.

    import coterie

    run = coterie.run("run.yaml")
    print(run.table().markdown())
    model = coterie.load(run.path, client="poet")
"""

from coterie.api import Run, compare, load, resume, run, tokenizer
from coterie.config import RunConfig, load_config
from coterie.errors import CoterieError
from coterie.methods import Method

__all__ = [
    "CoterieError",
    "Method",
    "Run",
    "RunConfig",
    "compare",
    "load",
    "load_config",
    "resume",
    "run",
    "tokenizer",
]
