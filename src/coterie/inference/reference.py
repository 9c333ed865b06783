"""The log-likelihoods of a client's preference pairs under the reference model of DPO.

The log-likelihoods are computed once, before training, so that no second model is in memory during
training and all engines use equal values.
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
"""The assumed relative rounding error of a token's log-likelihood for each precision.

The values are about 32 machine epsilons of fp32 and 3 of bf16. With untrained adapters on the
built-in bases, measured errors are below 0.3 (fp32) and 0.6 (bf16) times the bound that
`reference_of` derives from these values.
"""


def with_reference(config: RunConfig, base: Base, participant: Participant) -> Participant:
    """Add the reference model's log-likelihoods to a participant's preference pairs.

    Args:
        config: The run's configuration.
        base: The participant's base.
        participant: The participant.

    Returns:
        A copy of the participant whose pairs have these log-likelihoods. If training does not need
        a reference model, the participant is returned unchanged.

    Raises:
        CoterieError: `training.dpo.reference` is not the folder of a run with a finished round. The
            error is also raised if that run has no such client, or if the client has a different
            base in that run.
    """
    if not participant.data.train.needs_reference:
        return participant
    dpo, name = config.training.dpo or DPOSpec(), participant.name
    model = bare(base) if dpo.reference == "base" else _earlier(config, dpo.reference, name)
    referenced: dict[int, Split] = {}
    """Splits with log-likelihoods, by the `id` of the original split.

    A split that is also a test set is computed only once.
    """

    def reference(pairs: Pairs) -> Reference:
        batch = 2 * config.evaluation.batch
        logprobs = -answer_losses(base, model, pairs.rows, batch).view(-1, 2)
        return reference_of(logprobs, pairs.rows.lengths.view(-1, 2), base.precision, dpo)

    def add_reference(split: Split) -> Split:
        if id(split) not in referenced:
            referenced[id(split)] = split.referenced(reference)
        return referenced[id(split)]

    data = {name: add_reference(split) for name, split in vars(participant.data).items()}
    tests = {name: add_reference(test) for name, test in participant.tests.items()}
    return replace(participant, data=ClientData(**data), tests=tests)


def reference_digest(config: RunConfig) -> str | None:
    """Hash the earlier run whose models are the reference models of DPO.

    The hash shows whether this earlier run has changed since training began.

    Args:
        config: The configuration of the run to train. Its key `training.dpo.reference` names the
            folder of the earlier run.

    Returns:
        The hash; None if the reference model is the untrained base, or if the configuration has no
        section `training.dpo`.

    Raises:
        CoterieError: `training.dpo.reference` is not the folder of a run with a finished round.
    """
    dpo = config.training.dpo
    if dpo is None or dpo.reference == "base":
        return None
    return _run_folder(config, dpo.reference).digest()


def _run_folder(config: RunConfig, path: str) -> RunFolder:
    folder = RunFolder(config.root / path)
    if not folder.is_run or not folder.turns():
        raise CoterieError(
            f"training.dpo.reference: {folder.path} is not the folder of a run with a finished "
            "round; correct the path, or set the reference to base."
        )
    return folder


def _earlier(config: RunConfig, path: str, client: str) -> PreTrainedModel:
    """Load a client's model from an earlier run."""
    folder = _run_folder(config, path)
    earlier = recorded(folder)
    base, earlier_base = config.base_of(client), earlier.base_of(client)
    if base != earlier_base:
        raise CoterieError(
            f"training.dpo.reference: the model of {client!r} in {folder.path} has the base "
            f"{earlier_base}, but this run uses {base}; choose a run with the same base."
        )
    training = earlier.training.model_copy(update={"precision": config.precision})
    update = {"training": training, "device": available(config.device)}
    return model_of(folder, earlier.model_copy(update=update), client, merge=False)


def reference_of(
    logprobs: Tensor, lengths: Tensor, precision: Precision, dpo: DPOSpec
) -> Reference:
    """Create the `Reference` that the DPO loss uses for n preference pairs.

    A `Reference` contains the reference model's log-likelihoods of the answers, the settings of the
    loss, and a bound on the rounding errors of the pairs' reward margins. The bound assumes that
    the rounding errors of an answer's tokens are independent. The sum of these errors then grows
    with the square root of the number of tokens.

    Args:
        logprobs: A tensor of shape (n, 2) with the log-likelihoods, in nats, of the chosen and the
            rejected answer of each pair under the reference model.
        lengths: A tensor of shape (n, 2) with the numbers of tokens of these answers.
        precision: The precision of training.
        dpo: The settings of the loss.
    """
    rounding = dpo.beta * ROUNDING[precision] * (logprobs.square() / lengths).sum(1).sqrt()
    return Reference(logprobs, dpo.beta, dpo.label_smoothing, rounding)
