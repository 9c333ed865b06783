"""A machine with too little memory, in a deployment."""

import pytest

from coterie.testing.loop import Loop, server, workers


def test_a_client_with_too_little_memory_says_what_helps(config, tmp_path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    def stop(_: Loop) -> None:
        raise KeyboardInterrupt

    said: list[tuple[str, object]] = []
    run = config()
    loop = Loop(workers(run, tmp_path), {5: stop})
    loop.workers["poet"].seen = lambda *what: said.append(what)
    monkeypatch.setattr("coterie.losses.tokens.language_model_loss", full)
    with pytest.raises(KeyboardInterrupt):
        server(run, tmp_path / "server", loop).rounds()
    help = "training.micro_batch: 1 or training.checkpointing: true"
    fault = f"The machine has too little memory for a training step; set {help}."
    assert ("fault", fault) in said
