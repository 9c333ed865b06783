"""GGUF files that are not whole, or that transformers reads otherwise than llama.cpp: all refused.

transformers draws missing weights at random, and ignores keys and tensors that it does not know.
"""

import re
from typing import Any

import pytest
import torch
import transformers
from test_gguf import LAYERS, WIDTH, cache, model, write

from coterie.bases import gguf as ours
from coterie.bases import load_base, load_skeleton, load_tokenizer
from coterie.errors import CoterieError

__all__ = ["cache", "model"]
BIAS, MATRIX = torch.zeros(WIDTH), torch.zeros(WIDTH, WIDTH)
LAST_LAYER = [f"blk.{LAYERS - 1}.{name}.weight" for name in ("attn_norm", "attn_q", "ffn_up")]
Case = tuple[dict[str, Any], str]
NOT_WHOLE: dict[str, Case] = {
    "a matrix": ({"blk.1.attn_k.weight": None}, r"lacks blk\.1\.attn_k\.weight; download"),
    "a norm": ({"blk.0.ffn_norm.weight": None}, r"lacks blk\.0\.ffn_norm\.weight"),
    "the last norm": ({"output_norm.weight": None}, r"lacks output_norm\.weight"),
    "the embedding": ({"token_embd.weight": None}, r"lacks token_embd\.weight"),
    "several": (dict.fromkeys(LAST_LAYER), r"it is not whole: it lacks blk\.1\.attn_q"),
    "a later layer": ({"llama.block_count": 3}, r"lacks blk\.2\..* and 6 more tensors"),
    "fewer layers": ({"llama.block_count": 1}, r"contains blk\.1\..*, which transformers"),
    "a size": ({"llama.feed_forward_length": 32}, r"ffn_\w+\.weight has 6,144 numbers, but"),
    "a part": ({"split.count": 3, "split.no": 1}, "part 2 of 3 of a split file; merge its parts"),
    "an adapter": ({"general.type": "adapter"}, r"no model \(general\.type is 'adapter'\)"),
    "no layers": ({"llama.block_count": None}, r"lacks llama\.block_count"),
    "no heads": ({"llama.attention.head_count": None}, r"lacks llama\.attention\.head_count"),
    "no context": ({"llama.context_length": None}, r"lacks llama\.context_length"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, r"_rms_epsilon\."),
    "no architecture": ({"general.architecture": None}, r"lacks general\.architecture"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, r"lacks tokenizer\.ggml\.tokens\."),
    "no merges": ({"tokenizer.ggml.merges": None}, r"lacks tokenizer\.ggml\.merges\."),
    "no scores": ({"tokenizer.ggml.model": "llama"}, r"lacks tokenizer\.ggml\.scores\."),
    "a token": ({"tokenizer.ggml.bos_token_id": 5000}, "5,000, but lists 1,024 tokens"),
}
RULE = "tokenizer.ggml.pre"
NOT_WHOLE |= {
    "a new rule": (
        {RULE: "newest"},
        r"sets tokenizer\.ggml\.pre to 'newest', a rule that is not supported; convert",
    ),
    "a default rule": ({RULE: "default"}, r"sets tokenizer\.ggml\.pre to 'default'"),
    "no rule": (
        {RULE: None},
        r"lacks tokenizer\.ggml\.pre, the rule by which its tokenizer splits text",
    ),
    "bert": ({"tokenizer.ggml.model": "bert"}, r"its tokenizer 'bert' \(tokenizer\.ggml\.model\)"),
}
UNUSED: dict[str, Case] = {
    "linear RoPE": ({"llama.rope.scaling.type": "linear"}, r"rope\.scaling\.type is 'linear'"),
    "YaRN": ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type is 'yarn'"),
    "a factor": ({"llama.rope.scaling.factor": 8.0}, r"rope\.scaling\.factor is 8\.0"),
    "RoPE of Llama 3": ({"rope_freqs.weight": torch.ones(8)}, r"contains rope_freqs\.weight"),
    "fewer rotated": ({"llama.rope.dimension_count": 8}, "has 4,096 numbers"),
    "a window": ({"llama.attention.sliding_window": 32}, r"sliding_window is 32, but"),
    "other heads": ({"llama.attention.key_length": 32}, r"key_length is 32, but"),
    "experts": ({"llama.expert_count": 8}, r"expert_count is 8, but transformers would use 0"),
    "a scale": ({"llama.logit_scale": 0.5}, r"logit_scale is 0\.5, but transformers would use 1"),
    "an unknown key": ({"llama.new_kind": "x"}, r"sets llama\.new_kind to 'x', which Coterie"),
    "a picture": ({"clip.vision.block_count": 2}, r"sets clip\.vision\.block_count to 2"),
    "separators": ({"tokenizer.ggml.add_sep_token": True}, r"add_sep_token to True, which"),
    "a bias": ({"blk.0.attn_q.bias": BIAS}, r"contains blk\.0\.attn_q\.bias, which transformers"),
    "a bias of a norm": ({"output_norm.bias": BIAS}, r"contains output_norm\.bias"),
    "another matrix": ({"blk.0.attn_gate.weight": MATRIX}, r"contains blk\.0\.attn_gate"),
}
HARMLESS: dict[str, dict[str, Any]] = {
    "repeated settings": {
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.scaling.type": "none",
        "llama.attention.sliding_window": 0,
    },
    "no experts": {"llama.expert_count": 0, "llama.expert_used_count": 0},
    "descriptions": {"general.name": "small", "general.size_label": "1M", "split.count": 1},
    "other tokens": {"tokenizer.ggml.eot_token_id": 3, "tokenizer.chat_template.tools": "{}"},
    "frequencies": {"blk.0.attn_rot_embd.weight": torch.ones(8)},
    "the default of RoPE": {"llama.rope.freq_base": None},
}


@pytest.mark.parametrize("case", [*NOT_WHOLE, *UNUSED])
def test_a_file_is_used_whole_or_refused(case, model, cache, tmp_path) -> None:
    changes, message = (NOT_WHOLE | UNUSED)[case]
    file = write(tmp_path / "small.gguf", model, changes=changes)
    with pytest.raises(CoterieError, match=f"could not be read: .*{message}") as caught:
        load_base(str(file), None, 64)
    assert not re.search("report above|above report|'scores'", str(caught.value))
    assert not list(cache.iterdir())


def test_what_changes_nothing_is_accepted(model, tmp_path) -> None:
    expected = load_base(str(write(tmp_path / "plain.gguf", model)), None, 64)
    for case, changes in HARMLESS.items():
        base = load_base(str(write(tmp_path / "a.gguf", model, changes=changes)), None, 64)
        assert base.digest == expected.digest, case
        assert base.model.config.rope_parameters == expected.model.config.rope_parameters


OPTIONS = [
    ({"architecture": "unheard-of"}, "unheard-of"),
    ({"architecture": "qwen2"}, r"lacks blk\.0\.attn_q\.bias"),
    ({"tokenizer": False}, r"lacks tokenizer\.ggml\.model"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_another_architecture_or_no_tokenizer_is_refused(options, message, model, tmp_path) -> None:
    file = write(tmp_path / "small.gguf", model, **options)
    with pytest.raises(CoterieError, match=f"could not be read: .*{message}"):
        load_tokenizer(str(file))


def test_a_folder_of_parts_says_how_to_merge_them(tmp_path) -> None:
    names = [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CoterieError, match=rf"\({', '.join(names)}\); merge its parts with"):
        load_tokenizer(str(tmp_path))


def test_a_file_is_converted_again_by_another_reader(model, cache, tmp_path, monkeypatch) -> None:
    file = write(tmp_path / "small.gguf", model)
    load_skeleton(str(file))
    for owner, name, value in (
        (transformers, "__version__", "9.9"),
        (ours, "version", lambda _: "8.8"),
        (ours, "FORMAT", 99),
    ):
        before = set(cache.iterdir())
        monkeypatch.setattr(owner, name, value)
        load_skeleton(str(file))
        assert len(set(cache.iterdir()) - before) == 1
