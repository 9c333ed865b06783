"""The listed faults can be applied, and their tests exist; `make mutants` runs them."""

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AREAS = ["methods", "training", "aggregation", "messages", "deployment", "data", "bases"]
AREAS += ["evaluation"]


FAULTS: list[Any] = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))["read_faults"]()


def test_each_area_has_five_faults_that_can_be_applied() -> None:
    assert Counter(fault.area for fault in FAULTS) == dict.fromkeys(AREAS, 5)
    for fault in FAULTS:
        before = (ROOT / fault.file).read_text(encoding="utf-8")
        after = fault.applied(before)
        assert after != before, fault
        compile(after, fault.file, "exec")


def test_each_fault_names_tests_that_exist() -> None:
    for fault in FAULTS:
        assert fault.tests
        for test in fault.tests:
            file, *names = test.partition("[")[0].split("::")
            source = (ROOT / file).read_text(encoding="utf-8")
            inherited = (ROOT / "src/coterie/testing/contract.py").read_text(encoding="utf-8")
            for name in names:
                assert any(f" {name}{end}" in source + inherited for end in "(:"), test


def test_ci_runs_a_fault_s_tests_after_a_change_of_its_file() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "affected.py"))
    imported = script["imports"]()
    for fault in FAULTS:
        whole, _ = script["affected"]([fault.file], imported)
        assert all(test.startswith(tuple(whole)) for test in fault.tests), fault.file
