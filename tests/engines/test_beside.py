"""The runs beside a run: its baselines, and those of its comparison on the same data."""

import pytest

from coterie.errors import CoterieError
from coterie.inference.beside import find_beside
from coterie.runs import RunFolder


def test_the_runs_of_a_comparison_are_beside_one_another(written, tmp_path) -> None:
    run = RunFolder(written("compare/comigs-seed0-aa", {"name": "comigs-1g1s"}))
    local = written("compare/local-seed0-bb", {"name": "local"})
    written("compare/local-seed1-cc", {"name": "local"}, seed=1)
    written("compare/fedavg-seed0-dd", {"name": "fedavg"}, data={"window": 32})
    pooled = written("compare/centralized-seed0-ee", {"name": "local"}, pooled=True)
    (tmp_path / "compare" / "broken").mkdir()
    (tmp_path / "compare" / "broken" / "run.json").write_text("{")
    assert find_beside(run, "local").path.samefile(local)
    assert find_beside(run, "centralized").path.samefile(pooled)
    with pytest.raises(
        CoterieError, match=r"'fedavg' is neither .*; available methods: centralized, loc"
    ):
        find_beside(run, "fedavg")
    written("compare/local-rank4", {"name": "local", "mlp": {"rank": 4}})
    with pytest.raises(CoterieError, match="There are several runs of 'local' next to the run"):
        find_beside(run, "local")


def test_a_run_and_its_baselines_find_one_another(written, tmp_path, monkeypatch) -> None:
    written("runs/mine", {"name": "comigs-1g1s"})
    for method in ("local", "fedavg"):
        written(f"runs/mine/baselines/{method}", {"name": method})
    written("runs/yours", {"name": "pcl-1"}, data_root="elsewhere")
    monkeypatch.chdir(tmp_path / "runs")
    for start, method, expected in [
        ("mine", "local", "mine/baselines/local"),
        ("mine/baselines/local", "fedavg", "mine/baselines/fedavg"),
        ("mine/baselines/local", "comigs-1g1s", "mine"),
    ]:
        assert find_beside(RunFolder(tmp_path / "runs" / start), method).path.samefile(expected)
    with pytest.raises(CoterieError, match=r"available methods: fedavg, local"):
        find_beside(RunFolder(tmp_path / "runs" / "mine"), "pcl-1")
    with pytest.raises(CoterieError, match=r"available methods: none"):
        find_beside(RunFolder(tmp_path / "runs" / "yours"), "local")
