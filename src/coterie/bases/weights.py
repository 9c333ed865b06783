"""Formats of a base's weights in memory."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from coterie.bases.devices import check_memory
from coterie.bases.precision import Precision
from coterie.bases.spec import BaseSpec
from coterie.errors import CoterieError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# bitsandbytes warns of every input dtype that it casts, and of missing kernels.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def format_of(base: BaseSpec, precision: Precision | None) -> dict[str, Any]:
    """Return the options with which transformers loads a base in the required number format.

    See `load_base` for the format. In a quantised base, all linear layers except the output head
    are quantised. The other weights are in fp32 if `precision` is fp32, and otherwise in bf16.

    Raises:
        CoterieError: The base is quantised, but bitsandbytes is not installed.
    """
    if base.weights in DTYPES:
        return {"dtype": DTYPES[base.weights]}
    if base.weights is None:
        return {"dtype": torch.float32 if precision == "fp32" else "auto"}
    _check_bitsandbytes(base)
    dtype = DTYPES[precision or "bf16"]
    if base.weights == "int8":
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"dtype": dtype, "quantization_config": quantisation}


def check_weights_fit(
    base: BaseSpec, skeleton: PreTrainedModel, dtype: Any, devices: Sequence[torch.device]
) -> None:
    """Refuse a base whose weights do not fit on their devices, before the weights are read.

    Args:
        base: The base.
        skeleton: The base without weights.
        dtype: The option `dtype` that `format_of` returns.
        devices: The devices of the base.

    Raises:
        CoterieError: The weights are larger than the devices' memory, or have a number format that
            a device does not support.
    """
    stored: Any = skeleton.config.dtype if dtype == "auto" else dtype
    if stored == torch.float64 and any(device.type == "mps" for device in devices):
        raise CoterieError(
            f"The base {base} is stored in float64, which a Mac's GPU (mps) cannot compute with; "
            "set base.weights: fp32, or `device` to cpu."
        )
    width = 2 if stored is None else stored.itemsize  # None: unknown, but at least 2
    linear = {"int8": 1.0, "nf4": 0.5}.get(base.weights or "", width)
    ends = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    whole = {id(p) for module in ends if module is not None for p in module.parameters()}
    sizes = (
        p.numel() * (linear if p.ndim == 2 and id(p) not in whole else width)
        for p in (*skeleton.parameters(), *skeleton.buffers())
    )
    quantised = "base.weights: nf4, " if base.weights != "nf4" else ""
    remedies = f"{quantised}`base` to a smaller one, or `device` to more or larger GPUs"
    check_memory(f"The base {base}", int(sum(sizes)), devices, remedies)


def _check_bitsandbytes(base: BaseSpec) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise CoterieError(
            f"The base {base} requires bitsandbytes, which is not installed; run: pip install "
            "'coterie[quantised]'."
        ) from error


def settle(model: PreTrainedModel) -> None:
    """Prepare a freshly loaded model for training.

    Weights in float16 are converted to bfloat16. In 4-bit layers, settings of bitsandbytes that
    would make results depend on earlier calls are overridden.
    """
    for parameter in model.parameters():
        # Gradients overflow in float16; bfloat16 takes the same memory.
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.to(torch.bfloat16)
    linear: Any
    for linear in model.modules():
        # Two properties of bitsandbytes make the result of a 4-bit layer depend on earlier calls.
        # On some CPUs, a forward pass without gradients repacks the weight for a product that has
        # no gradient, so training after an evaluation would be wrong. And the dtype of the
        # first input determines the dtype of all later computation.
        if hasattr(linear, "compute_type_is_set"):
            linear.support_avx512bf16_for_cpu = False
            linear.compute_type_is_set = True
