"""Estimates of the floating-point operations in a round of training.

CoMiGS estimates the operations by hand (appendix B.1). Here, PyTorch counts the operations of one
training step on one sample for each level of the schedule, and the counts are scaled to a round. A
level is a group of parameters that are trained together, such as the routers.

The count includes every matrix product in the forward and the backward pass. The product of an
(m, k) matrix and a (k, n) matrix counts as 2 m n k operations, and attention is counted as if it
had no mask. Sums, activations and the optimiser are a small part of the work and are not counted;
nor are the general samples of replay.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coterie.adapters import Trainable
from coterie.analysis.experiments import Experiment
from coterie.analysis.shapes import side_without_texts
from coterie.bases import Base, load_base
from coterie.config.run import RunConfig, parse
from coterie.errors import CoterieError
from coterie.federation.participants import EVERYONE
from coterie.losses.tokens import language_model_loss
from coterie.messages.names import LOSS
from coterie.methods.adapter import AdapterClient
from coterie.training.schedule import Level

Cost = Mapping[str, float]
"""The floating-point operations of all clients in a round, for each level of the schedule."""
NO_LEVELS = (
    "operations are counted for each level (a group of parameters that are trained together), and "
    "this method defines no levels"
)


def costs_by_label(experiment: Experiment) -> dict[str, Cost | str]:
    """Return the cost of a round, in floating-point operations, for each label of the experiment.

    A label is a method with its settings. If a cost is unknown, the value is the reason as text.
    Labels whose method trains nothing or whose run has not begun are omitted.

    Raises:
        CoterieError: if operations cannot be counted for this experiment.
    """
    settings = experiment.all[0].config  # all runs of an experiment have the same bases and server
    if settings.get("bases") or settings.get("server"):
        raise CoterieError(
            "operations cannot be counted if clients have different bases or the server has a model"
        )
    base: Base | None = None
    separate = {client: [client] for client in experiment.clients}
    costs: dict[str, Cost | str] = {}
    for label, run in experiment.first:
        if not run.names(LOSS):
            continue  # the method trains nothing, or the run has not begun
        try:
            config = parse(run.config)
            base = base or counting_base(config)
            clients = {EVERYONE: experiment.clients} if config.pooled else separate
            costs[label] = round_cost(config, base, clients) or NO_LEVELS
        except CoterieError as error:
            costs[label] = str(error)
    return costs


def counting_base(config: RunConfig) -> Base:
    """Load a run's base with eager attention, so that PyTorch can count the matrix products."""
    # PyTorch does not count the matrix products of quantised weights.
    spec = config.base.model_copy(update={"weights": None})
    base = load_base(spec, None, config.data.window, config.root, config.device)
    base.model.set_attn_implementation("eager")
    return base


def round_cost(config: RunConfig, base: Base, clients: dict[str, list[str]]) -> Cost | None:
    """Return the cost of a round of a run, or None if the method has no schedule of levels.

    A level (a group of parameters that are trained together) has a turn in every `Level.every`-th
    step of the run. The cost is computed with the mean number of turns per round: the number of
    turns in the whole run, divided by the number of rounds. This mean is 0 if the run has fewer
    than `Level.every` steps.

    Args:
        config: The run.
        base: The base of all clients.
        clients: For each client, the names of the test texts on which the client is scored. In a
            pooled run, one client replaces all clients and has their data. This client is scored on
            all test texts, and its batch is as large as the batches of the replaced clients
            together.
    """
    levels: dict[str, float] = {}
    for name, tests in clients.items():
        side = side_without_texts(config, base, name, tests)
        if not isinstance(side, AdapterClient):
            return None
        training = side.context.training
        for level in side.training.levels:
            turns = level.turns(config.rounds, training.steps)
            updates = level.steps * turns / config.rounds
            flops = step_flops(base, side.adapter, level, config.data.window)
            levels[level.name] = levels.get(level.name, 0.0) + flops * training.batch * updates
    return levels


def step_flops(base: Base, adapter: Trainable, level: Level, window: int) -> int:
    """Count the operations of one update on one sample, for one level of the schedule.

    Args:
        base: The base, to which the adapter is attached.
        adapter: The adapter, which contains the trained parameters.
        level: The level of the schedule, a group of parameters that are trained together.
        window: The length of the sample in tokens.
    """
    model = adapter.attach(base.model)
    ids: Tensor = torch.zeros(1, window + 1, dtype=torch.int64, device=base.device)
    adapter.require_grad(lambda p: level.selects(p) or level.leaves(p))
    with FlopCounterMode(display=False) as counter:
        # The level's penalty and pull are omitted: they are cheap compared with a forward pass.
        language_model_loss(model, ids).backward()
    for parameter in adapter.tensors().values():
        parameter.grad = None
    return counter.get_total_flops()
