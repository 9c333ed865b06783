"""The embedded demo, with fewer rounds and as it is."""

from typing import Any

import pytest

import coterie
from coterie.analysis.frame import mean_score
from coterie.config.read import load_config


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["rounds=1"], id="short", marks=pytest.mark.slow),
        pytest.param([], id="whole", marks=pytest.mark.thorough),
    ],
)
def test_the_demo(changes, tmp_path) -> None:
    run = coterie.run(load_config(None, changes), out=tmp_path / "demo")
    assert list(run.results) == ["pretrained", "local", "auto"]
    bare, local, auto = (mean_score([result], "perplexity") for result in run.results.values())
    assert auto < local < bare
    assert run.gains() is not None
    assert run.results["auto"]["traffic"]["up"] > 0
    assert run.results["local"]["traffic"]["up"] < 10_000  # empty messages
    tokenizer = coterie.tokenizer(run.path)
    ids = tokenizer("The sea", return_tensors="pt")["input_ids"]
    texts = set()
    for client in ("ada", "dan"):
        model: Any = run.model(client)
        texts.add(tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0]))
    assert len(texts) == 2
