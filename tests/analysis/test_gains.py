"""The sentence on the clients that gain, and that chance is no gain."""

from typing import Any

import numpy as np
import pytest
from outcomes import outcome

from coterie.analysis.comparison import gains


def windows(mean: float, **more: Any) -> dict[str, Any]:
    """Return forty windows of ten tokens, with a given mean loss per token."""
    nats = 10 * (mean + np.linspace(-0.5, 0.5, 40))
    return {"of": "a text", "nats": nats.tolist(), "tokens": [10] * 40, **more}


def test_it_names_who_gains_who_loses_and_whom_chance_explains() -> None:
    alone = outcome(0, **{name: windows(3.0) for name in ("ada", "ben", "cleo", "dan")})
    wavering = windows(3.0)
    wavering["nats"] = [n + (0.2 if i % 2 else -0.21) for i, n in enumerate(wavering["nats"])]
    together = {"ada": windows(2.9), "ben": windows(2.8), "cleo": windows(3.1), "dan": wavering}
    sentence = gains({"local": alone, "fedavg": outcome(0, **together)})
    assert sentence.startswith(
        "With fedavg instead of local, perplexity is lower for ada (-9.5 %) and ben (-18.1 %); "
        "higher for cleo (+10.5 %); not significantly different for dan (-0.0 %)."
    )


def test_shares_gain_points() -> None:
    def answers(right: int) -> dict[str, Any]:
        return windows(3.0, accuracy=[1.0] * right + [0.0] * (40 - right))

    alone = outcome(0, ada=answers(10))
    together = outcome(0, ada=answers(30))
    sentence = gains({"local": alone, "fedavg": together}, "accuracy")
    assert sentence is not None
    assert "accuracy is higher for ada (+50.0 points)." in sentence


@pytest.mark.parametrize("methods", [["pretrained", "fedavg"], ["local"], ["fedavg", "local"]])
def test_without_training_alone_beside_it_there_is_nothing_to_say(methods) -> None:
    assert gains({name: outcome(0, ada=windows(3.0)) for name in methods}) is None


def test_without_scores_by_window_there_is_nothing_to_say() -> None:
    results = {name: outcome(0, ada=windows(3.0)) for name in ("local", "fedavg")}
    results["local"]["items"] = {}
    assert gains(results) is None
