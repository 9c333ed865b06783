"""Coverage of a base by an adapter: the adapted modules, and the layers without adapted modules."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from coterie.adapters.parameter import Parameter
from coterie.bases.sites import Linear, children_of, decoder_walk, layers, walk


@dataclass(frozen=True)
class Coverage:
    """The modules of a base that have low-rank pairs, and the decoder layers without such modules.

    There are two kinds of low-rank pairs, experts and LoRA. For each kind, the modules and the
    layers are listed separately.
    """

    covered: dict[tuple[str, str], set[int]]
    """Indices of the decoder layers that have low-rank pairs. A key consists of the pairs' kind
    (`experts` or `LoRA`) and the pairs' position, such as `inside GPT2MLP (c_fc, c_proj)` or
    `beside MixtralSparseMoeBlock`."""
    total: int
    """Number of decoder layers of the base."""
    others: dict[str, tuple[str, int]]
    """A mapping from each kind of low-rank pairs to information about the decoder layers without
    this kind. The information consists of the class names of the blocks in these layers, and the
    number of these layers. Kinds that all or no decoder layers have are left out."""
    whole: bool = False
    """Whether all weights of the base are trained."""

    def lines(self) -> tuple[str, ...]:
        """Format the coverage as lines of text.

        One possible line is `experts inside GPT2MLP (c_fc, c_proj) in all 2 layers`.
        """
        lines = ["all weights"] if self.whole else []
        for (kind, position), numbers in self.covered.items():
            count = len(numbers)
            many = f"all {count}" if count == self.total else f"{count} of {self.total}"
            lines.append(f"{kind} {position} in {many} layers")
        for kind, (blocks, count) in self.others.items():
            lines.append(f"no {kind} in the other {count} layers ({blocks})")
        return tuple(lines)


def coverage(base: nn.Module, parameters: Iterable[Parameter]) -> Coverage:
    """Determine which modules of a base an adapter covers.

    Args:
        base: The base; it may be on the meta device.
        parameters: The adapter's parameters.
    """
    parameters = list(parameters)
    modules = dict(decoder_walk(base))
    owners: dict[tuple[str, str, str], tuple[dict[str, None], set[int]]] = {}
    for parameter in parameters:
        if parameter.factor != "B" or parameter.layer is None:
            continue
        kind, way = parameter.kind.pairs
        owner, _, name = parameter.path.rpartition(".")
        if not isinstance(modules[parameter.path], Linear):
            owner, name, way = parameter.path, "", "beside"
        names, numbers = owners.setdefault((kind, way, type(modules[owner]).__name__), ({}, set()))
        names[name] = None
        numbers.add(parameter.layer)
    covered = {
        (kind, f"{way} {owner}{_in_brackets(names)}"): numbers
        for (kind, way, owner), (names, numbers) in sorted(owners.items(), reverse=True)
    }
    decoder = list(layers(base).values())
    others: dict[str, tuple[str, int]] = {}
    for kind in dict.fromkeys(kind for kind, _ in covered):
        has = (numbers for (other, _), numbers in covered.items() if other == kind)
        lacks = set(range(len(decoder))).difference(*has)
        if lacks:
            blocks = sorted({block for i in lacks for block in _blocks(decoder[i])})
            others[kind] = ", ".join(blocks), len(lacks)
    whole = any(parameter.kind.replaces_weights for parameter in parameters)
    return Coverage(covered, len(decoder), others, whole)


def _in_brackets(names: Iterable[str]) -> str:
    text = ", ".join(filter(None, names))
    return f" ({text})" if text else ""


def _blocks(layer: nn.Module) -> list[str]:
    """Return the class names of a decoder layer's blocks that contain linear layers."""
    blocks = children_of(layer).values()
    return [type(b).__name__ for b in blocks if any(isinstance(m, Linear) for _, m in walk(b))]
