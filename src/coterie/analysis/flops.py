"""Floating-point operations of a round: counted on one step per level, then scaled.

CoMiGS estimates the operations by hand (appendix B.1). Here PyTorch counts every matrix product of
a forward and a backward pass at batch 1 (2 m n k each; attention ignores its mask). Sums,
activations and the optimiser, a small part of the work, are not counted.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from coterie.adapters import Trainable
from coterie.analysis.experiments import Experiment
from coterie.analysis.need import side_without_texts
from coterie.bases import Base, load_base
from coterie.config.run import RunConfig, parse
from coterie.errors import CoterieError
from coterie.federation.participants import EVERYONE
from coterie.losses.tokens import language_model_loss
from coterie.messages.names import LOSS
from coterie.methods.adapter import AdapterClient
from coterie.training.schedule import Level

Cost = Mapping[str, float]
"""Floating-point operations of a round, over all clients, by level of the schedule."""
NO_LEVELS = "the method's training is not divided into levels"


def costs_by_label(experiment: Experiment) -> dict[str, Cost | str]:
    """Return the cost of a round for each label that trains, or the reason why it is unknown.

    Raises:
        CoterieError: if operations cannot be counted for this experiment.
    """
    settings = experiment.all[0].config  # all runs of an experiment have the same bases and server
    if settings.get("bases") or settings.get("server"):
        raise CoterieError("not counted if clients have different bases or the server has a model")
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
    """Load the base of a run with eager attention, whose matrix products the counter sees."""
    spec = config.base.model_copy(update={"weights": None})  # the counter skips quantised products
    base = load_base(spec, None, config.data.window, config.root, config.device)
    base.model.set_attn_implementation("eager")
    return base


def round_cost(config: RunConfig, base: Base, clients: dict[str, list[str]]) -> Cost | None:
    """Return the cost of a round of a run; None if the method's training has no levels.

    The number of a level's turns (every tau steps) is counted over the whole run and divided by the
    number of rounds, so that it is 0 if the run has fewer than tau steps.

    Args:
        config: the run.
        base: the base of all clients.
        clients: the names of the test texts on which each client is scored. The one client of a
            pooled run is scored on all, and its batch is as large as all clients' batches together.
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
            cost = flops * training.batch * updates
            levels[level.name] = levels.get(level.name, 0.0) + cost
    return levels


def step_flops(base: Base, adapter: Trainable, level: Level, window: int) -> int:
    """Return the operations of one update of a level on one sample.

    Args:
        base: the base, to which the adapter is attached.
        adapter: the trained parameters.
        level: the level of the schedule.
        window: the length of the sample in tokens.
    """
    model = adapter.attach(base.model)
    ids: Tensor = torch.zeros(1, window + 1, dtype=torch.int64, device=base.device)
    adapter.require_grad(lambda p: level.selects(p) or level.leaves(p))
    with FlopCounterMode(display=False) as counter:
        # A level's penalty is ignored: its products are small compared with a forward pass.
        language_model_loss(model, ids).backward()
    for parameter in adapter.tensors().values():
        parameter.grad = None
    return counter.get_total_flops()
