"""Every recipe is a valid run or table, and finds its texts where the data sets are at hand."""

from pathlib import Path

import pytest

from coterie.base import load_tokenizer
from coterie.comparison import is_table, load_table
from coterie.config import load_config
from coterie.federation import federation
from coterie.methods import Setting, available

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TABLES = [path for path in RECIPES if is_table(path)]
RUNS = [path for path in RECIPES if path not in TABLES]
TEXTS = [path for path in RUNS if path.stem != "instructions"]
SMALL = [path for path in TABLES if path.parent.name == "small"]
DATA = ROOT.parent / "shared" / "data"
at_hand = pytest.mark.skipif(not DATA.is_dir(), reason="the experiments' data sets are not at hand")


def name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("recipe", RUNS, ids=name)
def test_a_recipe_is_a_run(recipe) -> None:
    config = load_config(recipe)
    config.method.check(Setting(tuple(client.name for client in config.clients), public=False))


@pytest.mark.parametrize("recipe", TABLES, ids=name)
def test_a_recipe_is_a_table_whose_rows_are_known_and_can_run(recipe) -> None:
    spec, columns = load_table(recipe)
    assert len(columns) == len(spec.columns)
    for column in columns:
        clients = [client.name for client in column.run.clients]
        if column.run.divide is not None:
            clients = list(column.run.divide.mixtures or clients)
        assert list(column.cells) == [row.label for row in spec.rows]
        for cell in column.cells.values():
            assert cell.method.name in available()
            if clients:
                public = cell.data.public is not None
                cell.method.check(Setting(tuple(clients), public))


@pytest.mark.parametrize(
    ("table", "rows"),
    [("table1", 9), ("table2", 5), ("table4", 15), ("table6", 9)],
)
def test_tables_have_all_rows_of_the_paper(table, rows) -> None:
    spec, _ = load_table(ROOT / "recipes" / "comigs" / f"{table}.yaml")
    assert len(spec.rows) == rows


def test_active_and_full_ranks_match_the_experts_of_comigs() -> None:
    """An expert has rank 8; a token uses two (active), a client holds X + 1 (full)."""
    for folder in ("comigs/table2", "small/comigs-table2"):
        _, columns = load_table(ROOT / "recipes" / f"{folder}.yaml")
        for column in columns:
            methods = {row: cell.method.model_dump() for row, cell in column.cells.items()}
            held = {c: 1 + n for c, n in methods["CoMiGS-1GXS"]["specialists"].items()}
            assert "".join(map(str, held.values())) == column.spec.name.split()[-1]
            for method in ("HetLoRA", "FlexLoRA"):
                assert methods[f"{method} active"]["rank"] == 2 * 8
                assert methods[f"{method} full"]["rank"] == {c: 8 * n for c, n in held.items()}


def test_a_small_tables_cells_are_the_runs_of_the_run_files() -> None:
    _, columns = load_table(SMALL[0].parent / "comigs-table4.yaml")
    files = ("multilingual-wiki", "domains", "ag-news")
    for column, file in zip(columns, files, strict=True):
        config = load_config(SMALL[0].parent / f"{file}.yaml")
        for method in ("pretrained", "local", "fedavg", "centralized", "comigs-1g1s", "comigs-2s"):
            assert column.cells[method].digest() == config.with_method(method).digest()


@at_hand
@pytest.mark.parametrize("recipe", TEXTS, ids=name)
def test_a_recipe_finds_its_texts(recipe) -> None:
    config = load_config(recipe, [f"data_root={DATA}"])
    participants = federation(config, load_tokenizer(config.base))
    assert len(participants) == 4
    for p in participants:
        assert len(p.data.train.ids) == 40_000
        assert len(p.data.validation.ids) > 12_000
        assert len(p.data.test.ids) > 20_000
        assert 1.5 < p.data.test.bytes / len(p.data.test.ids) < 5


@at_hand
def test_the_small_mixtures_find_their_texts() -> None:
    _, columns = load_table(SMALL[0].parent / "pcl-table4.yaml", [f"data_root={DATA}"])
    for column in columns:
        participants = federation(column.run, load_tokenizer(column.run.base))
        assert len(participants) == 4
        for p in participants:
            assert len(p.data.train.ids) == 40_000
            assert len(p.data.validation.ids) > 12_000
            assert p.public is not None
