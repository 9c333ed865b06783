"""In which format a base's weights are loaded."""

import logging
from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from coterie.bases.precision import Precision
from coterie.bases.spec import BaseSpec
from coterie.errors import CoterieError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# It warns of each type of input that it casts, and of kernels that it does not find.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def format_of(base: BaseSpec, precision: Precision | None) -> dict[str, Any]:
    """What transformers' loader is told of a base's format; see `load_base`.

    Of a quantised base, that are the linear layers but for the output head; the rest is in bf16,
    or in fp32 where that is the precision. Raises CoterieError if bitsandbytes is missing.
    """
    if base.weights in DTYPES:
        return {"dtype": DTYPES[base.weights]}
    if base.weights is None:
        return {"dtype": torch.float32 if precision == "fp32" else "auto"}
    _check_bitsandbytes(base)
    dtype = DTYPES[precision or "bf16"]
    if base.weights == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"dtype": dtype, "quantization_config": how}


def _check_bitsandbytes(base: BaseSpec) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise CoterieError(
            f"The base {base} needs bitsandbytes; install the extra: pip install "
            "'coterie[quantised]'."
        ) from error


def settle(model: PreTrainedModel) -> None:
    """Make a model that was just loaded ready for training in its format."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:  # in which gradients overflow; bfloat16 is as large
            parameter.data = parameter.data.to(torch.bfloat16)
    linear: Any
    for linear in model.modules():
        # Two habits make a 4-bit layer of bitsandbytes depend on its past. Without gradients, some
        # CPUs pack its weight anew, for a product that has no gradient ever after: what was trained
        # after an evaluation would be wrong. And the first input decides the dtype that it computes
        # in.
        if hasattr(linear, "compute_type_is_set"):
            linear.support_avx512bf16_for_cpu = False
            linear.compute_type_is_set = True
