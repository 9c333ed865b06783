"""What is said of a base that cannot be loaded."""

import json

import pytest

from coterie.bases import EMBEDDED, load_tokenizer
from coterie.errors import CoterieError


@pytest.mark.parametrize("damage", ["cut", "another model"])
def test_a_damaged_tokenizer_is_said_in_a_sentence(damage, tmp_path) -> None:
    words = json.loads((EMBEDDED / "tiny-gpt2" / "tokenizer.json").read_text(encoding="utf-8"))
    words["model"]["type"] = "Riddle"
    text = json.dumps(words)
    (tmp_path / "tokenizer.json").write_text(text[:1000] if damage == "cut" else text)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / "tiny-gpt2" / name).read_bytes())
    with pytest.raises(CoterieError, match="could not be loaded"):
        load_tokenizer(str(tmp_path))


def test_what_is_not_the_base_s_fault_is_not_blamed_on_it(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("coterie.bases.loading.AutoTokenizer.from_pretrained", full)
    with pytest.raises(MemoryError):
        load_tokenizer("tiny-gpt2")
