"""A client's adapter: stand-ins for MLPs and attention layers of a base.

A stand-in is a module that replaces a module of the base while the adapter is attached.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.adapters.beside import Beside
from coterie.adapters.layout import Layout
from coterie.adapters.lora import LoraLinear, LoraPair, pairs_in
from coterie.adapters.mixture import Mixture, Passed
from coterie.adapters.parameter import Parameter, Selects, by_name, initialise
from coterie.adapters.routed import Balance, Routed, Router, described
from coterie.bases.sites import StandIn, chosen_linears, decoder_of, expert_sites, layers, width
from coterie.errors import CoterieError


class Trainable:
    """A client's adapter: parameters, and the modules that apply the parameters to a base.

    These modules are called stand-ins, because they replace modules of the base. Many instances can
    share one base in memory, because each instance contains only its own parameters. The base's
    parameters are never trained.

    Args:
        parameters: All parameters of the adapter, including parameters that are never trained.
        stand_ins: The stand-ins, keyed by the paths of the modules that they replace.
        routers: The stand-ins that have a router, with the same keys as in `stand_ins`.
    """

    _pairs: Sequence[LoraPair] = ()
    _checked_layout: Layout | None = None
    """A layout whose untrained adapter must not change the outputs of a base; None: no check."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        stand_ins: Mapping[str, StandIn] | None = None,
        routers: Mapping[str, Router] | None = None,
    ) -> None:
        self._parameters = by_name(parameters)
        self._stand_ins, self._routers = stand_ins or {}, routers or {}

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters of the adapter in a dictionary that is sorted by name."""
        return self._parameters

    def tensors(self, selects: Selects = lambda _: True) -> dict[str, nn.Parameter]:
        """Return the tensors of selected parameters in a dictionary that is sorted by name.

        Args:
            selects: A predicate that selects the parameters. By default, all parameters are
                selected.
        """
        return {name: p.tensor for name, p in self._parameters.items() if selects(p)}

    def values(self) -> dict[str, Tensor]:
        """Return detached views of all parameters, under the parameters' names."""
        return {name: p.tensor.detach() for name, p in self.parameters().items()}

    def require_grad(self, selects: Selects) -> None:
        """Enable gradients for the selected parameters, and disable them for all others."""
        for parameter in self._parameters.values():
            parameter.tensor.requires_grad_(selects(parameter))

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Remove any other adapter from a base, attach this adapter, and freeze the base.

        Returns:
            The model to run: the base itself, or a wrapper around it.

        Raises:
            CoterieError: The base's architecture is not supported.
        """
        if self._checked_layout is not None:
            check_unchanged(base, self._checked_layout)
        attach(base, self._stand_ins)
        _attached[base] = ref(self)
        return base

    def residual(self) -> dict[str, Tensor]:
        """Return the residuals of all LoRA pairs that have a residual.

        A residual consists of two further factors, which are never trained. Their product is added
        to the product of the pair's A and B.

        Returns:
            A dictionary with two entries for each residual. The residual's first factor, shaped
            (s, in), is stored under the name of the pair's A. The residual's second factor, shaped
            (out, s), is stored under the name of the pair's B. The rank s of the residual may
            differ from the rank of the pair.
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
        """Replace the residuals of all LoRA pairs.

        Args:
            tensors: A mapping like the result of `residual`. If the names of a pair are missing
                from the mapping, the pair has no residual afterwards.
        """
        for pair in self._pairs:
            A, B = (tensors.get(parameter.name) for parameter in pair.described())
            pair.residual_A = pair.residual_B = None
            if A is not None and B is not None:
                pair.residual_A, pair.residual_B = A.to(pair.A), B.to(pair.B)

    @property
    def balances(self) -> bool:
        """Whether the load-balance loss has a gradient and can therefore balance the experts.

        The loss has no gradient if every router counts each token towards the load of every expert.
        """
        return any(router.balances for router in self._routers.values())

    def routing(self) -> dict[str, Tensor]:
        """Return the experts' mean routing weights in the last forward pass.

        Returns:
            A mapping from the path of each stand-in with a router to a tensor shaped (experts,).
            The tensor contains each expert's mean routing weight over all tokens except padding.
        """
        return {path: router.routing() for path, router in self._routers.items()}


class Adapter(Trainable):
    """A client's adapter that combines LoRA on attention with a mixture of low-rank experts.

    Attaching an adapter replaces modules of the base, but does not change the base's weights.

    Args:
        base: A causal language model. If the base is on the meta device, the adapter uses only the
            names and shapes of the base's modules, and is created on the CPU.
        layout: The layout, which sets the numbers of experts, the ranks and the routing.
        seed: The run's seed.
        client: The client's name. Random initial values depend on this name, except the initial
            values of frozen parameters and of the parameters that `common` selects.
        common: A predicate that selects the parameters whose initial values are equal on all
            clients.

    Raises:
        CoterieError: The base has no module to which the layout's experts or LoRA can be attached.
    """

    def __init__(
        self,
        base: nn.Module,
        layout: Layout,
        seed: int,
        client: str,
        common: Selects,
    ) -> None:
        self.layout = self._checked_layout = layout
        stand_ins = _stand_ins(base, layout)
        self._pairs, parameters, routers = described(stand_ins, "normal")
        super().__init__(parameters, stand_ins, routers)
        initialise(parameters, seed, client, common)

    def load_balance(self, form: Balance) -> Tensor:
        """Return the load-balance loss of the last forward pass as a scalar, averaged over layers.

        Args:
            form: The distribution of load that counts as balanced; see `Router.load_balance`.

        Raises:
            CoterieError: The adapter has no router.
        """
        losses = [router.load_balance(form) for router in self._routers.values()]
        if not losses:
            raise CoterieError("This adapter has no router, so it has no load-balancing loss.")
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def first_experts(model: nn.Module) -> dict[str, Tensor]:
    """Return, for each token of the last forward pass, the expert that the router scores highest.

    Args:
        model: A base with an adapter attached.

    Returns:
        A mapping from the path of each module with a router to the indices of the experts, shaped
        (tokens,).

    Raises:
        CoterieError: The model has not run yet.
    """
    routed = ((path, m) for path, m in model.named_modules() if isinstance(m, Routed))
    return {path: m.first_experts() for path, m in routed if m.router is not None}


_attached: WeakKeyDictionary[nn.Module, ref[Trainable]] = WeakKeyDictionary()
"""The adapter that is attached to each base. An adapter may refer to its base, hence the `ref`."""


def attached(base: nn.Module) -> Trainable | None:
    """Return the adapter that is attached to a base; None if there is none."""
    adapter = _attached.get(base)
    return None if adapter is None else adapter()


def attach(base: nn.Module, stand_ins: Mapping[str, StandIn]) -> None:
    """Attach an adapter's stand-ins to a base, and freeze the base.

    If an adapter is already attached to the base, it is detached first.

    Args:
        base: The base, modified in place.
        stand_ins: Modules that replace modules of the base, keyed by the paths of the replaced
            modules.
    """
    detach(base)
    base.requires_grad_(False)
    # Inner modules are replaced first: once their block is replaced, their paths are invalid.
    for path, module in sorted(stand_ins.items(), key=lambda item: -item[0].count(".")):
        module.base = base.get_submodule(path)
        base.set_submodule(path, module)


def detach(base: nn.Module) -> None:
    """Remove the adapter from a base, if one is attached."""
    _attached.pop(base, None)
    for module in base.modules():
        if parametrize.is_parametrized(module):  # full fine-tuning parametrizes weights
            for name in list(cast(nn.ModuleDict, module.parametrizations)):
                parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    stand_ins = [(path, m) for path, m in base.named_modules() if isinstance(m, StandIn)]
    for path, module in reversed(stand_ins):
        base.set_submodule(path, module.base)


_checked: WeakKeyDictionary[nn.Module, set[Layout]] = WeakKeyDictionary()
"""The layouts for which `check_unchanged` has passed, for each base."""
TOKENS = 8
"""Number of input tokens with which `check_unchanged` compares outputs."""
ADVICE = (
    "Set `placement: beside` in the method's section `mlp`, or set `attention.targets` to other "
    "linear layers."
)
ROUNDING = {torch.bfloat16: 0.03, torch.float32: 1e-4, torch.float64: 1e-6}
"""Maximum relative error of MLP outputs and hidden states, for each dtype. The least precise dtype
of the base applies."""


Calls = dict[str, tuple[tuple[Tensor, ...], Tensor]]
"""The inputs and the output of each module in one forward pass, keyed by the module's path."""


@torch.no_grad()
def check_unchanged(base: PreTrainedModel, layout: Layout) -> None:
    """Check that an untrained adapter (every B is zero) does not change a base's outputs.

    Adapters assume that MLPs and attention modules compute what the names of their layers suggest.
    If the outputs change, the base does not meet this assumption. The outputs of each MLP are also
    compared separately, because the residual stream could conceal a difference. The result does not
    depend on ranks or on the number of experts, so layouts that differ only in these numbers are
    checked only once for each base.

    Raises:
        CoterieError: The outputs differ, or the base cannot run with the adapter.
    """
    layout = Layout(
        generalists=min(layout.experts, 1),
        specialists=0,
        rank=1,
        attention_rank=min(layout.attention_rank, 1),
        targets=layout.targets,
        placement=layout.placement,
    )
    checked = _checked.setdefault(base, set())
    weight = base.get_input_embeddings().weight
    if layout in checked or weight.is_meta:
        return  # without weights there are no outputs to compare
    detach(base)
    stand_ins = _stand_ins(base, layout)
    calls: Calls = {}
    with ExitStack() as hooks:
        for path, module in stand_ins.items():
            if isinstance(module, Mixture) and module.path == path:
                hook = partial(_record, calls, path)
                hooks.enter_context(base.get_submodule(path).register_forward_hook(hook))
        expected = _hidden_states(base)
    attach(base, stand_ins)
    try:
        errors = [_distance(_hidden_states(base), expected)]
        with _autocast(base):
            for path, (inputs, output) in calls.items():
                residual = inputs[1] if len(inputs) > 1 else 0  # some MLPs add a residual
                actual = base.get_submodule(path)(*inputs) - residual
                errors.append(_distance(actual, output - residual))
    except (AttributeError, TypeError) as error:
        raise CoterieError(
            f"{type(base).__name__} cannot run with an adapter ({error}), so its architecture is "
            f"not supported. {ADVICE}"
        ) from error
    finally:
        detach(base)
    dtypes = {parameter.dtype for parameter in base.parameters()}
    if not max(errors) <= next(most for dtype, most in ROUNDING.items() if dtype in dtypes):
        raise CoterieError(
            f"An untrained adapter changes the outputs of {type(base).__name__} by "
            f"{max(errors):.1%}, so the architecture of this model is not supported. {ADVICE}"
        )
    checked.add(layout)


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Compute the norm of the tensors' difference, divided by the norm of the expected tensor."""
    actual, expected = actual.cpu().double(), expected.cpu().double()  # not all devices support it
    return ((actual - expected).norm() / expected.norm()).item()


def _record(
    calls: Calls, path: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    # Tensors are copied, as Falcon modifies them in place.
    calls[path] = tuple(x.clone() for x in inputs), output.clone()


def _autocast(base: PreTrainedModel) -> torch.autocast:
    """Return a context in which a base's operations are autocast to bfloat16.

    Autocast is enabled only if the base mixes bfloat16 with other floating-point dtypes.
    """
    floats = {p.dtype for p in base.parameters() if p.is_floating_point()}
    mixed = torch.bfloat16 in floats and len(floats) > 1
    return torch.autocast(base.device.type, torch.bfloat16, enabled=mixed)


def _hidden_states(base: PreTrainedModel) -> Tensor:
    """Compute a base's final hidden states, shaped (1, tokens, dim), for a fixed input."""
    embedding = base.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    ids = torch.linspace(0, embedding.num_embeddings - 1, TOKENS, device=embedding.weight.device)
    with _autocast(base):
        hidden = decoder_of(base)(input_ids=ids.long()[None], use_cache=False)
    return hidden.last_hidden_state


def _stand_ins(base: nn.Module, layout: Layout) -> dict[str, StandIn]:
    """Create all stand-ins that a layout requires, keyed by the paths of the replaced modules.

    A linear layer to which experts are attached gets no LoRA.
    """
    stand_ins = _experts(base, layout) if layout.experts else {}
    if layout.attention_rank:
        with_experts = {pair.path for module in stand_ins.values() for pair in pairs_in(module)}
        for path, linear in chosen_linears(base, layout.targets).items():
            if path not in with_experts:
                stand_ins[path] = LoraLinear(linear, path, layout)
    return stand_ins


def _experts(base: nn.Module, layout: Layout) -> dict[str, StandIn]:
    """Create the stand-ins that have experts, keyed by the paths of the replaced modules."""
    if layout.placement == "linear":
        linears = chosen_linears(base, layout.targets).items()
        return {path: Beside(linear, path, width(base), layout) for path, linear in linears}
    stand_ins: dict[str, StandIn] = {}
    decoder_layers = layers(base)
    for path, (module, shape) in expert_sites(base).items():
        if shape is not None and layout.placement != "beside":
            ahead: dict[str, Passed] = {}
            if path in decoder_layers:  # the MLP's modules belong to the decoder layer itself
                ahead = {name: Passed(module) for name in (*shape.up, shape.act)}
                stand_ins |= {f"{path}.{name}": passed for name, passed in ahead.items()}
            at = f"{path}.{shape.down}" if ahead else path
            stand_ins[at] = Mixture(module, path, shape, layout, ahead)
        elif layout.placement != "inside":
            stand_ins[path] = Beside(module, path, width(base), layout)
    if not stand_ins:
        missing = "MLP" if layout.placement == "inside" else "MLP or other block in its layers"
        raise CoterieError(
            f"{type(base).__name__} has no {missing} to which experts can be attached; to train "
            "only LoRA on attention, set the method's `mlp` to null."
        )
    return stand_ins
