"""How likely answers are, and the other answers that samples have to choose from."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.chat import parts_of
from coterie.data.examples import Examples, Sample, joined, samples_of
from coterie.data.items import Instruction
from coterie.data.kinds.preferences import Pairs
from coterie.data.parts import PartEncoder
from coterie.data.tokens import bare_encoder
from coterie.evaluation.perplexity import WORST
from coterie.losses.tokens import token_losses


def finite(nats: Tensor, tokens: Tensor) -> Tensor:
    """Return losses in which those that are not finite, after divergence, are `WORST` per token.

    Results are JSON, which has neither NaN nor infinity.

    Args:
        nats: The loss of each text or answer, (n,).
        tokens: How many tokens each has, (n,).
    """
    return torch.where(nats.isfinite(), nats, WORST * tokens)


@torch.no_grad()
def answer_losses(base: Base, model: PreTrainedModel, samples: Examples, batch: int) -> Tensor:
    """Negative log-likelihood of each one's answers given what comes before them, with what ends
    them: (n,) float64.

    In nats, summed over the answer's tokens. `batch` samples of similar lengths at once.
    """
    nats = torch.zeros(len(samples), dtype=torch.float64)
    with autocast(base.precision, base.device.type):
        for chosen in samples.starts.diff().argsort(stable=True).split(batch):
            losses = token_losses(model, *samples.batch(chosen).to(base.device))
            nats[chosen] = losses.sum(1, dtype=torch.float64).cpu()
    return finite(nats, samples.lengths)


def pair_logprobs(base: Base, model: PreTrainedModel, pairs: Pairs, batch: int) -> Tensor:
    """The log-likelihood of each pair's chosen and rejected answer, ends included: (n, 2) float64.

    In nats. `batch` pairs of similar lengths at once.
    """
    return -answer_losses(base, model, pairs.both, 2 * batch).view(-1, 2)


def with_choices(base: Base, samples: Examples, window: int) -> tuple[Examples, Tensor]:
    """The samples, and after them each again with every other of its choices as the answer.

    Second, the samples that the added rows are of: (added,) int64. A row is cut after window + 1
    tokens, which leaves something of any choice.
    """
    owners: list[int] = []
    texts: list[Sequence[str]] = []
    for number, item in enumerate(samples.items):
        others = [choice for choice in dict.fromkeys(item.choices) if choice != item.answer]
        owners += [number] * len(others)
        if isinstance(item, Instruction):
            texts += [replace(item, answer=choice).parts for choice in others]
        elif others:
            assert samples.template is not None, "as all conversations"
            *before, _ = parts_of(item, samples.template)
            lead, end = samples.template.around
            texts += [[*before, f"{lead}{choice}{end}"] for choice in others]
    if not texts:
        return samples, torch.zeros(0, dtype=torch.int64)
    encoder, eos = bare_encoder(base.tokenizer)
    rows: list[Sample] = []
    items = [samples.items[owner] for owner in owners]
    for item, parts in zip(items, PartEncoder(encoder).batch(texts), strict=True):
        *prompt, answer = (part.ids for part in parts)
        before = [id for ids in prompt for id in ids]
        if isinstance(item, Instruction):
            before, answer = [base.context_token, *before], [*answer, eos]
        before = before or [base.context_token]
        answer = answer[: window + 1 - len(before)]
        rows.append(Sample([(before, False), (answer, True)], item))
    return joined([samples, samples_of(rows)]), torch.tensor(owners)
