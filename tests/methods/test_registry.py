"""Methods by name: found without importing the others, registered, from packages and plugins."""

import linecache
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import coterie
from coterie import CoterieError
from coterie.config.run import parse
from coterie.methods.averaging import FedAvg
from coterie.methods.registry import OWN, kind_of, method_from, names


def named(name: str, **more: object) -> type[FedAvg]:
    return type("Named", (FedAvg,), {"name": name, "__module__": __name__, **more})


@pytest.mark.parametrize("name", OWN)
def test_the_table_of_names_is_right(name) -> None:
    file, _, kind = OWN[name].partition(":")
    module, method = import_module(f"coterie.methods.{file}"), kind_of(name)
    assert method.name == name
    assert kind_of(name) is method
    assert issubclass(method, getattr(module, kind))
    assert (name in getattr(module, "PRESETS", {})) == (method is not getattr(module, kind))


def test_every_method_of_the_package_is_in_the_table() -> None:
    listed = {kind_of(name) for name in OWN}

    def below(kind):
        for inner in kind.__subclasses__():
            yield inner
            yield from below(inner)

    ours = {k for k in below(coterie.Method) if k.__module__.startswith("coterie.methods.")}
    assert {k for k in ours if "name" in vars(k)} == listed
    modules = {import_module(f"coterie.methods.{p.partition(':')[0]}") for p in OWN.values()}
    assert {name for m in modules for name in getattr(m, "PRESETS", {})} <= OWN.keys()


@pytest.mark.parametrize("name", ["fedavg", "fedit", "fedprompt", "fedptuning"])
def test_a_preset_has_the_settings_and_code_of_its_class(name) -> None:
    kind, tuned = kind_of(name), kind_of(f"{name}-ft")
    assert tuned.model_fields.keys() == kind.model_fields.keys()
    assert tuned().model_dump() == kind().model_dump()
    assert (kind.reports, tuned.reports, tuned.paper) == ("aggregated", "trained", kind.paper)
    assert {key for key in vars(tuned) if callable(vars(tuned)[key])} <= set(vars(kind))


@pytest.mark.slow
def test_one_method_does_not_import_the_others() -> None:
    program = (
        "import sys; from coterie.methods.registry import method_from; method_from('fedavg');"
        "print(*(m for m in sys.modules if m.startswith('coterie.methods.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "coterie.methods.averaging" in done.stdout.split(), done.stderr
    others = {f"coterie.methods.{place.partition(':')[0]}" for place in OWN.values()}
    assert others & set(done.stdout.split()) == {"coterie.methods.averaging"}


def test_a_registered_class_is_found_by_its_name(values, tmp_path) -> None:
    kind = coterie.register(named("mine", summary="as fedavg"))
    assert names()[-1] == "mine"
    run = {**values(method="mine", rounds=1), "clients": values()["clients"][:2]}
    done = coterie.run(run, out=tmp_path / "run")
    assert type(done.config.method) is kind
    assert coterie.load(done.path, "poet") is not None


def test_a_class_may_be_registered_again_after_a_change() -> None:
    coterie.register(named("mine"))
    second = coterie.register(named("mine"))
    assert kind_of("mine") is second


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (named("fedavg"), "A method named 'fedavg' already exists"),
        (named("centralized"), "A method named 'centralized' already exists"),
        (named("My Method"), "needs a `name` of lower-case letters"),
        (int, "cannot be registered; it must be a subclass"),
        (type("Nameless", (coterie.Method,), {}), "The method Nameless needs a `name`"),
        (type("Silent", (coterie.Method,), {"name": "silent"}), "'silent' needs a `summary`"),
    ],
)
def test_what_cannot_be_registered_is_told(kind, sentence) -> None:
    with pytest.raises(CoterieError, match=sentence):
        coterie.register(kind)


def test_a_name_is_not_taken_from_another_class() -> None:
    coterie.register(named("mine"))
    with pytest.raises(CoterieError, match="A method named 'mine' already exists"):
        coterie.register(named("mine", __module__="another"))


def test_an_installed_package_adds_methods_and_a_broken_one_is_named(install) -> None:
    def broken():
        raise ImportError("no module named 'lost'")

    install(theirs=lambda: named("theirs"), broken=broken)
    assert {"theirs", "broken"} <= set(names())
    assert method_from("theirs").name == "theirs"
    with pytest.raises(CoterieError, match=r"'broken' .* \(pkg:broken\) cannot be imported: no"):
        method_from("broken")


def test_objects_are_compared_too(config, tmp_path) -> None:
    run = config(rounds=1)
    small, large = FedAvg(mlp=None, exact=False), FedAvg()
    with pytest.raises(CoterieError, match="Two methods are called 'fedavg'"):
        coterie.compare(run, [small, large], out=tmp_path)
    comparison = coterie.compare(run, {"without experts": small, "with": large}, out=tmp_path)
    assert list(comparison.results) == ["without experts", "with"]
    reports: list[str] = []
    coterie.compare(run, {"with": large}, out=tmp_path, report=reports.append)
    assert reports == ["Run 1 of 1: with-seed0 (already finished)"]


def test_another_version_of_a_class_is_another_run(config) -> None:
    versions = [namespace(code)["Mine"] for code in ("one", "another", "one")]
    digests = [config(method=kind()).digest() for kind in versions]
    assert digests[0] == digests[2] != digests[1]


def namespace(code: str) -> dict:
    """Execute code like a notebook's cell, with its text where Python looks for it."""
    file, text = f"<{code}>", f"class Mine(FedAvg):\n    name = 'mine'\n    summary = {code!r}\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(f"cell_{code}")
    sys.modules[module.__name__], module.__file__ = module, file
    vars(module)["FedAvg"] = FedAvg
    exec(compile(text, file, "exec"), vars(module))
    return vars(module)


def test_a_pooled_run_is_no_method(values) -> None:
    assert parse(values(method="centralized")).pooled
    with pytest.raises(CoterieError, match="There is no method 'centralized'"):
        kind_of("centralized")
