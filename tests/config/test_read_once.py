"""A command reads its run file once and validates it once."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

import coterie
from coterie.cli import app, terminal
from coterie.config.errors import validated
from coterie.config.run import RunConfig, parse, resolve
from coterie.config.sections import METHOD, RunFile, Sections
from coterie.config.values import read_values
from coterie.errors import CoterieError
from coterie.methods.registry import kind_of

FILE = "read-once.yaml"
opened: list[str] = []


def _count(event: str, arguments: Sequence[Any]) -> None:
    if event == "open" and str(arguments[0]).endswith(FILE):
        opened.append(str(arguments[0]))


sys.addaudithook(_count)


@pytest.fixture
def validations(monkeypatch) -> list[str]:
    """Record the names of the classes that validate a run file."""
    names: list[str] = []

    def counting(cls: type[BaseModel], values: Any) -> BaseModel:
        names.append(cls.__name__)
        return BaseModel.model_validate.__func__(cls, values)  # pyright: ignore[reportFunctionMemberAccess]

    monkeypatch.setattr(Sections, "model_validate", classmethod(counting))
    return names


def execute(*arguments: object) -> None:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "command", ["run", "data", "compare --methods pretrained,local", "audit", "base"]
)
def test_a_command_reads_its_file_once(command, values, validations, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "say", print)
    file = tmp_path / FILE
    file.write_text(yaml.safe_dump(values(rounds=1, method="fedavg", baselines=["pretrained"])))
    opened.clear()
    name, *options = command.split()
    execute(name, file, *options)
    assert opened == [str(file)]
    assert validations == ["RunFile"]


@pytest.mark.parametrize("clients", [[{"name": "anna"}], []], ids=["named", "anyone"])
def test_a_server_reads_its_file_once(clients, validations, tmp_path, monkeypatch) -> None:
    pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
    from coterie.deployment import start
    from coterie.network.keys import Keys
    from coterie.runs import RunFolder

    Keys.create(tmp_path / "keys").add("anna", tmp_path / "anna.key")
    served: list[RunConfig] = []

    def serve(config: RunConfig, *_: object) -> RunFolder:
        served.append(config)
        return RunFolder(tmp_path / "out")

    monkeypatch.setattr(start, "serve", serve)
    file = tmp_path / FILE
    file.write_text(yaml.safe_dump({"clients": clients}))
    opened.clear()
    execute("server", file, "--keys", tmp_path / "keys", "--out", tmp_path / "out")
    assert [client.name for client in served[0].clients] == ["anna"]
    assert opened == [str(file)]
    assert validations == ["RunFile"]


def test_a_methods_settings_are_as_in_the_file_until_they_are_bound(values, tmp_path) -> None:
    file = tmp_path / FILE
    settings = {"mlp": {"rank": 3}, "exact": True}
    file.write_text(yaml.safe_dump(values(method={"name": "fedavg", **settings})))
    file_values = validated(RunFile, read_values(file))
    assert (file_values.method.name, file_values.method.settings) == ("fedavg", settings)
    config = resolve(file_values)
    assert isinstance(config.method, kind_of("fedavg"))
    assert config == coterie.load_config(file)
    assert {**dict(config), "method": None} == {**dict(file_values), "method": None}
    assert file_values.model_dump(mode="json")["method"] == {"name": "fedavg", **settings}


@pytest.mark.parametrize("method", [None, 5, [], ["local"], True, {"name": None}])
def test_what_is_no_method_has_no_name(method, values) -> None:
    with pytest.raises(CoterieError, match="There is no method"):
        parse(values(method=method))


def test_a_method_may_be_an_object_and_its_name_has_a_default(values) -> None:
    method = kind_of("local")()
    assert parse(values(method=method)).method is method
    assert parse(values(method={"mlp": {"rank": 3}})).method.name == METHOD
