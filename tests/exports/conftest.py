"""Finished runs to export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import FAR
from torch import Tensor

import coterie
from coterie.exports import exporting
from coterie.exports.format import Format
from coterie.exports.parity import Parity
from coterie.exports.source import Source

METHODS: dict[str, Any] = {
    "two sets": {"name": "local"},
    "fedamole": {"name": "fedamole", "experts": 6},
    "fedprompt": {"name": "fedprompt", "virtual_tokens": 5},
    "beside": {"name": "comigs-1g1s", "mlp": {"placement": "beside"}},
    "exact": {"name": "fedavg", "exact": True, "mlp": {"sets": 1}},
}


@pytest.fixture(scope="session")
def finished(values, bases, tmp_path_factory) -> Callable[..., Path]:
    """The folder of a run that has moved far from its base, made once for each method and base."""
    made: dict[tuple[str, str], Path] = {}

    def run(method: str, base: str = "llama", **changes: Any) -> Path:
        if (method, base) not in made:
            run = values(
                base=base if base.startswith("tiny") else str(bases / base),
                method=METHODS.get(method, {"name": method}),
                **FAR | {"rounds": 2} | changes,
            )
            path = tmp_path_factory.mktemp("runs") / "run"
            made[method, base] = coterie.run(run, out=path).path
        return made[method, base]

    return run


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """Load exported models in this process, which is faster than in another process."""

    @torch.no_grad()
    def measure(
        format: Format, source: Source, folder: Path, ids: Tensor, logits: Tensor
    ) -> Parity:
        names: dict[str, Any] = {}
        exec(format.usage(source, str(folder), source.place), names)
        model = names["model"] if source.spec.quantised else names["model"].float()
        exported = model.eval()(ids).logits.float()
        assert names["tokenizer"].get_vocab() == source.tokenizer.get_vocab()
        difference = (exported - logits).abs().max().item()
        return Parity(difference, logits.abs().max().item(), ids.shape[1], format.library)

    monkeypatch.setattr(exporting, "measure", measure)
