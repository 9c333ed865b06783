"""What of a base an adapter covers: which layers, where in them, and what it leaves alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from coterie.adapters.parameter import Parameter
from coterie.bases.sites import Linear, children_of, decoder_walk, layers, walk


@dataclass(frozen=True)
class Coverage:
    """What an adapter stands on in a base."""

    covered: dict[tuple[str, str], set[int]]
    """Numbers of the decoder layers that have low-rank pairs: by what these are, experts or LoRA,
    and where they are, as `inside GPT2MLP (c_fc, c_proj)` or `beside MixtralSparseMoeBlock`."""
    total: int
    """Decoder layers of the base."""
    others: dict[str, tuple[str, int]]
    """Where there are layers without experts, or without LoRA, although others have some: the
    blocks of these layers, and how many layers they are."""
    whole: bool = False
    """Whether all weights of the base are trained."""

    def lines(self) -> tuple[str, ...]:
        """Such as `experts inside GPT2MLP (c_fc, c_proj) in all 2 layers`."""
        told = ["all weights"] if self.whole else []
        for (what, where), numbers in self.covered.items():
            count = len(numbers)
            many = f"all {count}" if count == self.total else f"{count} of {self.total}"
            told.append(f"{what} {where} in {many} layers")
        for what, (blocks, count) in self.others.items():
            told.append(f"no {what} in the other {count} layers ({blocks})")
        return tuple(told)


def coverage(base: nn.Module, parameters: Iterable[Parameter]) -> Coverage:
    """What some parameters of an adapter stand on; the base may be on the meta device."""
    parameters = list(parameters)
    modules = dict(decoder_walk(base))
    found: dict[tuple[str, str, str], tuple[dict[str, None], set[int]]] = {}
    for parameter in parameters:
        if parameter.factor != "B" or parameter.layer is None:
            continue
        what = "LoRA" if parameter.role == "dense" else "experts"
        owner, _, name = parameter.path.rpartition(".")
        way = "inside" if parameter.role in ("generalist", "specialist") else "on"
        if not isinstance(modules[parameter.path], Linear):
            owner, name, way = parameter.path, "", "beside"
        names, numbers = found.setdefault((what, way, type(modules[owner]).__name__), ({}, set()))
        names[name] = None
        numbers.add(parameter.layer)
    covered = {
        (what, f"{way} {kind}{_listed(names)}"): numbers
        for (what, way, kind), (names, numbers) in sorted(found.items(), reverse=True)
    }
    own = list(layers(base).values())
    others: dict[str, tuple[str, int]] = {}
    for what in dict.fromkeys(what for what, _ in covered):
        has = (numbers for (other, _), numbers in covered.items() if other == what)
        bare = set(range(len(own))).difference(*has)
        if bare:
            others[what] = ", ".join(sorted({b for i in bare for b in _blocks(own[i])})), len(bare)
    whole = any(parameter.role == "weight" for parameter in parameters)
    return Coverage(covered, len(own), others, whole)


def _listed(names: Iterable[str]) -> str:
    told = ", ".join(filter(None, names))
    return f" ({told})" if told else ""


def _blocks(layer: nn.Module) -> list[str]:
    """The kinds of blocks with linear layers in a decoder layer."""
    blocks = children_of(layer).values()
    return [type(b).__name__ for b in blocks if any(isinstance(m, Linear) for _, m in walk(b))]
