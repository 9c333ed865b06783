"""What a client's pairs are compared with: their log-likelihoods under the reference of DPO.

They are computed once, where a client's part begins, so that no second model is in memory while
anything is learnt, and every engine has the same.
"""

from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.devices import available
from coterie.bases.precision import Precision
from coterie.config.run import RunConfig
from coterie.data.kinds.preferences import Pairs
from coterie.data.split import Split
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.evaluation.answers import answer_losses
from coterie.federation.participants import Participant
from coterie.inference.finished import model_of, recorded
from coterie.losses.preferences import Reference
from coterie.methods.pretrained import bare
from coterie.runs import RunFolder
from coterie.training.spec import DPOSpec

ROUNDING: dict[Precision, float] = {"fp32": 4e-6, "bf16": 0.024}
"""How far rounding may move a token's log-likelihood, relative to the log-likelihood: about 32
and 3 times the machine epsilon. Untrained adapters on the bases that come with the package stay
below 0.3 and 0.6 of the bound that follows."""


def with_reference(config: RunConfig, base: Base, one: Participant) -> Participant:
    """A participant whose pairs know their reference; one without pairs as it is.

    Raises CoterieError if the reference is no run of this client's on the same base.
    """
    train = one.data.train
    if not train.needs_reference:
        return one
    dpo = config.training.dpo or DPOSpec()
    model = bare(base) if dpo.reference == "base" else _earlier(config, dpo.reference, one.name)
    found: dict[int, Split] = {}  # a test may be a split

    def reference(pairs: Pairs) -> Reference:
        batch = 2 * config.evaluation.batch
        logprobs = -answer_losses(base, model, pairs.rows, batch).view(-1, 2)
        lengths = pairs.rows.lengths.view(-1, 2)
        return reference_of(logprobs, lengths, base.precision, dpo)

    def known(split: Split) -> Split:
        if id(split) not in found:
            found[id(split)] = split.referenced(reference)
        return found[id(split)]

    data = ClientData(**{name: known(split) for name, split in vars(one.data).items()})
    return replace(one, data=data, tests={name: known(text) for name, text in one.tests.items()})


def reference_digest(config: RunConfig) -> str | None:
    """A hash of the earlier run that is the reference, to notice that it changes; None: the base.

    Raises CoterieError if there is no such run.
    """
    dpo = config.training.dpo
    if dpo is None or dpo.reference == "base":
        return None
    return _run_folder(config, dpo.reference).digest()


def _run_folder(config: RunConfig, path: str) -> RunFolder:
    folder = RunFolder(config.root / path)
    if not folder.is_run or not folder.rounds():
        raise CoterieError(
            f"training.dpo.reference: {folder.path} is not the folder of a run with a finished "
            "round; correct the path, or give base."
        )
    return folder


def _earlier(config: RunConfig, path: str, client: str) -> PreTrainedModel:
    """A client's model of an earlier run."""
    folder = _run_folder(config, path)
    then = recorded(folder)
    mine, theirs = config.base_of(client), then.base_of(client)
    if mine != theirs:
        raise CoterieError(
            f"training.dpo.reference: the model of {client!r} in {folder.path} is of the base "
            f"{theirs}, but this run's is {mine}; the reference must have the same base."
        )
    training = then.training.model_copy(update={"precision": config.training.precision})
    update = {"training": training, "device": available(config.device)}
    return model_of(folder, then.model_copy(update=update), client, merge=False)


def reference_of(
    logprobs: Tensor, lengths: Tensor, precision: Precision, dpo: DPOSpec
) -> Reference:
    """Return the reference of pairs from its log-likelihoods and the answers' tokens, both (n, 2).

    The rounding errors of an answer's tokens add up as the steps of a random walk do.
    """
    rounding = dpo.beta * ROUNDING[precision] * (logprobs.square() / lengths).sum(1).sqrt()
    return Reference(logprobs, dpo.beta, dpo.label_smoothing, rounding)
