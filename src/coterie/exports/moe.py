"""Mixture-of-experts checkpoints: a mixture of experts in the block of Mixtral or a Qwen-MoE.

The block of these architectures computes `sum_i w_i down_i(act(gate_i x) * up_i x)`, where w is a
softmax over the scores of a linear router. A mixture in a gated MLP without biases computes the
same, with `gate_i = W + g B_i A_i` and so on. Without a router, all scores are zero.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from coterie.adapters import Adapter, LoraLinear, Mixture, detach
from coterie.adapters.lora import LoraPair
from coterie.adapters.merging import merged_weight
from coterie.bases.sites import StandIn
from coterie.errors import CoterieError
from coterie.exports.format import Format
from coterie.exports.merged import rounding_note, usage
from coterie.exports.source import Source

CARRIED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "tie_word_embeddings", "rope_parameters", "attention_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Keys of a base's configuration that mean the same in every architecture below."""
WITHOUT_EFFECT = (
    *("intermediate_size", "use_cache", "architectures", "dtype", "transformers_version"),
    *("id2label", "label2id", "chunk_size_feed_forward", "output_hidden_states", "return_dict"),
    *("resid_pdrop", "embd_pdrop", "pretraining_tp", "original_max_position_embeddings"),
    *("sliding_window", "max_window_layers", "head_dim", "problem_type", "is_encoder_decoder"),
)
"""Keys that change no output of a trained model, or that are checked by themselves."""
ARCHITECTURES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
"""The architectures of bases that differ from a mixture-of-experts architecture only in the MLP."""
EMPTY = 32
"""The width of the shared expert that Qwen2-MoE requires, whose weights are zero."""


def _refusal(source: Source) -> str | None:
    adapter, config = source.adapter, source.base.model.config
    if not isinstance(adapter, Adapter) or adapter.layout.experts < 2:
        return "a mixture-of-experts checkpoint needs a mixture of at least two experts"
    if source.spec.quantised:
        return "an update cannot be added exactly to quantised weights"
    stand_ins = [m for m in source.attach().modules() if isinstance(m, StandIn)]
    if not all(isinstance(module, LoraLinear | Mixture) for module in stand_ins):
        return "the experts are not inside MLPs that are separate modules"
    if not all(_gated(module) for module in stand_ins if isinstance(module, Mixture)):
        return "the experts are inside MLPs that are not gated or have biases"
    if config.model_type not in ARCHITECTURES:
        return f"no mixture-of-experts architecture computes what {config.model_type} computes"
    return _unrepresented(config, _renormalised(adapter))


def _gated(mixture: Mixture) -> bool:
    """Return whether a mixture's MLP is gated, and has no biases."""
    shape = mixture.shape
    linears = [cast(nn.Linear, mixture.base.get_submodule(name)) for name in shape.linears]
    return (len(shape.up) == 2 or shape.fused) and all(linear.bias is None for linear in linears)


def _renormalised(adapter: Adapter) -> bool:
    """Return whether the weights of a token's experts sum to 1."""
    return adapter.layout.slots > 1


def _unrepresented(config: PreTrainedConfig, renormalised: bool) -> str | None:
    """Return a phrase that names what the target architecture lacks, or None."""
    kind = _target(config, renormalised)
    carried = {*CARRIED, *WITHOUT_EFFECT, "model_type", "layer_types"}
    carried |= {"attention_bias"} if kind == "qwen3_moe" else set()
    declared = type(config).__dataclass_fields__
    for key, value in config.to_diff_dict().items():
        if key in declared and key not in carried and value != getattr(type(config), key, None):
            return f"{kind} has no equivalent of `{key}: {value}` in the base's config.json"
    if (window := getattr(config, "sliding_window", None)) and kind != "mixtral":
        return f"{kind} has no sliding window of {window} tokens in every layer"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return f"{kind} has no layers of different kinds of attention"
    if kind == "qwen2_moe" and _head(config) != config.hidden_size // config.num_attention_heads:
        return f"{kind} has no attention heads of width {_head(config)}"
    rope = config.rope_parameters
    if config.model_type == "phi3" and (
        rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return f"{kind} has no equivalent of the position embeddings of this phi3"
    return None


def _target(config: PreTrainedConfig, renormalised: bool) -> str:
    """Return the name of the architecture of the checkpoint."""
    if config.model_type == "qwen3":
        return "qwen3_moe"
    return "mixtral" if renormalised and config.model_type != "qwen2" else "qwen2_moe"


def _head(config: PreTrainedConfig) -> int:
    """Return the width of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _config(config: PreTrainedConfig, adapter: Adapter) -> PreTrainedConfig:
    """Return the configuration of the checkpoint."""
    renormalised = _renormalised(adapter)
    kind, width = _target(config, renormalised), config.intermediate_size
    values = {key: getattr(config, key) for key in CARRIED}
    values |= {"num_experts_per_tok": adapter.layout.slots}
    values |= {"head_dim": _head(config)} if kind != "qwen2_moe" else {}
    if kind == "mixtral":
        values |= {"num_local_experts": adapter.layout.experts, "intermediate_size": width}
        values |= {"sliding_window": getattr(config, "sliding_window", None)}
    else:
        values |= {"num_experts": adapter.layout.experts, "moe_intermediate_size": width}
        values |= {"norm_topk_prob": renormalised, "intermediate_size": width}
    if kind == "qwen3_moe":
        values |= {"attention_bias": config.attention_bias}
    if kind == "qwen2_moe":
        values |= {"shared_expert_intermediate_size": EMPTY}
    return AutoConfig.for_model(kind, **values)


@torch.no_grad()
def _write(source: Source, folder: Path) -> None:
    base, adapter = source.base.model, source.adapter
    assert isinstance(adapter, Adapter)
    model = source.attach()
    mixtures = {path: m for path, m in model.named_modules() if isinstance(m, Mixture)}
    pairs = {m.lora.path: m for m in model.modules() if isinstance(m, LoraLinear)}
    config = _config(base.config, adapter)
    detach(base)
    state: dict[str, Tensor] = {}
    for name, tensor in base.state_dict().items():
        path, _, last = name.rpartition(".")
        if path.rpartition(".")[0] in mixtures:
            continue
        if last == "weight" and path in pairs:
            lora = pairs[path]
            tensor = merged_weight(base.get_submodule(path), lora.gain, lora.lora)
        state |= dict(_unfused(name, tensor, config))
    for path, mixture in mixtures.items():
        state |= {f"{path}.{name}": tensor for name, tensor in _block(mixture, config).items()}
    with torch.device("meta"):
        exported = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.model_type == "qwen2_moe" and base.config.model_type != "qwen2":
        # vLLM reads attention biases even if config.json disables them.
        state |= {
            name: torch.zeros(bias.shape)
            for name, bias in exported.state_dict().items()
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
        }
    try:
        exported.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CoterieError(
            f"The weights of {type(base).__name__} do not match those of "
            f"{type(exported).__name__}, so the model cannot be exported as moe; use --format "
            "bundle."
        ) from error
    exported.tie_weights()
    exported.generation_config = base.generation_config
    exported.save_pretrained(folder)


def _unfused(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the three weights that are stored in one tensor of Phi-3."""
    if ".qkv_proj." not in name:
        yield name, tensor
        return
    rows = _head(config) * config.num_key_value_heads
    sizes = [_head(config) * config.num_attention_heads, rows, rows]
    for letter, part in zip("qkv", tensor.split(sizes), strict=True):
        yield name.replace(".qkv_proj.", f".{letter}_proj."), part.contiguous()


def _block(mixture: Mixture, config: Any) -> dict[str, Tensor]:
    """Return the tensors of the block that replaces a mixture, by their names in the block."""
    experts = [_expert(mixture, expert) for expert in mixture.experts]
    up, down = (torch.stack(weights) for weights in zip(*experts, strict=True))
    dim = up.shape[-1]
    router = up.new_zeros(len(experts), dim) if mixture.router is None else mixture.router.detach()
    block = {"gate.weight": router, "experts.gate_up_proj": up, "experts.down_proj": down}
    if config.model_type == "qwen2_moe":
        wide, narrow = up.new_zeros(EMPTY, dim), up.new_zeros(dim, EMPTY)
        shared = {"gate_proj": wide, "up_proj": wide.clone(), "down_proj": narrow}
        block |= {f"shared_expert.{name}.weight": weight for name, weight in shared.items()}
        block |= {"shared_expert_gate.weight": up.new_zeros(1, dim)}
    return block


def _expert(mixture: Mixture, expert: nn.Module) -> tuple[Tensor, Tensor]:
    """Return an expert's weights: the gate above the up-projection, and the down-projection."""
    weights: dict[str, Tensor] = {}
    for name in mixture.shape.linears:
        pair = cast(LoraPair, expert.get_submodule(name))
        weights[name] = merged_weight(mixture.base.get_submodule(name), mixture.gain, pair)
    return torch.cat([weights[name] for name in mixture.shape.up]), weights[mixture.shape.down]


MOE = Format(
    name="moe",
    content="a mixture-of-experts checkpoint",
    library="transformers",
    refusal=_refusal,
    write=_write,
    usage=usage,
    notes=lambda source: [rounding_note()],
)
