"""Coterie: fine-tune language models together and personally; the text never leaves its machine.

import coterie

run = coterie.run("run.yaml")
print(run.table().markdown())
model = coterie.load(run.path, client="poet")
"""

import os

# Threads that wait without spinning: on a shared machine the usual busy waiting of OpenMP makes a
# run many times slower as soon as another process wants the same cores. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from coterie.api import Run, compare, load, resume, run, tokenizer  # noqa: E402
from coterie.config import RunConfig, load_config  # noqa: E402
from coterie.errors import CoterieError  # noqa: E402
from coterie.methods import Method  # noqa: E402

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
