"""Adapters as states that need neither a run nor a method, from which they can be rebuilt."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from coterie.adapters.adapter import Adapter, Trainable
from coterie.adapters.amole import AmoleAdapter, AmoleLayout
from coterie.adapters.full import FullAdapter
from coterie.adapters.layout import Layout
from coterie.adapters.lease import LeaseAdapter
from coterie.adapters.prompt import PromptAdapter, SoftPrompt, prompt_encoder, soft_prompt
from coterie.errors import CoterieError
from coterie.messages import State, check_shapes


def packed(adapter: Trainable) -> State:
    """Return an adapter as a state with its layout and all its tensors.

    Raises:
        CoterieError: The adapter is of a class that a plugin defines.
    """
    groups = {"adapter": adapter.values(), "residual": adapter.residual()}
    if (start := _start(adapter)) is not None:
        groups["start"] = {"start": start}
    copies = {g: {n: t.detach().cpu().clone() for n, t in ts.items()} for g, ts in groups.items()}
    return State({group: tensors for group, tensors in copies.items() if tensors}, _layout(adapter))


def _layout(adapter: Trainable) -> dict[str, Any]:
    """Return what `_rebuilt` needs to create an adapter of the same shape, as JSON values."""
    match adapter:
        case Adapter():
            return {"kind": "experts", "layout": asdict(adapter.layout)}
        case AmoleAdapter():
            held = {path: list(module.held) for path, module in adapter.linears.items()}
            return {"kind": "amole", "layout": asdict(adapter.layout), "held": held}
        case LeaseAdapter():
            return {"kind": "lease", "layout": asdict(adapter.layout), "own": adapter.own}
        case FullAdapter():
            return {"kind": "full"}
        case PromptAdapter():
            config = adapter.config
            is_plain = isinstance(adapter.encoder, SoftPrompt)
            hidden = None if is_plain else config.encoder_hidden_size
            kind = "prompt" if is_plain else "prompt encoder"
            return {"kind": kind, "tokens": config.num_virtual_tokens, "hidden": hidden}
    raise CoterieError(
        f"Only the adapters of coterie.adapters can be exported, not a {type(adapter).__name__}."
    )


def unpacked(state: State, base: nn.Module) -> Trainable:
    """Rebuild an adapter from the result of `packed`.

    Args:
        state: The adapter's state.
        base: The base to which the adapter will be attached.

    Raises:
        CoterieError: The state does not describe an adapter, or the adapter does not fit the base.
    """
    try:
        adapter = _rebuilt(state.values, base)
    except (KeyError, TypeError, ValueError) as error:
        raise CoterieError(f"The adapter's layout is damaged: {error}.") from None
    tensors = adapter.values()
    check_shapes(state["adapter"], {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        tensor.copy_(state["adapter"][name])
    adapter.set_residual(state["residual"])
    if (start := _start(adapter)) is not None:
        check_shapes(state["start"], {"start": tuple(start.shape)})
        start.copy_(state["start"]["start"])
    return adapter


def _rebuilt(values: Mapping[str, Any], base: nn.Module) -> Trainable:
    match values["kind"]:
        case "experts":
            return Adapter(base, Layout(**values["layout"]), 0, "", lambda _: True)
        case "amole":
            return AmoleAdapter(base, AmoleLayout(**values["layout"]), 0, values["held"])
        case "lease":
            return LeaseAdapter(base, Layout(**values["layout"]), 0, values["own"])
        case "full":
            return FullAdapter(base)
        case "prompt":
            return soft_prompt(base, values["tokens"], 0, 0.0)
        case "prompt encoder":
            return prompt_encoder(base, values["tokens"], values["hidden"], 0)
    raise ValueError(f"there is no kind {values['kind']!r}")


def _start(adapter: Trainable) -> Tensor | None:
    """Return the fixed summand of a soft prompt's vectors; None for any other adapter."""
    if isinstance(adapter, PromptAdapter) and isinstance(adapter.encoder, SoftPrompt):
        return adapter.encoder.start
    return None
