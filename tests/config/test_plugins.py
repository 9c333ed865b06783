"""Methods in a file of one's own: loaded where it is named, recorded, and never run otherwise."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import coterie
from coterie import CoterieError
from coterie.cli import app
from coterie.config import plugins
from coterie.config.plugins import load_plugin, plugin_of, version_of
from coterie.deployment.client import Worker
from coterie.methods.registry import METHODS, kind_of
from coterie.runs import RunFolder
from coterie.testing import loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedsa_lora.py"


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch) -> None:
    """Forget plugins that other test files load when they are imported."""
    forgotten(monkeypatch)
    monkeypatch.setattr(plugins, "_loaded", {})


def forgotten(monkeypatch) -> None:
    """Remove all plugins, as in a new process."""
    monkeypatch.setattr(METHODS, "registered", {})


@pytest.fixture
def plugin(tmp_path) -> Path:
    """The example, to be changed."""
    return Path(shutil.copy(EXAMPLE, tmp_path / "mine.py"))


@pytest.fixture
def done(plugin, config, tmp_path) -> Path:
    """A finished run with the plugin."""
    load_plugin(plugin)
    return coterie.run(config(method="fedsa-lora", rounds=1), out=tmp_path / "run").path


def change(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")


def test_a_plugin_is_loaded_once_and_its_classes_have_names(plugin) -> None:
    [kind] = load_plugin(plugin)
    assert load_plugin(plugin) == [kind]
    assert kind_of("fedsa-lora") is kind
    assert plugin_of(kind) == plugins.Plugin(str(plugin), version_of(kind))


WRONG_PLUGINS = [
    ("class X(:\n", r"mine\.py is not valid Python \(line 1: "),
    ("x = 1\nimport nosuch\n", r"mine\.py cannot be loaded, line 2: ModuleNotFoundError"),
    ("def f():\n    raise ValueError\nf()\n", r"cannot be loaded, line 2: ValueError\.$"),
    ("x = 1\n", r"mine\.py defines no method or .*, that is, no subclass of coterie\.M"),
    ("from coterie.methods.averaging import FedAvg\n", r"defines no method"),
]


@pytest.mark.parametrize(("code", "sentence"), WRONG_PLUGINS)
def test_what_is_wrong_with_a_plugin_is_one_sentence(code, sentence, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code, encoding="utf-8")
    for _ in range(2):  # half a module is not left behind
        with pytest.raises(CoterieError, match=sentence) as error:
            load_plugin(file)
        assert "\n" not in str(error.value)
    with pytest.raises(CoterieError, match=r"The plugin .*lost\.py cannot be read"):
        load_plugin(tmp_path / "lost.py")


def test_a_run_records_its_plugin_and_asks_for_it(done, plugin, monkeypatch) -> None:
    assert RunFolder(done).description["plugins"]["fedsa-lora"]["file"] == str(plugin)
    forgotten(monkeypatch)
    for again in (lambda: coterie.load(done, "poet"), lambda: coterie.resume(done)):
        with pytest.raises(CoterieError, match=f"'fedsa-lora' .* {plugin}.* --plugin"):
            again()
    load_plugin(plugin)
    assert coterie.load(done, "poet") is not None
    assert coterie.tokenizer(done) is not None


def test_a_plugin_that_has_changed_is_refused(done, plugin, monkeypatch) -> None:
    forgotten(monkeypatch)
    change(plugin)
    load_plugin(plugin)
    with pytest.raises(CoterieError, match=f"plugin {plugin}, but the plugin that is loaded now"):
        coterie.resume(done)


def test_a_changed_plugin_is_another_run_of_a_comparison(config, plugin, monkeypatch) -> None:
    load_plugin(plugin)
    run = config(method="fedsa-lora")
    forgotten(monkeypatch)
    change(plugin)
    load_plugin(plugin)
    assert config(method="fedsa-lora").digest() != run.digest()
    forgotten(monkeypatch)
    load_plugin(EXAMPLE)
    assert config(method="fedsa-lora").digest() == run.digest()


@pytest.fixture
def deployed(plugin, config):
    load_plugin(plugin)
    return config(method="fedsa-lora", rounds=1)


def refusals(run, tmp_path, monkeypatch, clients) -> list[str]:
    """Return the messages of clients on the order to join, after a call of `clients`."""
    texts: list[str] = []
    network = loop.Loop({})
    server = loop.server(run, tmp_path / "server", network)
    sites = [loop.site(run, client.name, tmp_path) for client in run.clients]
    network.workers = {s.name: Worker(s, lambda _, v: texts.append(str(v))) for s in sites}
    server._send("poet", "join")
    [(_, order)] = network.pending.values()
    clients()
    network.workers["poet"].answer(order)
    assert str(tmp_path).encode() not in order  # the file's name travels, its place does not
    return texts


def test_a_client_without_the_plugin_is_told(deployed, tmp_path, monkeypatch) -> None:
    [why] = refusals(deployed, tmp_path, monkeypatch, lambda: forgotten(monkeypatch))
    advice = "get this file from the server's operator, and start this client with --plugin FILE"
    assert why == f"the run needs the plugin mine.py; {advice}"


def test_a_client_with_another_file_is_told(deployed, plugin, tmp_path, monkeypatch) -> None:
    def other() -> None:
        forgotten(monkeypatch)
        change(plugin)
        load_plugin(plugin)

    [why] = refusals(deployed, tmp_path, monkeypatch, other)
    advice = "the server and this client need the same file"
    assert why == f"the run has a different version of the plugin mine.py; {advice}"


def test_both_sides_with_the_same_file_end_in_the_same_bits(deployed, tmp_path) -> None:
    local = coterie.run(deployed, out=tmp_path / "local")
    loop.deploy(deployed, tmp_path)
    loop.assert_as_local(deployed, tmp_path, RunFolder(local.path))


@pytest.mark.thorough
def test_workers_of_ray_load_it_too(deployed, tmp_path) -> None:
    local = coterie.run(deployed, out=tmp_path / "local")
    parallel = coterie.run(deployed, out=tmp_path / "ray", engine="ray")
    loop.assert_same_states(RunFolder(local.path), RunFolder(parallel.path))


@pytest.mark.slow
def test_every_command_takes_it(plugin, values, tmp_path) -> None:
    runner, options = CliRunner(), ["--plugin", str(plugin)]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values(method="fedsa-lora", rounds=1)), encoding="utf-8")
    out = tmp_path / "out"
    for command in (
        ["methods", "fedsa-lora"],
        ["audit", str(file)],
        ["run", str(file), "--out", str(out)],
        ["run", "--resume", str(out)],
        ["generate", str(out), "--client", "poet", "--prompt", "I", "--tokens", "2"],
        ["report", str(out)],
        ["compare", str(file), "--methods", "local,fedsa-lora", "--out", str(tmp_path / "cmp")],
    ):
        result = runner.invoke(app, [*command, *options])
        assert result.exit_code == 0, (command, result.output, result.exception)
    for command in ("server", "client"):
        assert "--plugin" in runner.invoke(app, [command, "--help"]).output
