"""Modules of a base to which adapters can be attached: MLPs, other blocks, and linear layers.

Linear layers are recognised by their names (`PLACES`), MLPs by the names of their layers
(`MLP_SHAPES`), and attention by its class name. In multimodal models, only the text decoder is
considered.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.bases.patterns import matching
from coterie.errors import CoterieError


class StandIn(nn.Module):
    """A module that takes the place of one module of a client's base model.

    The attribute `base` is the replaced module, not the whole base model. Clients with the same
    base model share its frozen modules, but each client has stand-ins of its own.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


@dataclass(frozen=True)
class MlpShape:
    """The *shape* of an MLP, that is, the names of the MLP's modules and whether the MLP is gated.

    A gated MLP computes `down(act(up[0](x)) * up[1](x))`. Any other MLP computes
    `down(act(up[0](x)))`.
    """

    up: tuple[str, ...]
    down: str
    act: str
    fused: bool = False
    """Whether one up-projection computes both the gate (the first half of its outputs) and the
    values that the gate multiplies (the second half)."""
    dropouts: tuple[str, ...] = ("dropout", "residual_dropout")
    """Names of the attributes in which an MLP may have a final dropout, as a module or a rate."""

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of all linear layers, in the order of computation."""
        return (*self.up, self.down)


MLP_SHAPES = (
    MlpShape(up=("gate_proj", "up_proj"), down="down_proj", act="act_fn"),
    MlpShape(up=("gate_up_proj",), down="down_proj", act="activation_fn", fused=True),
    MlpShape(up=("c_fc",), down="c_proj", act="act"),
    MlpShape(up=("fc_in",), down="fc_out", act="act"),
    MlpShape(up=("fc1",), down="fc2", act="activation_fn"),
    MlpShape(up=("dense_h_to_4h",), down="dense_4h_to_h", act="act"),
    MlpShape(("dense_h_to_4h",), "dense_4h_to_h", "gelu_impl", dropouts=("hidden_dropout",)),
    MlpShape(up=("up_proj",), down="down_proj", act="act_fn"),
)
BLOCKS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "mixer", "mamba")
"""Names of blocks to which experts can be attached in parallel. In each decoder layer, the first of
these names that exists is used."""


Linear = nn.Linear | Conv1D


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a base with the module's path, as if no adapter were attached."""
    if isinstance(module, StandIn):
        module = module.base
    yield path, module
    for name, child in module.named_children():
        yield from walk(child, f"{path}.{name}" if path else name)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return a mapping from names to a module's children, as if no adapter were attached."""
    children = module.named_children()
    return {name: child.base if isinstance(child, StandIn) else child for name, child in children}


def mlp_shape(module: nn.Module) -> MlpShape | None:
    """Return the shape of an MLP, or None if the module is not an MLP of a known shape."""
    children = children_of(module)
    for shape in MLP_SHAPES:
        linears = (children.get(name) for name in shape.linears)
        if hasattr(module, shape.act) and all(isinstance(layer, Linear) for layer in linears):
            return shape
    return None


def decoder_of(base: PreTrainedModel) -> PreTrainedModel:
    """Return a base's text decoder, without the output head."""
    decoder = base.get_decoder()
    if decoder is base:  # get_decoder returns the model itself for Llama 4
        decoder = next(m for m in base.children() if isinstance(m, PreTrainedModel))
    return decoder


def decoder_walk(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a base's text decoder, with the module's path in the base."""
    decoder = decoder_of(base) if isinstance(base, PreTrainedModel) else base
    path = next(path for path, module in walk(base) if module is decoder)
    return walk(decoder, path)


def layers(base: nn.Module) -> dict[str, nn.Module]:
    """Return an ordered mapping from paths to the layers of the decoder."""
    for path, module in decoder_walk(base):
        if isinstance(module, nn.ModuleList):
            return {f"{path}.{name}": layer for name, layer in children_of(module).items()}
    return {}


def width(base: nn.Module) -> int:
    """Return the width of a base's hidden states."""
    assert isinstance(base, PreTrainedModel)
    return base.config.get_text_config().hidden_size


def expert_sites(base: nn.Module) -> dict[str, tuple[nn.Module, MlpShape | None]]:
    """Find, in each decoder layer of a base, the module to which experts can be attached.

    Returns:
        A mapping from the path of each module to a pair of the module and its `MlpShape`. Usually,
        the module is the decoder layer's MLP. If the linear layers of the MLP belong directly to
        the decoder layer (as in OPT), the module is the decoder layer itself. The shape is None if
        the module is not an MLP of a known shape. Examples of such modules are a mixture of
        experts, and the state-space block of a decoder layer that has no MLP. Experts can be
        attached beside such a module, but not inside it.
    """
    sites: dict[str, tuple[nn.Module, MlpShape | None]] = {}
    for path, layer in layers(base).items():
        modules = {"": layer, **children_of(layer)}
        shapes = {name: shape for name, module in modules.items() if (shape := mlp_shape(module))}
        for name in (*shapes, *(name for name in BLOCKS if name in modules)):
            sites[f"{path}.{name}" if name else path] = modules[name], shapes.get(name)
            break
    return sites


def attention_linears(base: nn.Module) -> dict[str, Linear]:
    """Return a mapping from paths in the base to the linear layers of all attention modules.

    The input projections (`in_proj...`) of state-space blocks and linear attention are included.
    """
    return {
        f"{path}.{name}": child
        for layer_path, layer in layers(base).items()
        for path, module in walk(layer, layer_path)
        for name, child in children_of(module).items()
        if isinstance(child, Linear)
        and ("Attention" in type(module).__name__ or place_of(name) == "mixer.in")
    }


def chosen_linears(base: nn.Module, pattern: str | None) -> dict[str, Linear]:
    """Return a mapping from paths to the linear layers that match a pattern.

    The output head never matches.

    Args:
        base: The base.
        pattern: Regular expression that must match either the last component of a layer's path or
            the layer's place (see `place_of`). None selects attention.

    Raises:
        CoterieError: The pattern is invalid, takes too long or matches no layer.
    """
    if pattern is None:
        if not (attention := attention_linears(base)):
            raise CoterieError(
                f"{type(base).__name__} has no supported attention; set the method's "
                "attention.targets to the linear layers to adapt."
            )
        return attention
    linears = {p: m for p, m in decoder_walk(base) if isinstance(m, Linear) and "." in p}
    named = {path: {path.rpartition(".")[2], place_of(path)} for path in linears}
    chosen = set(matching(pattern, sorted(set().union(*named.values())), "attention.targets"))
    matches = {path: linear for path, linear in linears.items() if chosen & named[path]}
    if not matches:
        names = ", ".join(sorted({path.rpartition(".")[2] for path in linears}))
        places = ", ".join(sorted({place_of(path) for path in linears if "." in place_of(path)}))
        raise CoterieError(
            f"The pattern {pattern!r} matches no linear layer of the base; the names of its linear "
            f"layers are {names}, and a pattern can also match their architecture-independent "
            f"names {places}."
        )
    return matches


PLACES = {
    end: place
    for place, ends in {
        "mlp.up": ("c_fc", "fc_in", "fc1", "dense_h_to_4h", "up_proj"),
        "mlp.gate": ("gate_proj",),
        "mlp.gate_up": ("gate_up_proj",),
        "mlp.down": ("fc_out", "fc2", "dense_4h_to_h", "down_proj", "mlp.c_proj"),
        "mlp": BLOCKS[:-2],
        "attention.qkv": ("c_attn", "query_key_value", "qkv_proj"),
        "attention.q": ("q_proj",),
        "attention.k": ("k_proj",),
        "attention.v": ("v_proj",),
        "attention.out": (
            *("o_proj", "out_proj", "attn.c_proj"),
            *(f"{block}.dense" for block in ("attention", "self_attention", "self_attn")),
        ),
        "mixer.out": [f"{mixer}.out_proj" for mixer in ("mixer", "mamba", "linear_attn", "conv")],
        "mixer": BLOCKS[-2:],
    }.items()
    for end in ends
}
"""A mapping from the last one or two components of a module's path to the module's place. A place
is an architecture-independent name of a linear layer or block."""
QUERY_VALUE = r"attention\.(q|v|qkv)|mixer\.in"
"""Pattern of the places that compute queries and values, and of the input projections of
state-space blocks and linear attention."""


def place_of(path: str) -> str:
    """Return the place of the module at a path.

    A place is an architecture-independent name of a linear layer or block, such as `mlp.up`. If
    `PLACES` has no entry for a path, the path's last component is the place.
    """
    names = path.split(".")
    if names[-1].startswith("in_proj"):
        return "mixer.in"
    return PLACES.get(".".join(names[-2:])) or PLACES.get(names[-1]) or names[-1]


def sizes(linear: nn.Module) -> tuple[int, int]:
    """Return a linear layer's input and output widths (in, out), even if its weight is packed."""
    if isinstance(linear, Conv1D):  # GPT-2's class has no in_features; its weight is (in, out)
        rows, columns = linear.weight.shape
        return rows, columns
    assert isinstance(linear, nn.Linear)
    return linear.in_features, linear.out_features


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes its output from the input x.

    If autocast is enabled and x is not float64, the result is autocast's dtype. Otherwise, it is
    the dtype of x.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
