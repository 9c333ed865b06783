"""Where adapters stand in a base: its MLPs, and the linear layers of its attention.

Supported are GPT-2's names and those of the Llama family (Llama, Mistral, Qwen, Gemma, ...); for
attention alone also those of OPT, Bloom and GPT-NeoX.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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

    @property
    def linears(self) -> tuple[str, ...]:
        """All linear layers, in the order of computation."""
        return (*self.up, self.down)


MLP_SHAPES = (
    MlpShape(up=("c_fc",), down="c_proj", act="act"),
    MlpShape(up=("gate_proj", "up_proj"), down="down_proj", act="act_fn"),
)
ATTENTION_LINEARS = (
    ("c_attn", "c_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("query_key_value", "dense"),
)


def walk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module of a base with its path, as if no adapter were attached."""
    if isinstance(module, StandIn):
        module = module.base
    yield path, module
    for name, child in module.named_children():
        yield from walk(child, f"{path}.{name}" if path else name)


def mlp_shape(module: nn.Module) -> MlpShape | None:
    """How a module is an MLP, or None."""
    for shape in MLP_SHAPES:
        if all(hasattr(module, name) for name in (*shape.linears, shape.act)):
            return shape
    return None


def attention_linears(module: nn.Module) -> tuple[str, ...]:
    """Names of the linear layers if the module is an attention block, else nothing."""
    for names in ATTENTION_LINEARS:
        if all(hasattr(module, name) for name in names):
            return names
    return ()


def chosen_linears(base: nn.Module, pattern: str | None) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers the last part of whose path matches a regular expression, by path.

    Without a pattern those of attention. Raises CoterieError if there is none; the output head is
    never one of them.
    """
    layers = {
        path: module
        for path, module in walk(base)
        if isinstance(module, nn.Linear | Conv1D) and "." in path
    }
    if pattern is None:
        attention = [f"{p}.{name}" for p, m in walk(base) for name in attention_linears(m)]
        if not attention:
            raise CoterieError(
                f"{type(base).__name__} has no supported attention; set attention.targets of "
                "the method to the linear layers to adapt."
            )
        return {path: layers[path] for path in attention}
    try:
        found = {p: m for p, m in layers.items() if re.fullmatch(pattern, p.rpartition(".")[2])}
    except re.error as error:
        raise CoterieError(
            f"The pattern {pattern!r} is not a valid regular expression: {error}."
        ) from None
    if not found:
        names = ", ".join(sorted({path.rpartition(".")[2] for path in layers}))
        raise CoterieError(
            f"The pattern {pattern!r} matches no linear layer of the base; its layers are {names}."
        )
    return found


PLACES = {
    "c_fc": "mlp.up",
    "up_proj": "mlp.up",
    "gate_proj": "mlp.gate",
    "down_proj": "mlp.down",
    "mlp.c_proj": "mlp.down",
    "c_attn": "attention.qkv",
    "query_key_value": "attention.qkv",
    "q_proj": "attention.q",
    "k_proj": "attention.k",
    "v_proj": "attention.v",
    "o_proj": "attention.out",
    "out_proj": "attention.out",
    "attn.c_proj": "attention.out",
    "attention.dense": "attention.out",
    "self_attention.dense": "attention.out",
    "mlp": "mlp",
}
"""What linear layers do, by the end of their path."""


def place_of(path: str) -> str:
    """What the module at a path does: `mlp.up`, `attention.q`; its own name if that is unknown."""
    names = path.split(".")
    return PLACES.get(".".join(names[-2:])) or PLACES.get(names[-1]) or names[-1]


def sizes(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer; GPT-2's Conv1D keeps its weight transposed."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer works on x: autocast's where it is on, else x's own."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
