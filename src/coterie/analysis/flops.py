"""What a round costs: floating-point operations of one real step per level, counted and scaled.

CoMiGS's appendix B.1 estimates them by hand; here PyTorch counts every matrix product of a forward
and a backward pass at batch 1 (2 m n k each, attention without regard to its mask), which is all
but a small part of the work. Sums, activations and the optimiser are not counted.
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


def costs_by_label(experiment: Experiment) -> dict[str, Cost | str]:
    """Return the cost of a round for each label that trains, or why it is not known.

    Raises CoterieError if no operations of this experiment are counted.
    """
    settings = experiment.all[0].config  # an experiment has the same bases and server
    if settings.get("bases") or settings.get("server"):
        raise CoterieError("not counted if clients have different bases or the server has a model")
    base: Base | None = None
    apart = {client: [client] for client in experiment.clients}
    costs: dict[str, Cost | str] = {}
    for label, run in experiment.first:
        if not run.names(LOSS):
            continue  # it trains nothing, or has not begun
        try:
            config = parse(run.config)
            base = base or counting_base(config)  # an experiment has one base
            clients = {EVERYONE: experiment.clients} if config.pooled else apart
            costs[label] = round_cost(config, base, clients) or "the training has no levels"
        except CoterieError as error:
            costs[label] = str(error)
    return costs


def counting_base(config: RunConfig) -> Base:
    """The base of a run, with attention made of products that the counter sees."""
    spec = config.base.model_copy(update={"weights": None})  # quantised products are not counted
    base = load_base(spec, None, config.data.window, config.root, config.device)
    base.model.set_attn_implementation("eager")
    return base


def round_cost(config: RunConfig, base: Base, clients: dict[str, list[str]]) -> Cost | None:
    """The cost of a round of a run; None if its method's training is not made of levels.

    base: that of all clients. clients: of each one, the names of the test texts that it is scored
    on (all of them if it is the one client of a pooled run, whose batch is as large as all
    clients' together). A level's turns, every tau steps, are those of the whole run, divided by its
    rounds: none where the run has fewer than tau steps.
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
    """Operations of one update of a level on one sample, with the adapter on the base."""
    model = adapter.attach(base.model)
    ids: Tensor = torch.zeros(1, window + 1, dtype=torch.int64, device=base.device)
    adapter.require_grad(lambda p: level.selects(p) or level.leaves(p))
    with FlopCounterMode(display=False) as counter:
        # A level's penalty is left aside: it holds no products of a forward pass's size.
        language_model_loss(model, ids).backward()
    for parameter in adapter.tensors().values():
        parameter.grad = None
    return counter.get_total_flops()
