"""One client's adapter: stand-ins for a base's MLPs and attention layers, put in and taken out."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.adapters.beside import Beside
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraLinear, LoraPair, pairs_in
from coterie.adapters.mixture import Mixture, Passed
from coterie.adapters.parameter import Parameter, Selects, by_name, initialise
from coterie.adapters.routed import Balance, Routed, Router
from coterie.bases.sites import StandIn, chosen_linears, decoder_of, expert_sites, layers, width
from coterie.errors import CoterieError


class Trainable:
    """Whatever a client trains, as training and averaging need it.

    Many can share one base in memory: each holds its own parameters only. The base's own are never
    trained.

    Args:
        parameters: what an optimiser updates.
        stand_ins: what stands for modules of the base, by path.
        routers: those of them that route.
    """

    _pairs: Sequence[LoraPair] = ()

    def __init__(
        self,
        parameters: Iterable[Parameter],
        stand_ins: Mapping[str, StandIn] | None = None,
        routers: Mapping[str, Router] | None = None,
    ) -> None:
        self._parameters = by_name(parameters)
        self._stand_ins, self._routers = stand_ins or {}, routers or {}

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters that are trained or kept with the adapter, sorted by name."""
        return self._parameters

    def tensors(self, selects: Selects = lambda _: True) -> dict[str, nn.Parameter]:
        """Return the tensors of the selected parameters, by default all, sorted by name."""
        return {name: p.tensor for name, p in self._parameters.items() if selects(p)}

    def require_grad(self, selects: Selects) -> None:
        """Compute gradients of exactly the selected parameters."""
        for parameter in self._parameters.values():
            parameter.tensor.requires_grad_(selects(parameter))

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """The base with what is trained, in place of anything else, ready to run; it is frozen."""
        attach(base, self._stand_ins)
        return base

    def residual(self) -> dict[str, Tensor]:
        """Return what is added to LoRA pairs and never trained, by the names of their A and B.

        The residual of an A is (any, in), and that of its B is (out, any).
        """
        return {
            parameter.name: tensor
            for pair in self._pairs
            for parameter, tensor in zip(
                pair.described(), (pair.residual_A, pair.residual_B), strict=True
            )
            if tensor is not None
        }

    def set_residual(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the residuals of all LoRA pairs."""
        for pair in self._pairs:
            A, B = (tensors.get(parameter.name) for parameter in pair.described())
            pair.residual_A = pair.residual_B = None
            if A is not None and B is not None:
                pair.residual_A, pair.residual_B = A.to(pair.A), B.to(pair.B)

    @property
    def balances(self) -> bool:
        """Whether a load-balance loss has a gradient: some router leaves experts out."""
        return any(router.balances for router in self._routers.values())

    def routing(self) -> dict[str, Tensor]:
        """Mean routing weight per expert in the last forward pass, (experts,), by layer."""
        return {path: router.routing() for path, router in self._routers.items()}


class Adapter(Trainable):
    """Everything one client trains: modules that stand in for modules of a base.

    Attaching one swaps modules of the base, not values.

    Args:
        base: a causal language model; on the meta device, the adapter learns names and shapes from
            it and is made on the CPU.
        layout: which experts, which ranks, routed or averaged.
        seed: the run's seed.
        client: the client's name, from which its personal parameters are drawn.
        common: whether a parameter's first values are the same for all clients.

    Raises:
        CoterieError: the base has nothing that the layout's adapters could stand on.
    """

    def __init__(
        self,
        base: nn.Module,
        layout: Layout,
        seed: int,
        client: str,
        common: Selects,
    ) -> None:
        self.layout = layout
        stand_ins = _stand_ins(base, layout)
        self._pairs = [pair for module in stand_ins.values() for pair in pairs_in(module)]
        parameters = [parameter for pair in self._pairs for parameter in pair.described()]
        routers: dict[str, Routed] = {}
        for path, m in stand_ins.items():
            if isinstance(m, Routed) and m.router is not None:
                parameters.append(
                    Parameter(f"router/{m.home}.weight", "router", m.router, "normal", m.home)
                )
                routers[path] = m
        super().__init__(parameters, stand_ins, routers)
        initialise(parameters, seed, client, common)

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put this adapter into a base, in place of any other; see `Trainable`.

        Raises CoterieError if an adapter of this layout, before training, changes what the base
        computes; it is tried once for each base.
        """
        check_unchanged(base, self.layout)
        return super().attach(base)

    def load_balance(self, form: Balance) -> Tensor:
        """The last forward pass's load-balance loss, averaged over layers: a scalar."""
        losses = [router.load_balance(form) for router in self._routers.values()]
        if not losses:
            raise CoterieError("This adapter has no router, so it has no load-balancing loss.")
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def first_experts(model: nn.Module) -> dict[str, Tensor]:
    """The best-scored expert of each token in the last forward pass, (tokens,), by routed layer.

    model: a base with an adapter attached. Raises CoterieError before its first forward pass.
    """
    found = ((path, m) for path, m in model.named_modules() if isinstance(m, Routed))
    return {path: m.first_experts() for path, m in found if m.router is not None}


def attach(base: nn.Module, stand_ins: Mapping[str, StandIn]) -> None:
    """Put stand-ins where they belong, by path, in place of any other adapter; freeze the base."""
    detach(base)
    base.requires_grad_(False)
    # A block's own layers first: afterwards they cannot be reached by their paths.
    for path, module in sorted(stand_ins.items(), key=lambda item: -item[0].count(".")):
        module.base = base.get_submodule(path)
        base.set_submodule(path, module)


def detach(base: nn.Module) -> None:
    """Take whichever adapter is attached out of a base."""
    for module in base.modules():
        if parametrize.is_parametrized(module):  # by full fine-tuning
            for name in list(cast(nn.ModuleDict, module.parametrizations)):
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    stand_ins = [(path, m) for path, m in base.named_modules() if isinstance(m, StandIn)]
    for path, module in reversed(stand_ins):
        base.set_submodule(path, module.base)


_tried: WeakKeyDictionary[nn.Module, set[Layout]] = WeakKeyDictionary()
"""For each base, the layouts that were found not to change it."""
TOKENS = 8
"""How many tokens a base reads to be compared with itself."""
INSTEAD = "Try `placement: beside` in the method's mlp, or other attention.targets."
ROUNDING = {torch.bfloat16: 0.03, torch.float32: 1e-4, torch.float64: 1e-6}
"""How far MLPs' outputs and hidden states may be from the base's, relative to their norm, by the
coarsest dtype."""


Seen = dict[str, tuple[tuple[Tensor, ...], Tensor]]
"""What modules were given and gave in a forward pass, by path."""


@torch.no_grad()
def check_unchanged(base: PreTrainedModel, layout: Layout) -> None:
    """Raise CoterieError if adapters whose every B is zero change what a base computes.

    Then the base's MLPs or attention do more than their layers' names tell. MLPs are compared one
    by one, as the residual stream would hide what they do.
    """
    layout = Layout(
        generalists=min(layout.experts, 1),
        specialists=0,
        rank=1,
        attention_rank=min(layout.attention_rank, 1),
        targets=layout.targets,
        placement=layout.placement,
    )
    tried = _tried.setdefault(base, set())
    weight = base.get_input_embeddings().weight
    if layout in tried or weight.is_meta or isinstance(weight.data, FakeTensor):
        return  # where there are no weights, there is nothing to compare
    detach(base)
    stand_ins = _stand_ins(base, layout)
    seen: Seen = {}
    with ExitStack() as hooks:
        for path, module in stand_ins.items():
            if isinstance(module, Mixture) and module.home == path:
                hook = partial(_record, seen, path)
                hooks.enter_context(base.get_submodule(path).register_forward_hook(hook))
        want = _hidden_states(base)
    attach(base, stand_ins)
    try:
        errors = [_distance(_hidden_states(base), want)]
        with _working(base):
            for path, (inputs, output) in seen.items():
                rest = inputs[1] if len(inputs) > 1 else 0  # a residual that the MLP adds
                got = base.get_submodule(path)(*inputs) - rest
                errors.append(_distance(got, output - rest))
    except (AttributeError, TypeError) as error:
        raise CoterieError(
            f"{type(base).__name__} cannot run with an adapter ({error}), so its architecture is "
            f"not supported. {INSTEAD}"
        ) from error
    finally:
        detach(base)
    dtypes = {parameter.dtype for parameter in base.parameters()}
    if not max(errors) <= next(most for dtype, most in ROUNDING.items() if dtype in dtypes):
        raise CoterieError(
            f"{type(base).__name__} computes something else with an untrained adapter than without "
            f"(values differ by {max(errors):.1%}), so its architecture is not supported. {INSTEAD}"
        )
    tried.add(layout)


def _distance(got: Tensor, want: Tensor) -> float:
    """Relative to what is wanted."""
    got, want = got.cpu().double(), want.cpu().double()  # some devices have no float64
    return ((got - want).norm() / want.norm()).item()


def _record(
    seen: Seen, path: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    seen[path] = tuple(x.clone() for x in inputs), output.clone()  # Falcon adds to it in place


def _working(base: PreTrainedModel) -> torch.autocast:
    """The context in which a base runs whose weights are in several dtypes."""
    floats = {p.dtype for p in base.parameters() if p.is_floating_point()}
    mixed = torch.bfloat16 in floats and len(floats) > 1
    return torch.autocast(base.device.type, torch.bfloat16, enabled=mixed)


def _hidden_states(base: PreTrainedModel) -> Tensor:
    """A base's hidden states for some tokens: (1, tokens, dim)."""
    embedding = base.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    ids = torch.linspace(0, embedding.num_embeddings - 1, TOKENS, device=embedding.weight.device)
    with _working(base):
        hidden = decoder_of(base)(input_ids=ids.long()[None], use_cache=False)
    return hidden.last_hidden_state


def _stand_ins(base: nn.Module, layout: Layout) -> dict[str, StandIn]:
    """By path; those of the same layer together."""
    found = _experts(base, layout) if layout.experts else {}
    if layout.attention_rank:
        inside = {pair.path for module in found.values() for pair in pairs_in(module)}
        for path, linear in chosen_linears(base, layout.targets).items():
            if path not in inside:  # a mixture's own layers have its experts
                found[path] = LoraLinear(linear, path, layout)
    return found


def _experts(base: nn.Module, layout: Layout) -> dict[str, StandIn]:
    """Stand-ins with the experts, by path."""
    found: dict[str, StandIn] = {}
    own = layers(base)
    for path, (module, shape) in expert_sites(base).items():
        if shape is not None and layout.placement != "beside":
            ahead: dict[str, Passed] = {}
            if path in own:  # the MLP is no module of its own
                ahead = {name: Passed(module) for name in (*shape.up, shape.act)}
                found |= {f"{path}.{name}": passed for name, passed in ahead.items()}
            at = f"{path}.{shape.down}" if ahead else path
            found[at] = Mixture(module, path, shape, layout, ahead)
        elif layout.placement != "inside":
            found[path] = Beside(module, path, width(base), layout)
    if not found:
        where = "MLP" if layout.placement == "inside" else "MLP or other block in its layers"
        raise CoterieError(
            f"{type(base).__name__} has no {where} that experts could stand on; set `mlp` of the "
            "method to null to train LoRA on attention alone."
        )
    return found
