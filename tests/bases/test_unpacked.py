"""Forward passes in which Transformers does not search for packed sequences."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from coterie.bases.unpacked import one_sequence_per_row

POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])
"""The positions of two sequences that share a row."""


def test_other_code_still_finds_packed_sequences() -> None:
    with one_sequence_per_row():
        assert masking_utils.find_packed_sequence_indices(POSITIONS) is None
    assert masking_utils.find_packed_sequence_indices(POSITIONS).tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.slow
def test_a_compiled_decoder_has_no_graph_breaks() -> None:
    sizes: Any = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    counters.clear()
    model.model.compile(backend="eager")
    with one_sequence_per_row():
        model.model(input_ids=torch.zeros(2, 8, dtype=torch.long), use_cache=False)
    assert not counters["graph_break"]
