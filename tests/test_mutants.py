"""The listed faults can be applied, and their tests exist; `make mutants` runs them."""

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AREAS = ["methods", "training", "aggregation", "messages", "deployment", "data", "bases"]
AREAS += ["evaluation"]


def mutants() -> Any:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_area_has_five_faults_that_can_be_applied() -> None:
    faults = mutants().read_faults()
    assert Counter(fault.area for fault in faults) == dict.fromkeys(AREAS, 5)
    for fault in faults:
        before = (ROOT / fault.file).read_text(encoding="utf-8")
        after = fault.applied(before)
        assert after != before, fault
        compile(after, fault.file, "exec")


def test_each_fault_names_tests_that_exist() -> None:
    for fault in mutants().read_faults():
        assert fault.tests
        for test in fault.tests:
            file, *names = test.partition("[")[0].split("::")
            source = (ROOT / file).read_text(encoding="utf-8")
            inherited = (ROOT / "src/coterie/testing/contract.py").read_text(encoding="utf-8")
            for name in names:
                assert any(f" {name}{end}" in source + inherited for end in "(:"), test
