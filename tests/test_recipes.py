"""Every recipe is a valid run, and finds its texts where the data sets are at hand."""

from pathlib import Path

import pytest

from coterie.base import load_tokenizer
from coterie.config import load_config
from coterie.federation import federation

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
DATA = ROOT.parent / "shared" / "data"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_run(recipe) -> None:
    config = load_config(recipe)
    config.method.check([client.name for client in config.clients])


@pytest.mark.skipif(not DATA.is_dir(), reason="the experiments' data sets are not at hand")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_finds_its_texts(recipe) -> None:
    config = load_config(recipe, [f"data_root={DATA}"])
    participants = federation(config, load_tokenizer(config.base))
    assert len(participants) == 4
    for p in participants:
        assert len(p.data.train.ids) == 40_000
        assert len(p.data.validation.ids) > 12_000
        assert len(p.data.test.ids) > 20_000
        assert 1.5 < p.data.test.bytes / len(p.data.test.ids) < 5
