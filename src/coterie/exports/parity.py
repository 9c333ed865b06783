"""The comparison of an exported model with the trained model, in another process."""

from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.bases import context_token
from coterie.errors import CoterieError
from coterie.evaluation.generation import context_length
from coterie.exports.format import Format, run_python
from coterie.exports.source import Source

TOKENS = 64
"""The number of tokens whose logits are compared."""
TEXT = (
    "In the spring of that year the railway came to the town, and with it many people who had "
    "never seen the sea. They built houses, opened shops and wrote letters home about the food, "
    "the long winters and the ships that they watched from the harbour every evening."
)
"""The text of the comparison. Random tokens would be a worse choice: on rare tokens, rounding in
float32 can change logits several hundred times as much as on ordinary text."""
PROGRAM = """
import sys
{block}
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads({threads})
{usage}
if {floats}:
    model.float()
with torch.no_grad():
    logits = model.eval()(load_file(sys.argv[1])["ids"]).logits
save_file({{"logits": logits.float().contiguous()}}, sys.argv[2])
"""


@dataclass(frozen=True)
class Parity:
    """The largest difference between two models' logits."""

    difference: float
    largest: float
    """The largest absolute logit of the trained model."""
    tokens: int
    tool: str
    """The tool that loaded the exported model."""


@torch.no_grad()
def reference(source: Source) -> tuple[Tensor, Tensor]:
    """Return the token ids of the comparison (1, n), and the trained model's logits for them."""
    model = source.attach()
    count = min(TOKENS, context_length(model) or TOKENS)
    tokens: list[int] = source.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[context_token(source.tokenizer), *islice(cycle(tokens), count - 1)]])
    return ids, model(ids).logits.float()


def measure(
    format: Format, source: Source, folder: Path, ids: Tensor, logits: Tensor
) -> Parity | None:
    """Compare the model in an exported folder with the trained model.

    The exported model is loaded in another process by the code that the model card shows. Unless
    the format needs Coterie, this process cannot import it.

    Args:
        format: The format of the folder.
        source: The exported model.
        folder: The folder.
        ids: The token ids from `reference`.
        logits: The logits from `reference`.

    Returns:
        The comparison, or None if no installed tool can load the folder.

    Raises:
        CoterieError: The exported model cannot be loaded, or its outputs have another shape.
    """
    if format.outputs is not None:
        outputs = format.outputs(folder, ids[0].tolist())
        return None if outputs is None else compared(outputs.logits[None], logits, outputs.tool)
    program = PROGRAM.format(
        block="sys.modules['coterie'] = None" if format.alone else "",
        threads=torch.get_num_threads(),
        usage=format.usage(source, str(folder), source.place),
        floats=not source.spec.quantised,
    )
    with TemporaryDirectory() as temporary:
        files = [Path(temporary) / name for name in ("ids", "logits")]
        save_file({"ids": ids}, files[0])
        succeeded, last = run_python(["-c", program, *files], temporary)
        if not succeeded:
            raise CoterieError(f"The exported model could not be loaded again: {last}")
        exported = load_file(files[1])["logits"]
    return compared(exported, logits, format.library)


def compared(exported: Tensor, logits: Tensor, tool: str) -> Parity:
    """Compare logits of an exported and of the trained model.

    Args:
        exported: The exported model's logits, shaped (1, tokens, vocabulary).
        logits: The trained model's logits, with the same shape.
        tool: The tool that loaded the exported model.

    Raises:
        CoterieError: The shapes differ.
    """
    if exported.shape != logits.shape:
        raise CoterieError(
            f"The exported model's logits have the shape {tuple(exported.shape)}, but the trained "
            f"model's have {tuple(logits.shape)}; try --format bundle."
        )
    difference = (exported - logits).abs().max().item()
    return Parity(difference, logits.abs().max().item(), logits.shape[1], tool)
