"""Every recipe is a valid run or table, and finds its texts where the data sets are at hand."""

from pathlib import Path

import pytest

from coterie.bases import load_skeleton, load_tokenizer
from coterie.bases.sites import QUERY_VALUE
from coterie.config.plugins import load_plugin
from coterie.config.read import load_config
from coterie.data.examples import Examples
from coterie.data.files import Record
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import instructions
from coterie.data.kinds.preferences import Pairs
from coterie.data.templates import holds
from coterie.federation.checks import check
from coterie.federation.participants import gathered
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import RunFacts
from coterie.methods.registry import available
from reproduce.table_file import is_table
from reproduce.tables import load_table

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
TABLES = [path for path in RECIPES if is_table(path)]
RUNS = [path for path in RECIPES if path not in TABLES]
TEXTS = [path for path in RUNS if path.stem != "instructions"]
SMALL = [path for path in TABLES if path.parent.name == "small"]
GRIDS = ("grid", "grid-aside", "scenarios", "auto-settings")
WHOLE = ("opposite", "rivals", *GRIDS)
"""Tables without a quarter regime, because they have little text or few pairs."""
DATA = ROOT.parents[1] / "shared" / "data"
at_hand = pytest.mark.skipif(not DATA.is_dir(), reason="the experiments' data sets are not at hand")


@pytest.fixture(autouse=True)
def _variants() -> None:
    """The recipe of auto's parts needs a plugin."""
    load_plugin(ROOT / "reproduce" / "ablations.py")


def name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("recipe", RUNS, ids=name)
def test_a_recipe_is_a_run(recipe) -> None:
    config = load_config(recipe)
    config.method.check(RunFacts(tuple(client.name for client in config.clients), public=False))


@pytest.mark.parametrize("recipe", TABLES, ids=name)
def test_a_recipe_is_a_table_whose_rows_are_known_and_can_run(recipe) -> None:
    spec, columns = load_table(recipe)
    assert len(columns) == len(spec.columns)
    for column in columns:
        clients = [client.name for client in column.run.clients]
        divide = column.run.divide
        if divide is not None:
            numbered = [f"client-{number + 1}" for number in range(divide.clients or 0)]
            clients = list(divide.mixtures or numbered)
        assert list(column.cells) == [row.label for row in spec.rows]
        for cell in column.cells.values():
            assert cell.method.name in available()
            if clients:
                public = cell.data.public is not None or (
                    divide is not None and bool(divide.public)
                )
                check(cell, clients, public)


@pytest.mark.parametrize("recipe", SMALL, ids=name)
def test_a_quarter_is_of_what_clients_train_on_and_of_nothing_else(recipe) -> None:
    spec, columns = load_table(recipe)
    if spec.shows is not None or recipe.stem in WHOLE or "-figures" in recipe.stem:
        return  # these figures are of unequal amounts of text
    _, quarters = load_table(recipe, regime="quarter")
    for column, quarter in zip(columns, quarters, strict=True):
        for row, cell in column.cells.items():
            limits = cell.data.limits
            assert limits is not None
            assert limits.train is not None
            less = limits.model_copy(update={"train": limits.train // 4})
            data = cell.data.model_copy(update={"limits": less})
            assert quarter.cells[row] == cell.model_copy(update={"data": data})


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_a_recipe_ends_with_the_models_that_the_papers_end_with(recipe) -> None:
    if recipe.stem in GRIDS:
        return  # the grid keeps the best models, as users do
    if recipe in RUNS:
        assert load_config(recipe).evaluation.keep == "last"
        return
    for column in load_table(recipe)[1]:
        assert {cell.evaluation.keep for cell in (column.run, *column.cells.values())} == {"last"}


@pytest.mark.parametrize(
    ("table", "rows"),
    [("table1", 9), ("table2", 5), ("table4", 15), ("table6", 7)],
)
def test_tables_have_all_rows_of_the_paper(table, rows) -> None:
    spec, _ = load_table(ROOT / "recipes" / "comigs" / f"{table}.yaml")
    assert len([row for row in spec.rows if not row.name.endswith(" released")]) == rows


def test_active_and_full_ranks_match_the_experts_of_comigs() -> None:
    # An expert has rank 8; a token uses two (active), a client holds X + 1 (full).
    for folder in ("comigs/table2", "small/comigs-table2"):
        _, columns = load_table(ROOT / "recipes" / f"{folder}.yaml")
        for column in columns:
            methods = {row: cell.method.model_dump() for row, cell in column.cells.items()}
            held = {c: 1 + n for c, n in methods["CoMiGS-1GXS"]["mlp"]["specialists"].items()}
            assert "".join(map(str, held.values())) == column.spec.name.split()[-1]
            for method in ("HetLoRA", "FlexLoRA"):
                assert methods[f"{method} active"]["mlp"]["rank"] == 2 * 8
                assert methods[f"{method} full"]["mlp"]["rank"] == {
                    c: 8 * n for c, n in held.items()
                }


def test_methods_of_other_papers_have_adapters_of_one_size() -> None:
    for column in load_table(SMALL[0].parent / "rivals.yaml")[1]:
        for cell in column.cells.values():
            settings = cell.method.model_dump()
            assert settings["attention"] == {"rank": 8, "targets": QUERY_VALUE}
            assert settings["lora"].items() >= {"alpha": 16, "dropout": 0}.items()
            assert settings["lora"].get("scale", "rank") == "rank"
            assert settings.get("mlp") is None


PAIRS_PER_LAYER = {"feddpa": 2, "fedalt": 0.5}
"""The number of pairs that a client trains for each pair of its adapter."""


def test_rows_of_the_scenarios_train_about_equally_many_parameters() -> None:
    _, columns = load_table(SMALL[0].parent / "scenarios.yaml")
    base, counts = load_skeleton("tiny-gpt2"), {}
    for row, cell in columns[0].cells.items():
        if isinstance(method := cell.method, AdapterMethod):
            parameters = method.adapter(base, 0, "de-1").parameters().values()
            pairs = sum(p.tensor.numel() for p in parameters if p.role != "router")
            counts[row] = pairs * PAIRS_PER_LAYER.get(row, 1)
    assert len(counts) == len(columns[0].cells) - len(["pretrained", "fedlease"])
    assert all(0.92 < count / counts["fedavg"] < 1.01 for count in counts.values()), counts


def test_a_small_tables_cells_are_the_runs_of_the_run_files() -> None:
    _, columns = load_table(SMALL[0].parent / "comigs-table4.yaml")
    files = ("multilingual-wiki", "domains", "ag-news")
    for column, file in zip(columns, files, strict=True):
        config = load_config(SMALL[0].parent / f"{file}.yaml")
        for method in ("pretrained", "local", "fedavg", "centralized", "comigs-1g1s", "comigs-2s"):
            assert column.cells[method].digest() == config.with_method(method).digest()


@at_hand
@pytest.mark.slow
@pytest.mark.parametrize("recipe", TEXTS, ids=name)
def test_a_recipe_finds_its_texts(recipe) -> None:
    config = load_config(recipe, [f"data_root={DATA}"])
    participants = gathered(config, load_tokenizer(config.base)).clients
    assert len(participants) == 4
    for p in participants:
        assert len(p.data.train.ids) == 40_000
        assert len(p.data.validation.ids) > 12_000
        assert len(p.data.test.ids) > 20_000
        assert not isinstance(p.data.test, Pairs)
        assert 1.5 < p.data.test.bytes / len(p.data.test.ids) < 5


@at_hand
@pytest.mark.slow
def test_the_small_mixtures_find_their_texts() -> None:
    _, columns = load_table(SMALL[0].parent / "pcl-table4.yaml", [f"data_root={DATA}"])
    for column in columns:
        participants = gathered(column.run, load_tokenizer(column.run.base)).clients
        clients = {"AG": 4, "Multi-Wiki": 9, "Codes-Wiki": 8}[column.spec.name.split()[0]]
        assert len(participants) == clients
        for p in participants:
            assert len(p.data.train.ids) == 40_000
            assert len(p.data.validation.ids) > 12_000
            assert p.public is not None


LANGUAGES = ("Multilingual", "Multi-Wiki", "Figure")


@pytest.mark.parametrize("table", ["table1", "table2", "table4", "table5", "table6", "figures4-6"])
def test_french_and_italian_users_have_more_text_than_german_and_dutch(table) -> None:
    # Section 4.3.2 of CoMiGS; the amounts are in its table 3.
    _, columns = load_table(ROOT / "recipes" / "comigs" / f"{table}.yaml")
    specs = [column.run.data for column in columns if column.spec.name.startswith(LANGUAGES)]
    assert specs
    for data in specs:
        train = {client: limits.train for client, limits in data.limits_of.items()}
        assert sorted(filter(None, train.values())) == [407_498, 451_584, 556_796, 557_662]
        assert min(train["fr"], train["it"]) > max(train["de"], train["nl"])  # type: ignore


def test_pcls_clients_of_ag_news_train_on_all_of_its_training_split() -> None:
    _, columns = load_table(ROOT / "recipes" / "pcl" / "table4.yaml")
    for column in columns[:2]:
        divide = column.run.divide
        assert divide is not None
        assert (divide.validation, divide.test) == ("test", "test")


@pytest.mark.parametrize("file", ["heterogeneous", "homogeneous", "one-to-one"])
def test_fedmkts_epoch_takes_every_sample_once(file) -> None:
    _, columns = load_table(ROOT / "recipes" / "fedmkt" / f"{file}.yaml")
    assert {column.run.training.sampling for column in columns} == {"epochs"}


TASKS = {
    "RTE": (
        {"premise": "Rain fell.", "hypothesis": "It was dry.", "label": "not_entailment"},
        'Rain fell.\nQuestion: does this mean that "It was dry."?\nAnswer:',
        "no",
    ),
    "WiC": (
        {"word": "bank", "sentence1": "A river bank.", "sentence2": "A bank.", "label": "False"},
        "1. A river bank.\n2. A bank.\n"
        'Question: does "bank" mean the same in both sentences?\nAnswer:',
        "no",
    ),
    "BoolQ": (
        {"passage": "Tin is a metal.", "question": "is tin a metal", "label": "True"},
        "Tin is a metal.\nQuestion: is tin a metal?\nAnswer:",
        "yes",
    ),
    "CommonsenseQA": (
        {
            "question": "Where is milk kept?",
            "choices": {"label": ["A", "B", "C"], "text": ["oven", "fridge", "roof"]},
            "answerKey": "B",
        },
        "Question: Where is milk kept?\nAnswer:",
        "fridge",
    ),
    "ARC-E": (  # in some records of ARC options have numbers
        {
            "question": "Which is a gas?",
            "choices": {"label": ["1", "2"], "text": ["iron", "neon"]},
            "answerKey": "2",
        },
        "Question: Which is a gas?\nAnswer:",
        "neon",
    ),
    "S-NI": (
        {"definition": "Name the opposite.", "inputs": "hot", "targets": "cold"},
        "Name the opposite.\nhot\nAnswer:",
        "cold",
    ),
    "DialogSum": (
        {"dialogue": "#Person1#: Tea?\n#Person2#: Yes.", "summary": "They have tea."},
        "#Person1#: Tea?\n#Person2#: Yes.\nQuestion: what is this conversation about?\nAnswer:",
        "They have tea.",
    ),
}
"""A record from the hub, its prompt and its answer, for each of FedMKT's tasks."""
TASKS["ARC-C"] = TASKS["ARC-E"]


@pytest.mark.parametrize("file", ["heterogeneous", "homogeneous", "one-to-one"])
def test_prompts_of_fedmkts_tasks(file) -> None:
    _, columns = load_table(ROOT / "recipes" / "fedmkt" / f"{file}.yaml")
    assert {column.spec.name.split()[-1] for column in columns} == {*TASKS}
    for column in columns:
        fields, prompt, answer = TASKS[column.spec.name.split()[-1]]
        assert column.run.data.instructions is not None
        [item] = instructions([Record("a record", fields)], column.run.data.instructions)
        assert isinstance(item, Instruction)
        assert (item.prompt, item.answer) == (prompt, answer)
        written = column.run.evaluation.metric == "rouge_l"
        assert written != (len(item.choices) >= 2)
        if "choices" in fields:
            assert item.choices == tuple(fields["choices"]["text"])


@pytest.mark.parametrize("file", ["heterogeneous", "homogeneous", "one-to-one"])
def test_fedmkts_samples_of_s_ni_have_long_outputs(file) -> None:
    # Section "Datasets": an output length of 11 or more; no other task is filtered.
    _, columns = load_table(ROOT / "recipes" / "fedmkt" / f"{file}.yaml")
    for column in columns:
        assert column.run.divide is not None
        where = column.run.divide.where
        if not column.spec.name.endswith("S-NI"):
            assert where is None
            continue
        assert where is not None
        kept = [n for n in range(1, 20) if holds(where, Record("", {"targets": "word " * n}))]
        assert kept == list(range(11, 20))


@pytest.mark.parametrize("file", ["heterogeneous", "homogeneous", "one-to-one"])
def test_fedmkts_data_is_dealt_in_five_parts_and_learnt_as_published(file) -> None:
    # One part is public, and each client has one; a round of 4 samples a step is a pass over it.
    records = {"RTE": 2490, "WiC": 5428, "BoolQ": 9427, "CommonsenseQA": 9741, "ARC-E": 2251}
    records |= {"ARC-C": 1119, "DialogSum": 12460, "S-NI": 10_000}
    _, columns = load_table(ROOT / "recipes" / "fedmkt" / f"{file}.yaml")
    for column in columns:
        divide = column.run.divide
        assert divide is not None
        assert divide.public is True
        assert (divide.parts or divide.taken) == 5
        steps = records[column.spec.name.split()[-1]] / 5 / 4
        assert abs(column.run.training.steps - steps) < 1


@pytest.mark.parametrize(
    "file",
    [
        *(f"fedmkt/{name}" for name in ("heterogeneous", "homogeneous", "one-to-one")),
        *(f"small/fedmkt{name}" for name in ("", "-homogeneous", "-one-to-one", "-generation")),
    ],
)
def test_samples_that_nobody_teaches_are_learnt_as_fedmkt_published_it(file) -> None:
    # Such a sample is learnt from its label alone.
    _, columns = load_table(ROOT / "recipes" / f"{file}.yaml")
    for column in columns:
        for row in ("LLM2SLM", "FedMKT", *({"FedMKT-FedAvg"} & set(column.cells))):
            assert column.cells[row].method.model_dump()["own"] == "none"


def test_fedmkts_settings_differ_in_who_takes_part() -> None:
    # The bases and learning rates are the paper's; ARC-E has rates of its own.
    llama, opt = "princeton-nlp/Sheared-LLaMA-1.3B", "facebook/opt-1.3b"
    mixed = ["openai-community/gpt2-xl", opt, "bigscience/bloom-1b1", llama]
    settings = {
        "heterogeneous": {"": mixed},
        "homogeneous": {"S1": [llama] * 4, "S2": [opt] * 4},
        "one-to-one": {"LLaMA": [llama], "OPT": [opt]},
    }
    for file, bases in settings.items():
        _, columns = load_table(ROOT / "recipes" / "fedmkt" / f"{file}.yaml")
        for column in columns:
            *setting, task = column.spec.name.split()
            names = [f"client-{n + 1}" for n in range(len(bases["".join(setting)]))]
            base_of = {name: column.run.base_of(name).name for name in [*names, "server"]}
            rates = {base: column.run.training_of(name) for name, base in base_of.items()}
            large = 2e-5 if task == "ARC-E" else 3e-5
            expected = dict.fromkeys(mixed, 3e-5) | {mixed[0]: 3e-4, llama: large}
            expected["meta-llama/Llama-2-7b-hf"] = large
            assert [base_of[name] for name in names] == bases["".join(setting)]
            assert {base: t.learning_rate for base, t in rates.items()} == {
                base: expected[base] for base in rates
            }


@at_hand
@pytest.mark.slow
def test_the_small_fedmkt_tables_find_their_samples() -> None:
    # One base and the two tasks with the longest prompts are enough.
    recipe = SMALL[0].parent / "fedmkt.yaml"
    longest = ["News topics", "RTE"]
    _, columns = load_table(recipe, [f"data_root={DATA}", "bases={}"], columns=longest)
    for column in columns:
        participants = gathered(column.run, load_tokenizer(column.run.base)).clients
        assert len(participants) == 4
        for p in participants:
            counts = []
            for split in (p.data.train, p.public, p.data.validation, p.data.test):
                assert isinstance(split, Examples)
                assert all(item.choices for item in split.items)
                counts.append(len(split))
            assert counts == [300, 300, 100, 300]
