"""The package asks for what it needs, no more and no less, and says who it is."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from scripts import try_wheel

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = [Requirement(each) for each in PROJECT["dependencies"]]
EXTRAS = {
    name: [Requirement(each) for each in requirements]
    for name, requirements in PROJECT["optional-dependencies"].items()
}
TOOLS = ("dev", "docs")
"""The extras with programs that the package does not import."""
INSTALLED_BY = {
    "flwr": "tests/deployment/test_flower_processes.py",
    "wandb": "tests/runs/test_trackers.py",
}
"""Packages that the tests of a file install in an environment of their own."""
EVERYTHING = [*NEEDED, *(each for extra in EXTRAS.values() for each in extra)]
PINS = {
    canonicalize_name(pin.name): pin
    for pin in map(Requirement, (ROOT / "requirements.txt").read_text(encoding="utf-8").split())
}
MAY_IMPORT = {
    "network/": {"deployment"},
    "deployment/monitoring.py": {"deployment"},
    "engines/cluster.py": {"ray"},
    "engines/ray.py": {"ray"},
    "report/": {"report"},
    "methods/fdlora.py": {"fdlora"},
    "bases/gguf.py": {"gguf"},
    "bases/gguf_checks.py": {"gguf"},
    "exports/gguf.py": {"gguf"},
    "inference/harness.py": {"eval"},
    "runs/trackers.py": {"tensorboard", "wandb"},
    "bases/weights.py": {"quantised"},
    "cli/flower_app.py": {"flower"},
    "cli/keys.py": {"deployment"},
    "serve/": {"serve"},
    "testing/": {"testing"},
}
"""The extras whose packages a part of the source may import."""
DISTRIBUTIONS = metadata.packages_distributions()
"""The installed distributions, by module."""
PARTS = {"pydantic-core": "pydantic"}
"""Distributions that belong to another, which asks for one version of them."""


def _names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(each.name) for each in requirements}


def _imported(path: Path) -> set[str]:
    """Return the distributions that a file imports, except the standard library and Coterie."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "no relative imports"
            modules.add(node.module.split(".")[0])
    distributions = (
        canonicalize_name(DISTRIBUTIONS.get(module, [module])[0])
        for module in modules - sys.stdlib_module_names - {"coterie"}
    )
    return {PARTS.get(name, name) for name in distributions}


USED_IF_THERE = {"scikit-learn", "llama-cpp"}
"""Other packages or the user bring it, and something simpler is done without."""
USED_BY_OTHERS = {"click"}
"""Packages with a range because another package works only with certain versions of them."""
SOURCE = ROOT / "src" / "coterie"
FILES = sorted(SOURCE.rglob("*.py"))
IMPORTED = {path.relative_to(SOURCE).as_posix(): _imported(path) for path in FILES}


def test_a_library_does_not_choose_its_users_versions() -> None:
    for requirement in NEEDED:
        assert any(each.operator == ">=" for each in requirement.specifier), requirement
    operators = {each.operator for requirement in EVERYTHING for each in requirement.specifier}
    assert operators.isdisjoint(("==", "==="))


@pytest.mark.parametrize("requirement", EVERYTHING, ids=str)
def test_what_is_developed_with_lies_in_the_range(requirement) -> None:
    if test := INSTALLED_BY.get(requirement.name):
        pytest.skip(f"{test} installs it")
    pin = PINS[canonicalize_name(requirement.name)]
    [exact] = pin.specifier
    assert exact.operator == "=="
    assert requirement.specifier.contains(exact.version), f"{pin} is outside {requirement}"


def test_what_is_imported_is_asked_for() -> None:
    for path, imported in IMPORTED.items():
        extras = set().union(*(of for home, of in MAY_IMPORT.items() if path.startswith(home)))
        allowed = _names([*NEEDED, *(each for extra in extras for each in EXTRAS[extra])])
        assert imported - USED_IF_THERE <= allowed, path


def test_what_is_asked_for_is_imported() -> None:
    used = [each for name in EXTRAS if name not in TOOLS for each in EXTRAS[name]]
    assert _names([*NEEDED, *used]) - USED_BY_OTHERS <= set().union(*IMPORTED.values())


def test_it_says_its_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"coterie {PROJECT['version']}\n")
    assert coterie.__version__ == PROJECT["version"]


def test_pages_name_the_version_that_is_built() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    wheels = []
    for page in ("use/install.md", "deploy/set-up.md", "deploy/operate.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        wheels += re.findall(r"coterie-([0-9.]+)-py3-none-any", text)
    assert set(wheels) == {PROJECT["version"]}


def test_the_licence_is_apaches_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.endswith("limitations under the License.\n")


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_except_the_papers_base(tmp_path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=leave_out)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", tmp_path]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("coterie/")}
    files = [path for path in (tmp_path / "src/coterie").rglob("*") if path.is_file()]
    names = {path.relative_to(tmp_path / "src").as_posix() for path in files}
    assert held == {n for n in names if not n.startswith("coterie/assets/tiny-polyglot/")}
    assert wheel.stat().st_size < 22_000_000


def test_the_oldest_versions_are_those_of_the_ranges() -> None:
    project = {
        "dependencies": ["a>=1.2,<3", "b >= 0.5"],
        "optional-dependencies": {"x": ["c[y]==4.1", "d<8.5"], "dev": ["e>=1"]},
    }
    assert list(try_wheel.oldest(project)) == ["a==1.2", "b==0.5", "c==4.1", "d<8.5"]
