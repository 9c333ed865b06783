"""Where adapters stand in a base: its MLPs, blocks that are no such MLP, and linear layers.

What a linear layer does is told by its name (`PLACES`), an MLP by the names of its layers
(`MLP_SHAPES`), attention by the name of its class. Of a model that also sees or hears, only the
part that reads text counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.errors import CoterieError


class StandIn(nn.Module):
    """A module that stands where a module of the base stood, and still calls it as `base`.

    Every client has stand-ins of its own; all refer to the one frozen base.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


@dataclass(frozen=True)
class MlpShape:
    """Names of an MLP's parts: `down(act(up[0] x))`, or gated `down(act(up[0] x) * up[1] x)`."""

    up: tuple[str, ...]
    down: str
    act: str
    fused: bool = False
    """Whether the one upward layer computes the gate and, below it, what is gated."""
    dropouts: tuple[str, ...] = ("dropout", "residual_dropout")
    """What ends the MLP, where there is such an attribute: a module, or a rate."""

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers, in the order of computation."""
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
"""What a decoder layer may call the block that experts can stand beside; the first is taken."""


Linear = nn.Linear | Conv1D


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module of a base with its path, as if no adapter were attached."""
    if isinstance(module, StandIn):
        module = module.base
    yield path, module
    for name, child in module.named_children():
        yield from walk(child, f"{path}.{name}" if path else name)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """A module's children by name, as if no adapter were attached."""
    children = module.named_children()
    return {name: child.base if isinstance(child, StandIn) else child for name, child in children}


def mlp_shape(module: nn.Module) -> MlpShape | None:
    """How a module is an MLP, or None."""
    children = children_of(module)
    for shape in MLP_SHAPES:
        linears = (children.get(name) for name in shape.linears)
        if hasattr(module, shape.act) and all(isinstance(layer, Linear) for layer in linears):
            return shape
    return None


def decoder_of(base: PreTrainedModel) -> PreTrainedModel:
    """The part of a base that reads text, without its output head."""
    decoder = base.get_decoder()
    if decoder is base:  # where transformers does not know, as in Llama 4
        decoder = next(m for m in base.children() if isinstance(m, PreTrainedModel))
    return decoder


def decoder_walk(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the part of a base that reads text, with its path in the base."""
    decoder = decoder_of(base) if isinstance(base, PreTrainedModel) else base
    path = next(path for path, module in walk(base) if module is decoder)
    return walk(decoder, path)


def layers(base: nn.Module) -> dict[str, nn.Module]:
    """The decoder's layers, by path, in their order."""
    for path, module in decoder_walk(base):
        if isinstance(module, nn.ModuleList):
            return {f"{path}.{name}": layer for name, layer in children_of(module).items()}
    return {}


def width(base: nn.Module) -> int:
    """The width of a base's hidden states."""
    assert isinstance(base, PreTrainedModel)
    return base.config.get_text_config().hidden_size


def expert_sites(base: nn.Module) -> dict[str, tuple[nn.Module, MlpShape | None]]:
    """Where experts can stand in each decoder layer: a module by its path, and how it is an MLP.

    A layer may be its own MLP (as OPT's are). Without a shape, experts can only stand beside the
    module: it is a mixture of experts, or a state-space block in a layer without an MLP.
    """
    found: dict[str, tuple[nn.Module, MlpShape | None]] = {}
    for path, layer in layers(base).items():
        parts = {"": layer, **children_of(layer)}
        shapes = {name: shape for name, part in parts.items() if (shape := mlp_shape(part))}
        for name in (*shapes, *(name for name in BLOCKS if name in parts)):
            found[f"{path}.{name}" if name else path] = parts[name], shapes.get(name)
            break
    return found


def attention_linears(base: nn.Module) -> dict[str, Linear]:
    """All linear layers of attention, by path, and what leads into whatever else mixes tokens: the
    layers `in_proj...` of a state-space block or a linear attention."""
    return {
        f"{path}.{name}": child
        for layer_path, layer in layers(base).items()
        for path, module in walk(layer, layer_path)
        for name, child in children_of(module).items()
        if isinstance(child, Linear)
        and ("Attention" in type(module).__name__ or place_of(name) == "mixer.in")
    }


def chosen_linears(base: nn.Module, pattern: str | None) -> dict[str, Linear]:
    """The linear layers whose name, or what they do (`place_of`), matches a regular expression.

    By path, of which a layer's name is the last part. Without a pattern those of attention. Raises
    CoterieError if there is none; the output head is never one of them.
    """
    if pattern is None:
        if not (found := attention_linears(base)):
            raise CoterieError(
                f"{type(base).__name__} has no supported attention; set attention.targets of "
                "the method to the linear layers to adapt."
            )
        return found
    linears = {p: m for p, m in decoder_walk(base) if isinstance(m, Linear) and "." in p}
    try:
        found = {
            path: linear
            for path, linear in linears.items()
            if any(re.fullmatch(pattern, n) for n in (path.rpartition(".")[2], place_of(path)))
        }
    except re.error as error:
        raise CoterieError(
            f"The pattern {pattern!r} is not a valid regular expression: {error}."
        ) from None
    if not found:
        names = ", ".join(sorted({path.rpartition(".")[2] for path in linears}))
        places = ", ".join(sorted({place_of(path) for path in linears if "." in place_of(path)}))
        raise CoterieError(
            f"The pattern {pattern!r} matches no linear layer of the base; its layers are {names}"
            f" ({places})."
        )
    return found


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
"""What linear layers and blocks do, by the end of their path."""
QUERY_VALUE = r"attention\.(q|v|qkv)|mixer\.in"
"""Linear layers that compute queries and values, whatever a base calls them, and what leads into a
state-space block or a linear attention."""


def place_of(path: str) -> str:
    """What the module at a path does: `mlp.up`, `attention.q`; its own name if that is unknown."""
    names = path.split(".")
    if names[-1].startswith("in_proj"):
        return "mixer.in"
    return PLACES.get(".".join(names[-2:])) or PLACES.get(names[-1]) or names[-1]


def sizes(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer, also where its weight is packed.

    GPT-2's Conv1D keeps its weight transposed, and no sizes.
    """
    if isinstance(linear, Conv1D):
        rows, columns = linear.weight.shape
        return rows, columns
    assert isinstance(linear, nn.Linear)
    return linear.in_features, linear.out_features


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer works on x: autocast's where it is on, else x's own."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
