"""Personalised federated fine-tuning of language models; text stays on the client's machine.

import coterie

run = coterie.run("run.yaml")
print(run.table().markdown())
model = coterie.load(run.path, client="ada")
"""

import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie.adapters.roles import Role
    from coterie.api import (
        Exported,
        Run,
        compare,
        evaluate,
        export,
        load,
        resume,
        run,
        tokenizer,
    )
    from coterie.config.plugins import load_plugin, register
    from coterie.config.read import load_config
    from coterie.config.run import RunConfig
    from coterie.data.kind import DataKind
    from coterie.errors import CoterieError
    from coterie.evaluation.metrics import Metric
    from coterie.methods.contract import Method
    from coterie.report.figures import ReportFigure
    from coterie.runs.progress import Callback
    from coterie.transforms.contract import Reduction, Transform

# By default, OpenMP threads wait in busy loops, which makes a run many times slower as soon as
# another process uses the same cores. torch reads the variable when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "Callback",
    "CoterieError",
    "DataKind",
    "Exported",
    "Method",
    "Metric",
    "Reduction",
    "ReportFigure",
    "Role",
    "Run",
    "RunConfig",
    "Transform",
    "compare",
    "evaluate",
    "export",
    "load",
    "load_config",
    "load_plugin",
    "register",
    "resume",
    "run",
    "tokenizer",
]

_MODULES = {
    "Callback": "runs.progress",
    "CoterieError": "errors",
    "DataKind": "data.kind",
    "Method": "methods.contract",
    "Metric": "evaluation.metrics",
    "Reduction": "transforms.contract",
    "ReportFigure": "report.figures",
    "Role": "adapters.roles",
    "RunConfig": "config.run",
    "Transform": "transforms.contract",
    "load_config": "config.read",
    "load_plugin": "config.plugins",
    "register": "config.plugins",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `coterie --help` need not wait for torch."""
    if name == "__version__":
        return metadata.version("coterie")
    if name not in __all__:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(import_module(f"coterie.{_MODULES.get(name, 'api')}"), name)
