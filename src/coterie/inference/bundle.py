"""Bundles: exported folders with an adapter, from which its model is loaded without the run.

A bundle contains `coterie.json`, which describes the base; `adapter.safetensors`, which is missing
if the model is the base itself; and the base's tokenizer with the chat template of the run.
"""

from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from coterie.adapters import Trainable
from coterie.adapters.portable import unpacked
from coterie.bases import Base, BaseSpec, load_base
from coterie.bases.precision import Precision
from coterie.errors import CoterieError
from coterie.evaluation.gate import GATE, Gate
from coterie.files import read_inside
from coterie.messages import State
from coterie.runs import read

DESCRIPTION = "coterie.json"
"""The file that describes an export, in every format."""
ADAPTER = "adapter.safetensors"
BASE_ADAPTER = "base-adapter"
"""The subfolder with the LoRA adapter that the run merged into its base, if there was one."""
FORMAT = 1
"""The version of bundles."""


class _Described(BaseModel):
    """The content of a bundle's coterie.json, as far as it is needed to load the model."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Literal[1]
    base: str | dict[str, str]
    digest: str | None
    precision: Precision | None
    window: int


def is_bundle(path: Path) -> bool:
    """Return whether a folder contains a bundle."""
    try:
        return read.read_json(path, DESCRIPTION).get("export") == "bundle"
    except CoterieError:
        return False


def open_bundle(path: Path, base: str | None = None) -> tuple[Base, Trainable | None, Gate | None]:
    """Load the base of a bundle, and rebuild the adapter and the gate.

    Args:
        path: The folder of the bundle.
        base: The folder of the base on this machine; by default, the base is loaded by its name.

    Returns:
        The base; the adapter, which is not yet attached, or None if the model is the base itself;
        and the client's gate, or None if it has none.

    Raises:
        CoterieError: A file of the bundle is damaged, or the base is missing or has changed.
    """
    described = _Described(**read.read_json(path, DESCRIPTION, _Described))
    spec = BaseSpec.model_validate(described.base)
    if base is not None:
        spec = spec.model_copy(update={"name": base, "revision": None})
    if spec.adapter is not None:
        spec = spec.model_copy(update={"adapter": str((path / BASE_ADAPTER).absolute())})
    loaded = load_base(spec, described.precision, described.window)
    if described.digest not in (None, digest_of(loaded)):
        raise CoterieError(
            f"The base {spec.name!r} is not the base that the model in {path} was trained on; its "
            "weights differ. Load the original version of the base."
        )
    if not (path / ADAPTER).exists():
        return loaded, None, None
    state = State.decode(read_inside(path, ADAPTER))
    return loaded, unpacked(state, loaded.model), Gate.restored(state.parts.get(GATE), loaded)


@torch.no_grad()
def digest_of(base: Base) -> str | None:
    """Return a hash of a base's weights in float32, which no conversion to float32 changes.

    Returns:
        The hash; None if the base is quantised, as the result depends on the kind of processor.
    """
    state: dict[str, Any] = base.model.state_dict()
    if not all(tensor.is_floating_point() for tensor in base.model.parameters()):
        return None
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.float().cpu().contiguous().numpy().data)
    return digest.hexdigest()
