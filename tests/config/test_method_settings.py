"""Settings of methods in run files: those that do nothing, and what is carried."""

import pytest

from coterie import CoterieError
from coterie.bases.sites import QUERY_VALUE
from coterie.config.run import RunConfig, parse
from coterie.methods.registry import method_from

RANDOM = {"assignment": "random"}
VANILLA = {"kind": "vanilla", "score_scale": "dim"}


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("fedavg", {"router": {"top_k": 1}}, "Unknown key 'method.router'."),
        ("fedavg", {"top_k": 1}, "Unknown key 'method.top_k'. Known keys: name, mlp, attention"),
        ("fedavg", {"specialists": 1}, "Unknown key 'method.specialists'. Known keys:"),
        ("fedit", {"mlp": {"rank": 4}}, "Unknown key 'method.mlp'."),
        ("pfedmoe", {"router": {"every": 3}}, "Unknown key 'method.router.every'."),
        ("pcl-uniform", {"trusted": {"top": 1}}, "Unknown key 'method.trusted'."),
        ("pcl-theoretical", {"top": 1}, "Unknown key 'method.top'. Known keys:"),
        ("pcl-1", {"exact": True}, "Unknown key 'method.exact'."),
        (
            "fedamole",
            RANDOM | {"embeddings": {"share": 0.1}},
            "has no effect with `assignment: ran",
        ),
        ("fedamole", RANDOM | {"router": VANILLA}, "method.router: score_scale has no effect with"),
        ("comigs-1g1s", {"mlp": None}, "method.mlp should be a mapping of keys to values"),
        ("fedit", {"attention": None}, "method.attention should be a mapping of keys to values"),
        ("fedavg", {"mlp": {"ranc": 4}}, "'method.mlp.ranc'. Did you mean 'method.mlp.rank'?"),
    ],
)
def test_what_does_nothing_in_a_method_is_refused(name, settings, sentence, values) -> None:
    with pytest.raises(CoterieError) as error:
        parse(values(method={"name": name, **settings}))
    assert sentence in str(error.value)


def settings(run: RunConfig, name: str) -> dict:
    """The settings of another method in the same run, as they differ from its own defaults."""
    found, own = run.with_method(name).method.described(), method_from(name).described()
    return {key: value for key, value in found.items() if value != own[key]}


def test_a_changed_part_is_carried_as_a_whole_and_an_unchanged_one_is_not(config) -> None:
    mlp, router = {"rank": 4, "specialists": 3}, {"every": 7}
    run = config(method={"name": "comigs-1g1s", "mlp": mlp, "router": router}, baselines=["local"])
    assert run.with_method("comigs-1g1s").method == run.method
    assert run.with_method("comigs-1g1s").baselines == ()
    whole = {"mlp": {"rank": 4, "placement": "auto", "generalists": 1, "specialists": 3}}
    phases = {**method_from("comigs-1g1s").described()["router"], "every": 7}
    assert settings(run, "comigs-tr") == {**whole, "router": phases}
    # Joint training of a router has no phases; what it has in common with the other is unchanged.
    assert settings(run, "pfedmoe") == whole
    assert settings(run, "fedit") == settings(run, "pretrained") == {}


def test_a_rank_is_carried_and_counts_of_experts_are_not(config) -> None:
    run = config(method={"name": "comigs-1g1s", "mlp": {"rank": 4, "specialists": 3}})
    for name in ("local", "fedavg", "comigs-2g", "comigs-2s"):
        own = method_from(name).described()["mlp"]
        assert settings(run, name) == {"mlp": {**own, "rank": 4}}
    pooled = run.with_method("centralized")
    assert (pooled.pooled, pooled.method) == (True, run.with_method("local").method)
    sets = config(method={"name": "fedavg", "mlp": {"rank": 4, "sets": 1}})
    whole = {"rank": 4, "placement": "auto", "sets": 1}
    assert settings(sets, "pcl-2")["mlp"] == whole
    assert settings(sets, "ffa-lora")["mlp"] == whole  # its own rank is 16


def test_a_rank_means_the_same_in_fedamole_and_in_what_it_is_compared_with(config) -> None:
    run = config(method={"name": "fedamole", "attention": {"rank": 4}, "lora": {"alpha": 32}})
    attention = {"rank": 4, "targets": QUERY_VALUE}
    for name in ("fedit", "fedit-ft", "fdlora", "fedmkt", "local"):
        method = run.with_method(name).method.described()
        assert method["attention"] == attention
        assert method["lora"]["alpha"] == 32
        assert method["lora"]["scale"] == method_from(name).described()["lora"]["scale"]
    back = config(method={"name": "fedit", "attention": {"rank": 2}}).with_method("fedamole")
    assert back.method.described()["attention"] == {**attention, "rank": 2}
    assert settings(run, "comigs-1g1s").keys() == {"attention", "lora"}  # routers have nothing


def test_a_part_that_is_left_out_is_left_out_where_a_method_can_do_without(config) -> None:
    run = config(method={"name": "comigs-1g1s", "attention": None})
    for name in ("comigs-2s", "fedavg", "hetlora"):
        assert settings(run, name) == {"attention": None}
    assert settings(run, "fedit") == settings(run, "fedamole") == {}
    run = config(method={"name": "fedavg", "mlp": None})
    assert settings(run, "local") == {"mlp": None}
    assert settings(run, "comigs-1g1s") == settings(run, "flexlora") == {}
