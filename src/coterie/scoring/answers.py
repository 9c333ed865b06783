"""How likely answers are, and which of several is likeliest; how near written ones come."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from unicodedata import normalize

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.chat import Conversation
from coterie.data.examples import Examples, Instruction, in_parts, joined, split
from coterie.data.pairs import Pairs
from coterie.data.tokens import bare_encoder
from coterie.errors import CoterieError
from coterie.training.loss import token_losses

EQUAL = 1e-6
"""Relative difference of two losses per token up to which they are equal: 8 times the machine
epsilon of float32, in which they are computed."""


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
    return nats


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
    encoder, eos = bare_encoder(base.tokenizer)
    ids_of = in_parts(encoder)
    encoded: dict[tuple[str, str], Tensor] = {}
    items: list[Instruction | Conversation] = []
    owners, rows, answers = [], [], []
    places = zip(samples.starts[:-1].tolist(), samples.answers.tolist(), strict=True)
    for number, (item, (start, answer)) in enumerate(zip(samples.items, places, strict=True)):
        opens = encoder.id_to_token(int(samples.ids[answer - 1])) or ""  # such as <|assistant|>
        for choice in dict.fromkeys(item.choices):
            if choice == item.answer:
                continue
            items.append(item)
            if isinstance(item, Instruction):
                before, text, last = "", split(replace(item, answer=choice))[1], [eos]
            else:
                assert samples.around is not None, "as all conversations"
                lead, end = samples.around
                before, text, last = opens, f"{lead}{choice}{end}", []
            if (before, text) not in encoded:
                ids = ids_of([before, text])[1] + last
                encoded[before, text] = torch.tensor(ids, dtype=torch.int32)
            owners.append(number)
            rows.append(torch.cat([samples.ids[start:answer], encoded[before, text]])[: window + 1])
            answers.append(answer - start)
    if not rows:
        return samples, torch.zeros(0, dtype=torch.int64)
    starts = torch.tensor([0, *accumulate(map(len, rows))])
    counted = torch.cat([torch.arange(len(r)) >= a for r, a in zip(rows, answers, strict=True)])
    places, none = starts[:-1] + torch.tensor(answers), torch.zeros(len(rows), dtype=torch.int64)
    added = Examples(torch.cat(rows), starts, places, counted, none, tuple(items))
    return joined([samples, added]), torch.tensor(owners)


def won(nats: Tensor, rows: Examples, owners: Tensor) -> list[float | None]:
    """Return, for each sample, 1 if its own answer is likelier per token than its other choices.

    Otherwise 0, or 1/k where its answer is among k equally likely choices, as the expected score of
    a draw among the k. Equal means equal within the rounding of float32.

    Args:
        nats: `answer_losses` of the rows that `with_choices` returned, (rows,).
        rows: those rows: the samples, then each again with every other choice.
        owners: the sample of each further row, (rows - samples,).

    Returns:
        For each sample, its score, or None if it has no choices.
    """
    count = len(rows) - len(owners)
    means = nats / rows.lengths
    best = means[:count].scatter_reduce(0, owners, means[count:], "amin")
    of = torch.cat([best, best[owners]])
    likeliest = (means <= of + EQUAL * of.abs()).double()
    ties = likeliest[:count].scatter_add(0, owners, likeliest[count:])
    shares = (likeliest[:count] / ties.clamp(min=1)).tolist()  # no tie among losses that are NaN
    return [
        share if item.choices else None for share, item in zip(shares, rows.items, strict=False)
    ]


def exact(answers: Sequence[str], written: Sequence[str]) -> list[float]:
    """Return 1 for each written answer that is the right one, else 0.

    Spaces around the texts do not count, nor does how Unicode composes an accented letter (NFC).
    """
    pairs = zip(answers, written, strict=True)
    return [
        float(normalize("NFC", right).strip() == normalize("NFC", text).strip())
        for right, text in pairs
    ]


def rouge_l(answers: Sequence[str], written: Sequence[str]) -> list[float]:
    """Return each written answer's F1 of Rouge-L: the longest common subsequence of words.

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), without stemming and with
    words in any script (`UnicodeTokenizer`).
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer

        from coterie.scoring.words import UnicodeTokenizer
    except ModuleNotFoundError as error:
        raise CoterieError(
            f"Rouge-L needs {error.name}; install it with pip install rouge-score."
        ) from None
    scorer = RougeScorer(["rougeL"], tokenizer=UnicodeTokenizer())
    pairs = zip(answers, written, strict=True)
    return [scorer.score(right, text)["rougeL"].fmeasure for right, text in pairs]
