"""The memory of a forward and a backward pass, computed from the shapes of a base and its adapter.

Automatic differentiation stores tensors in the forward pass and releases them in the backward pass.
For T tokens, hidden states of width d, and c bytes per number in the dtype of matrix products, a
decoder layer stores:

- for each norm, its input in float32: 4 T d;
- for attention, the queries, keys, values and outputs; eager attention also stores the
  probabilities of rows x heads x window x window pairs, in float32 and in the working dtype;
- for a frozen MLP of width w, the inputs of its activation and of the product with the gate: c T w
  each; for a mixture of experts, the outputs of its frozen up-projections, or the activations of
  its k experts (`training.store_activations`);
- for each low-rank pair, its input and its low-rank product.

Frozen linear layers store nothing, because their weights have no gradient. With checkpointing, only
the input of each layer is stored, and one layer at a time is computed again. The output head
computes logits in pieces, so it stores a fixed number of logits and the gradient of its input.

A step needs the most memory when the logits are computed, or when the last layer's backward pass
begins. Scoring stores nothing, and needs memory for one layer or for the logits.
"""

from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, prod
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers import activations as hf

from coterie.adapters.amole import AmoleLinear
from coterie.adapters.lora import LoraLinear, pairs_in
from coterie.adapters.mixture import Mixture
from coterie.adapters.routed import Routed
from coterie.bases.checks import embedding_rows
from coterie.bases.sites import (
    Linear,
    MlpShape,
    StandIn,
    children_of,
    expert_sites,
    layers,
    mlp_shape,
    sizes,
    width,
)
from coterie.losses.head import LOGITS_AT_ONCE

STORED_BY_ACTIVATION: dict[type[nn.Module], int] = {hf.NewGELUActivation: 4}
"""The number of tensors that an activation function stores; 1 for all other functions."""
OUTPUTS = ("o", "c_proj", "down", "dense", "fc2", "fc_out")
"""Beginnings of the names of linear layers that compute the output of attention or of an MLP."""
NOT_UPCAST = ("GPT2Attention",)
"""Classes whose eager attention computes probabilities in the dtype of the scores.

All other classes convert the scores to float32.
"""


OTHER_FORMULAS = ("bloom", "falcon", "gemma4_text", "gpt_neo", "gptj")
"""Model types whose attention or norms store tensors that this file does not count."""


def is_known(model: PreTrainedModel) -> bool:
    """Return whether the formulas of this file apply to a base.

    Each layer must consist of attention, an MLP of a known shape and norms. For example, the
    formulas do not apply to bases with mixtures of experts, state-space blocks or linear attention.

    Args:
        model: The base without an adapter.
    """
    if model.config.get_text_config().model_type in OTHER_FORMULAS:
        return False
    sites = expert_sites(model)
    if any(shape is None or path in layers(model) for path, (_, shape) in sites.items()):
        return False
    modules = chain.from_iterable(layer.modules() for layer in layers(model).values())
    containers = (m for m in modules if any(isinstance(c, Linear) for c in m.children()))
    known = all("Attention" in type(m).__name__ or mlp_shape(m) for m in containers)
    return known and len(sites) == len(layers(model)) > 0


@dataclass(frozen=True)
class Pass:
    """The sizes of a forward pass."""

    rows: int
    """The number of samples."""
    window: int
    """The number of tokens of a sample."""
    residual: int
    """Bytes per number in the hidden states between layers."""
    working: int
    """Bytes per number in matrix products (c)."""
    eager: bool
    """Whether attention stores the probabilities of all pairs of tokens."""
    device: str
    """The type of the device, such as `cuda`."""
    quantised: str | None = None
    """The format of quantised linear layers: `int8`, `nf4` or None."""
    full: bool = False
    """Whether all weights of the base are trained (full fine-tuning)."""

    @property
    def tokens(self) -> int:
        """The number of tokens (T)."""
        return self.rows * self.window


@dataclass(frozen=True)
class LayerBytes:
    """The bytes that a part of a decoder layer, or the sum of several parts, needs."""

    stored: float = 0
    """Tensors that the forward pass stores for the backward pass."""
    forward: float = 0
    """Other tensors of the forward pass, at most."""
    backward: float = 0
    """Other tensors of the backward pass, at most."""
    kept: float = 0
    """Tensors that a forward pass without gradients keeps until the end of the layer."""

    def __add__(self, other: "LayerBytes") -> "LayerBytes":
        """Return the bytes of two parts, which are computed one after the other."""
        forward = max(self.forward, self.kept + other.forward)
        backward = max(self.backward, other.backward)
        return LayerBytes(self.stored + other.stored, forward, backward, self.kept + other.kept)


def training_bytes(model: PreTrainedModel, size: Pass, *, checkpoints: bool, stores: bool) -> int:
    """Return the peak memory of the forward and backward pass of a training step.

    Args:
        model: The base with its adapter attached; its tensors may be on the meta device.
        size: The sizes of the pass.
        checkpoints: Whether activations are recomputed (`training.checkpointing`).
        stores: Whether experts store their activations (`training.store_activations`).
    """
    blocks = [_layer(model, layer, size, stores) for layer in layers(model).values()]
    hidden = size.tokens * width(model)
    stored = sum(block.stored for block in blocks) - 4 * hidden  # no gradient at the first norm
    again = 0.0
    if checkpoints:
        again = max(block.stored for block in blocks)
        stored = len(blocks) * hidden * size.residual
    gradient = hidden * (size.residual + size.working)
    backward = gradient + again + max(block.backward for block in blocks)
    final = hidden * 4  # the input of the last norm
    if size.full:  # the sums of the weights and their differences
        stored += size.working * sum(parameter.numel() for parameter in model.parameters())
    return int(stored + max(final + _head(model, size, gradients=True), backward))


def scoring_bytes(model: PreTrainedModel, size: Pass) -> int:
    """Return the peak memory of a forward pass without gradients."""
    blocks = [_layer(model, layer, size, stores=False) for layer in layers(model).values()]
    # The layer's input, the residual, the norm's output, a block's output, and a cast copy of it.
    cast = size.working if size.working != size.residual else 0
    in_layer = size.tokens * width(model) * (4 * size.residual + cast)
    if sum(isinstance(module, nn.Embedding) for module in model.modules()) > 1:
        # The embeddings of tokens and of positions, whose sum is the first layer's input.
        in_layer += (size.rows + 1) * size.window * width(model) * size.residual
    in_layer += max(block.forward for block in blocks)
    return int(max(in_layer, _head(model, size, gradients=False)))


def _head(model: PreTrainedModel, size: Pass, *, gradients: bool) -> float:
    """Return the memory of the output head and the loss; see `coterie.losses.head`.

    For one piece of the tokens, the head stores the product, the logits in float32 and their
    softmax. For all tokens, it stores the hidden states and their gradients.
    """
    vocabulary = embedding_rows(model)
    if size.full and gradients:  # all logits at once: log-probabilities and two gradients
        return size.tokens * (12 * vocabulary + width(model) * size.working)
    at_once = LOGITS_AT_ONCE.get(size.device, LOGITS_AT_ONCE["cuda"])
    pieces = min(size.tokens, ceil(size.tokens * vocabulary / at_once))
    per_logit = 8 if size.working == 4 else 8 + size.working
    hidden = size.tokens * width(model) * size.working
    return ceil(size.tokens / pieces) * vocabulary * per_logit + hidden * (1 + 2 * gradients)


def _layer(model: PreTrainedModel, layer: nn.Module, size: Pass, stores: bool) -> LayerBytes:
    """Return the bytes of a decoder layer."""
    total, inputs, skipped = LayerBytes(), set[tuple[str, bool]](), set[nn.Module]()
    normed = _normed(layer, size)
    for path, module in layer.named_modules():
        if module in skipped:
            continue
        if isinstance(module, Mixture):
            skipped |= {*module.base.modules()}
            total += _mixture(module, size, stores)
        elif isinstance(module, Routed | AmoleLinear | LoraLinear | Linear):
            skipped |= {module.base} if isinstance(module, StandIn) else set()
            total += LayerBytes() if isinstance(module, Linear) else _low_rank(module, size)
            parent, _, name = path.rpartition(".")
            key = parent, name.startswith(OUTPUTS)
            # Layers with equal inputs store one tensor, unless each layer casts its input.
            if _stores_input(module, size) and (normed != size.working or key not in inputs):
                total += LayerBytes(size.tokens * _columns(module) * size.working)
                inputs.add(key)
        elif "Norm" in type(module).__name__:
            numbers = size.tokens * _normed_numbers(model, path, module)
            scaled = size.residual if size.full and not isinstance(module, nn.LayerNorm) else 0
            exact = normed if isinstance(module, nn.LayerNorm) else 4
            total += LayerBytes(numbers * (exact + scaled))
        elif "Attention" in type(module).__name__:
            total += _attention(model, size, type(module).__name__ not in NOT_UPCAST)
        elif shape := mlp_shape(module):
            total += _frozen_mlp(module, shape, size)
    if size.quantised:  # a layer's weight is dequantised when it is needed
        linears = (m.in_features * m.out_features for m in layer.modules() if type(m) is nn.Linear)
        weight = max(linears, default=0) * size.working
        total = replace(total, forward=total.forward + weight, backward=total.backward + weight)
    return total


def _stores_input(module: nn.Module, size: Pass) -> bool:
    """Return whether a linear layer stores its input.

    The input is stored if the gradient of a factor A or of the layer's weight depends on it, or if
    the weight is in int8.
    """
    trains_input = isinstance(module, AmoleLinear) or (
        isinstance(module, StandIn) and any(not pair.freeze_A for pair in pairs_in(module))
    )
    return trains_input or size.full or size.quantised == "int8"


def _columns(module: nn.Module) -> int:
    """Return the width of the input of a linear layer or of a block with low-rank pairs."""
    if isinstance(module, Linear):
        return sizes(module)[0]
    assert isinstance(module, StandIn)
    return module.A.shape[2] if isinstance(module, AmoleLinear) else pairs_in(module)[0].A.shape[1]


def _normed(layer: nn.Module, size: Pass) -> int:
    """Return the bytes per number in the outputs of a layer's norms.

    On a GPU, autocast computes `nn.LayerNorm` in float32. Other norms return the dtype of their
    input.
    """
    casts = size.device != "cpu" and any(isinstance(m, nn.LayerNorm) for m in layer.modules())
    return 4 if casts and size.working < 4 else size.residual


def _normed_numbers(model: PreTrainedModel, path: str, norm: nn.Module) -> int:
    """Count the numbers per token that a norm reads; norms in attention read all heads."""
    numbers = sum(parameter.numel() for parameter in norm.parameters(recurse=False))
    numbers = numbers // 2 if isinstance(norm, nn.LayerNorm) and norm.bias is not None else numbers
    heads, key_heads, head = _heads(model)
    name = path.rpartition(".")[2]
    if numbers == head and name.startswith(("q", "k")):
        return numbers * (heads if name.startswith("q") else key_heads)
    return numbers


def _heads(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the numbers of attention heads and of key-value heads, and the width of a head."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _attention(model: PreTrainedModel, size: Pass, upcasts: bool) -> LayerBytes:
    """Return the bytes of attention, without its linear layers.

    Args:
        model: The base.
        size: The sizes of the pass.
        upcasts: Whether eager attention computes probabilities in float32.
    """
    heads, key_heads, head = _heads(model)
    c, token = size.working, size.tokens * head * size.working
    if size.eager:  # keys and values are repeated for all heads
        pairs = size.rows * heads * size.window**2
        exact = 4 if upcasts or size.residual == 4 else c
        cast = c if c < exact else 0
        values, work = 3 * heads * token, pairs * (2 * exact + cast)
        return LayerBytes(values + pairs * (exact + cast), values + work, work, pairs * c)
    qkvo = (2 * heads + 2 * key_heads) * token
    rotated = 3 * heads * size.tokens * head * size.residual
    forward = qkvo - heads * token + rotated
    return LayerBytes(qkvo + 4 * heads * size.tokens, forward=forward, backward=qkvo)


def _frozen_mlp(mlp: nn.Module, shape: MlpShape, size: Pass) -> LayerBytes:
    """Return the bytes of an MLP without experts."""
    wide = sizes(children_of(mlp)[shape.up[0]])[1] // (2 if shape.fused else 1)
    unit = size.tokens * wide * size.working
    stored = STORED_BY_ACTIVATION.get(type(getattr(mlp, shape.act)), 1)
    gated = len(shape.up) == 2 or shape.fused
    forward = max(stored, 2 + gated)
    return LayerBytes((stored + 2 * gated) * unit, forward * unit, (2 + 2 * gated) * unit)


def _mixture(mixture: Mixture, size: Pass, stores: bool) -> LayerBytes:
    """Return the bytes of a mixture of experts inside an MLP; see `adapters.fused.WideExperts`."""
    shape, k, n = mixture.shape, mixture.slots, len(mixture.experts)
    dim, wide = sizes(children_of(mixture.base)[shape.up[0]])
    wide = wide // (2 if shape.fused else 1)
    up = 2 if len(shape.up) == 2 or shape.fused else 1
    gated, several = up == 2, k > 1
    tokens, c = size.tokens, size.working
    ranks = sum(len(pair.A) for pair in pairs_in(mixture)) // len(shape.linears)
    low = (ranks if k == n else k * ranks) * (up + 1) * c + ranks * (len(shape.up) + 1) * c
    factors = sum(p.numel() for pair in pairs_in(mixture) for p in (pair.A, pair.B)) * c
    routed = (4 * dim if c < 4 else 0) + 16 * n if mixture.router is not None else 0
    dropped = c * (k * wide + 2 * n * len(shape.up) * dim) if mixture.dropout else 0
    inputs = 0 if all(pair.freeze_A for pair in pairs_in(mixture)) else c * dim
    if size.quantised == "int8":
        inputs = c * (dim + wide)
    unit = tokens * wide * c
    kept = (k * (up + 1) if stores else up) * unit
    again = 0 if stores else up + 1  # p and z of one slot
    return LayerBytes(
        stored=kept + tokens * (inputs + low + routed + dropped) + factors,
        forward=(2 * up + k + gated) * unit,
        backward=(2 + again + up + up * several) * unit,
    )


def _low_rank(module: StandIn, size: Pass) -> LayerBytes:
    """Return the bytes of low-rank pairs on a linear layer or beside a block, without the input."""
    c = size.working
    if isinstance(module, AmoleLinear):
        columns, experts, rank = module.A.shape[2], len(module.held), module.layout.rank
        numbers = len(module.router) * (4 + c) + rank * (4 + 2 * c) * experts + 2 * rank * c
        factors = sum(prod(t.shape) for t in (module.A, module.B, module.router)) * c
        return LayerBytes(size.tokens * (numbers + 16 * experts) + factors, backward=columns)
    ranks = sum(len(pair.A) for pair in pairs_in(module))
    columns = pairs_in(module)[0].A.shape[1]
    numbers = ranks * c
    if isinstance(module, Routed) and module.router is not None:
        numbers += ranks * c + (4 * columns if c < 4 else 0) + 16 * len(module.experts)
    if isinstance(module, LoraLinear | Routed) and module.dropout:
        numbers += columns * c * len(pairs_in(module))
    casts = c < 4 or isinstance(module, Routed)
    factors = sum(p.numel() for pair in pairs_in(module) for p in (pair.A, pair.B)) * c * casts
    return LayerBytes(size.tokens * numbers + factors)
