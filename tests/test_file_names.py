"""Names that are also names of files: equal or impossible names on any system are refused."""

from itertools import permutations

import pytest
from pydantic import ValidationError

from coterie.data.division.divide import names_of_clients
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import ClientSpec
from coterie.errors import CoterieError
from coterie.names import check_distinct
from coterie.network.keys import Keys

DEVICES = ["con", "PRN", "Aux", "nul", "com1", "LPT9", "nul.txt", "CON.a.b"]


@pytest.mark.parametrize("name", DEVICES)
def test_a_client_cannot_have_the_name_of_a_device(name, tmp_path) -> None:
    with pytest.raises(ValidationError, match="is the name of a device on Windows"):
        ClientSpec(name=name, path="x")
    with pytest.raises(ValidationError, match="is the name of a device on Windows"):
        DivideSpec(source="x", by="mixtures", mixtures={name: {"a": 1.0}})
    with pytest.raises(CoterieError, match="is the name of a device on Windows"):
        Keys.create(tmp_path / "keys").add(name, tmp_path / "client.key")


@pytest.mark.parametrize("name", ["console", "com", "com10", "anna.con", "nul-1", "_aux"])
def test_names_that_resemble_devices_are_accepted(name) -> None:
    assert ClientSpec(name=name, path="x").name == name


@pytest.mark.parametrize("names", permutations(["Anna", "ben", "anNa"]))
def test_names_of_clients_differ_not_only_in_case(names) -> None:
    with pytest.raises(ValueError, match="in `clients` differ only in case; rename one"):
        check_distinct(names, "clients")
    with pytest.raises(ValidationError, match=r"in `divide\.mixtures` differ only in case"):
        DivideSpec(source="x", by="mixtures", mixtures={name: {"a": 1.0} for name in names})


def test_a_key_name_in_another_case_is_refused(tmp_path) -> None:
    keys = Keys.create(tmp_path / "keys")
    keys.add("anna", tmp_path / "anna.key")
    with pytest.raises(CoterieError, match="There is already a client 'anna'"):
        keys.add("ANNA", tmp_path / "again.key")
    assert list(keys.clients()) == ["anna"]
    assert not (tmp_path / "again.key").exists()


def test_labels_give_valid_names() -> None:
    labels = ["Aux", "nul.x", "-1", "日本", "Été"]
    names = names_of_clients(DivideSpec(source="x", by="label"), labels)
    assert names == ["label-aux", "label-nul.x", "minus-1", "label-4", "ete"]
    assert all(ClientSpec(name=name, path="x") for name in names)
