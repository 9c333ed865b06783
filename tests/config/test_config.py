"""Run files: what is read, what is set, and one sentence for everything that is wrong."""

from pathlib import Path

import pytest
import yaml

from coterie import CoterieError, load_config
from coterie.bases.sites import QUERY_VALUE
from coterie.config.run import RunConfig, parse
from coterie.methods.registry import method_from

ROUTER = {"name": "pfedmoe", "router": {"toppk": 2}}
RANDOM = {"assignment": "random"}
VANILLA = {"kind": "vanilla", "score_scale": "dim"}
METHODS = [
    ("fedavg", {"router": {"top_k": 1}}, "Unknown key 'method.router'."),
    ("fedavg", {"top_k": 1}, "Unknown key 'method.top_k'. Known keys: name, mlp, attention"),
    ("fedavg", {"specialists": 1}, "Unknown key 'method.specialists'. Known keys:"),
    ("fedit", {"mlp": {"rank": 4}}, "Unknown key 'method.mlp'."),
    ("pfedmoe", {"router": {"every": 3}}, "Unknown key 'method.router.every'."),
    ("pcl-uniform", {"trusted": {"top": 1}}, "Unknown key 'method.trusted'."),
    ("pcl-theoretical", {"top": 1}, "Unknown key 'method.top'. Known keys:"),
    ("pcl-1", {"exact": True}, "Unknown key 'method.exact'."),
    ("fedamole", RANDOM | {"embeddings": {"share": 0.1}}, "has no effect with `assignment: ran"),
    ("fedamole", RANDOM | {"router": VANILLA}, "method.router: score_scale has no effect with"),
    ("comigs-1g1s", {"mlp": None}, "method.mlp should be a mapping of keys to values"),
    ("fedit", {"attention": None}, "method.attention should be a mapping of keys to values"),
    ("fedavg", {"mlp": {"ranc": 4}}, "'method.mlp.ranc'. Did you mean 'method.mlp.rank'?"),
]
"""Settings that the named methods do not have, and the errors."""
WRONG = [
    ("roundz", 3, "Unknown key 'roundz'. Did you mean 'rounds'?"),
    ("training", {"bacth": 3}, "Unknown key 'training.bacth'. Did you mean 'training.batch'?"),
    ("evaluation", {"evry": 3}, "'evaluation.evry'. Did you mean 'evaluation.every'?"),
    ("data", {"limits": {"trian": 9}}, "'data.limits.trian'. Did you mean 'data.limits.train'?"),
    ("method", ROUTER, "'method.router.toppk'. Did you mean 'method.router.top_k'?"),
    ("clients", [{"name": "a", "pth": ""}], "'clients[0].pth'. Did you mean 'clients[0].path'?"),
    ("server", {"tset": "x"}, "Unknown key 'server.tset'. Did you mean 'server.test'"),
    ("training", {"learning_rates": {"poet": 0}}, "learning_rates.poet should be greater than 0"),
    *(("method", {"name": name, **settings}, message) for name, settings, message in METHODS),
]


@pytest.mark.parametrize(("key", "value", "sentence"), WRONG)
def test_an_unknown_key_is_named_with_the_nearest_right_one(key, value, sentence, values) -> None:
    with pytest.raises(CoterieError) as error:
        parse(values(**{key: value}))
    assert sentence in str(error.value)


CLIENTS = "is not a mapping, so no key inside it can be set; set the whole value of 'clients' inst"
WHOLE = ("training.steps", "rounds", "data.window")
NUMBERS = ("training.learning_rate", "deployment.deadline")
BOOLEAN = "data.deduplicate"
ENDLESS = ["[" * 100_000, "1" * 5000, "0x" + "f" * 5000]
"""YAML that Python cannot hold."""


WRONG_SETTINGS = [
    ("rounds=many", "rounds should be a whole number, not 'many'."),
    ("rounds=1.5", "rounds should be a whole number, not 1.5."),
    ("rounds=", "rounds should be a whole number, not None."),
    ("rounds=0", "rounds should be greater than or equal to 1, not 0."),
    ("training=5", "training should be a mapping of keys to values, not 5."),
    ("training.optimiser.betas=[1]", "optimiser.betas should be a list of 2 numbers, not [1]."),
    ("training.precision=fp8", "training.precision should be 'fp32' or 'bf16', not 'fp8'."),
    ("method.mlp.specialists=abc", "specialists should be a whole number or a mapping"),
    ("method.mlp.specialists={poet: x}", "mlp.specialists.poet should be a whole number"),
    ("clients=poet", "clients should be a list, not 'poet'."),
    ("clients=[poet]", "clients[0] should be a mapping of keys to values, not 'poet'."),
    ("clients=[{path: x}]", "clients[0].name is missing."),
    ("clients=[{nam: a, path: x}]", "Did you mean 'clients[0].name'?"),
    ("clients=[{name: a}]", "client a has neither path nor train"),
    ("clients=[{name: a, path: x}, {name: a, path: y}]", "client name 'a' is used twice"),
    ("clients=[{name: A, path: x}, {name: a, path: y}]", "'a' in `clients` differ only in case"),
    ("clients=[{name: Con, path: x}]", "'Con' is the name of a device on Windows"),
    ("name=lpt1.2026", "'lpt1.2026' is the name of a device on Windows"),
    ("clients=[]", "The run has no clients"),
    ("divide={source: x.jsonl, by: label}", "are mutually exclusive"),
    ("name=../x", "name should be up to 64 letters"),
    ("data.window=5000", "limit of 2000 train tokens is too small"),
    ("evaluation.metric=accuracy", "set data.instructions"),
    ("evaluation.generate=9", "set data.instructions"),
    ("data.instructions.template=ask.jinja", "there is no file"),
    ("data.instructions={choices: [yes, no]}", "quote them"),
    ("method=fedavgg", "There is no method 'fedavgg'. Did you mean 'fedavg'?"),
    ("baselines=[lokal]", "There is no method 'lokal'. Did you mean 'local'?"),
    ("clients.poet.path=x", CLIENTS),
    ("method={name: fedit, attention: {rank: yes}}", "method.attention.rank should be a whole"),
    *((f"{key}=yes", f"{key} should be a whole number, not True") for key in WHOLE),
    *((f"{key}=yes", f"{key} should be a number, not True") for key in NUMBERS),
    *((f"{BOOLEAN}={n}", f"{BOOLEAN} should be true or false, not {n}") for n in (0, 1, 1.0)),
    *((f"training.steps={value}", "is not valid YAML") for value in ENDLESS),
    ("rounds", "--set takes key=value"),
    ("=4", "--set takes key=value"),
    ("rounds=[1", "the value is not valid YAML"),
    ("a.b=3", "Unknown key 'a'."),
]


@pytest.mark.parametrize(("setting", "sentence"), WRONG_SETTINGS)
def test_a_wrong_setting_is_one_sentence(setting, sentence, run_file) -> None:
    with pytest.raises(CoterieError) as error:
        load_config(run_file, [setting])
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def run_file(values, tmp_path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values()))
    return path


EMPTY = "needs at least `clients` or `divide` (to run the demo, use `coterie run` without a run f"


NO_RUN_FILES = [
    (b"", EMPTY),
    (b"- a\n", "is not a mapping of keys to values."),
    (b"name: [a\nb: }", "is not valid YAML, line 2, column 2: expected ',' or ']'"),
    ("name: café".encode("latin-1"), "is not UTF-8 text."),
    (b"name: \x00", "is not valid YAML"),
    (b"rounds: 1\nrounds: 2", "duplicate key 'rounds'"),
    (b"name: !!python/object:os.system x", "is not valid YAML, line 1"),
]


@pytest.mark.parametrize(("content", "sentence"), NO_RUN_FILES)
def test_a_file_that_is_no_run_file(content, sentence, tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(CoterieError) as error:
        load_config(path)
    assert str(error.value).startswith(f"The run file {path} ")
    assert sentence in str(error.value)


def test_a_missing_file_and_a_folder(tmp_path) -> None:
    with pytest.raises(CoterieError, match="There is no run file"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(CoterieError, match="is a folder, not a run file; write one with `coterie"):
        load_config(tmp_path)


def test_paths_start_at_the_run_files_folder(run_file, monkeypatch, tmp_path) -> None:
    content = yaml.safe_load(run_file.read_text()) | {"data_root": "texts"}
    run_file.write_text(yaml.safe_dump(content))
    assert load_config(run_file).root == tmp_path / "texts"
    run_file.write_text(yaml.safe_dump(content | {"data_root": None}))
    assert load_config(run_file).root == tmp_path
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_config(run_file, ["data_root=here"]).root == elsewhere / "here"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_config(run_file, ["data_root=~/x"]).root == tmp_path / "home" / "x"


def test_a_run_without_a_name_is_named_after_its_file(run_file) -> None:
    content = yaml.safe_load(run_file.read_text())
    del content["name"]
    other = run_file.with_name("two words, ok.yaml")
    other.write_text(yaml.safe_dump(content))
    assert load_config(other).name == "two-words-ok"


def test_settings_reach_into_sections_and_methods(run_file) -> None:
    run = load_config(run_file, ["training.batch=7", "method=local", "method.mlp.rank=3", "seed=5"])
    assert (run.training.batch, run.label, run.seed) == (7, "local", 5)
    assert run.method.described()["mlp"] == {"rank": 3, "placement": "auto", "sets": 2}
    assert load_config(run_file, ["method={mlp: {rank: 2}}"]).label == "auto"


def test_a_run_survives_the_way_through_plain_data(config) -> None:
    run = config(baselines=["local", "centralized"])
    again = parse(run.as_dict())
    assert again == run
    assert again.digest() == run.digest()
    assert config(method="centralized").label == "centralized"
    assert parse(config(method="centralized").as_dict()).label == "centralized"


def test_the_digest_follows_what_can_change_the_result(config) -> None:
    run = config()
    assert config(name="other", baselines=["local"]).digest() == run.digest()
    for change in ({"seed": 1}, {"rounds": 4}, {"method": "local"}, {"data_root": "x"}):
        assert config(**change).digest() != run.digest()


def test_what_is_written_can_be_shown_only_where_it_is_written(values) -> None:
    data = {"window": 48, "instructions": {"template": "plain"}}
    with pytest.raises(CoterieError, match="set evaluation\\.generate"):
        parse(values(data=data, evaluation={"metric": "rouge_l"}))
    parse(values(data=data, evaluation={"metric": "rouge_l", "generate": 8}))


def test_a_templates_file_becomes_part_of_the_run(values, tmp_path) -> None:
    (tmp_path / "ask.jinja").write_text("{{ question }} Answer:\n", encoding="utf-8")
    data = {"window": 48, "instructions": {"template": "ask.jinja"}}
    run = parse(values(data=data, data_root=str(tmp_path)))
    assert run.data.instructions is not None
    assert run.data.instructions.template == "{{ question }} Answer:"
    assert parse(run.as_dict()).digest() == run.digest()


def test_a_shipped_run_file_is_known_by_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("who-wrote-this")).method.name == "fedamole"
    taught = load_config(Path("teach-one-another"))
    assert (taught.method.name, taught.base_of("server").name) == ("fedmkt", "tiny-gpt2")
    talks = load_config(Path("four-assistants"))
    assert (talks.method.name, talks.data.chats) == ("comigs-1g1s", True)
    (tmp_path / "who-wrote-this").write_text("clients: [{name: a, path: x}]", encoding="utf-8")
    assert load_config(Path("who-wrote-this")).method.name == "auto"  # one's own comes first
    with pytest.raises(CoterieError, match="There is no run file"):
        load_config(Path("elsewhere/who-wrote-this"))


def test_clients_and_the_server_may_have_their_own_base_and_rate(config) -> None:
    rates = {"poet": 4e-3, "server": 1e-3}
    training = {"learning_rate": 2e-3, "final_learning_rate": 2e-4, "learning_rates": rates}
    run = config(bases={"poet": "small"}, training=training, server={"base": "large"})
    assert parse(run.as_dict()) == run
    names = [run.base_of(n).name for n in ("poet", "whaler", "server")]
    assert names == ["small", run.base.name, "large"]
    for name, rate in {"poet": 4e-3, "whaler": 2e-3, "server": 1e-3}.items():
        training = run.training_of(name)
        assert (training.learning_rate, training.learning_rates) == (rate, {})
        assert training.final_learning_rate == pytest.approx(rate / 10)
    pooled = run.model_copy(update={"pooled": True})
    assert pooled.base_of("poet").name == "large"
    assert pooled.training_of("poet").learning_rate == 1e-3
    assert pooled.model_copy(update={"server": None}).base_of("poet") == run.base
    assert config(server={}).base_of("server") == run.base


def settings(run: RunConfig, name: str) -> dict:
    """Return the settings of another method in a run that differ from that method's defaults."""
    values, own = run.with_method(name).method.described(), method_from(name).described()
    return {key: value for key, value in values.items() if value != own[key]}


def test_only_a_changed_part_is_carried_and_as_a_whole(config) -> None:
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


def test_a_rank_means_the_same_in_fedamole_and_its_baselines(config) -> None:
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


def test_a_part_is_left_out_where_a_method_can_do_without(config) -> None:
    run = config(method={"name": "comigs-1g1s", "attention": None})
    for name in ("comigs-2s", "fedavg", "hetlora"):
        assert settings(run, name) == {"attention": None}
    assert settings(run, "fedit") == settings(run, "fedamole") == {}
    run = config(method={"name": "fedavg", "mlp": None})
    assert settings(run, "local") == {"mlp": None}
    assert settings(run, "comigs-1g1s") == settings(run, "flexlora") == {}
