"""The overhead of CoMiGS in appendix B.1: operations, parameters of routers, and messages.

A pass over T tokens takes T * (2 N + 4 L d T) operations, with N parameters and L layers of width d
(Chowdhery et al., arXiv 2204.02311, appendix B); adapters add 2 operations per value and token.
GPT-2 is its configuration alone, without weights, so nothing is downloaded.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GPT2Config

from coterie.analysis.tables import Table
from coterie.methods.adapter import AdapterMethod
from coterie.methods.registry import method_from

BF16 = 2
"""Bytes of a value."""
ONE_SET = {"mlp": {"sets": 1}}
PAPER = {
    "GPT-2": ("32 GFLOP", "", ""),
    "FedAvg, one set": ("+166 MFLOP (+0.52 %)", "", ""),
    "FedAvg, two sets": ("+490 MFLOP (+1.53 %)", "", ""),
    "CoMiGS-1G1S": ("+495 MFLOP (+1.55 %)", "0.035 MB", "1.41 MB"),
}


@dataclass(frozen=True)
class Overhead:
    """The overhead of a method over its base."""

    flops: float
    """Operations of a forward pass over one sequence."""
    router: int
    """Values of the routers."""
    sent: int
    """Values of the generalists on MLPs that a client uploads in a round."""
    attention: int
    """Values of the pairs on attention that it uploads beside them."""


def base_flops(base: Any, tokens: int) -> float:
    """Return the operations of a forward pass of the base over one sequence."""
    parameters = sum(parameter.numel() for parameter in base.parameters())
    config = base.config
    return tokens * (2 * parameters + 4 * config.num_hidden_layers * config.hidden_size * tokens)


def overhead(base: Any, tokens: int, method: dict[str, Any]) -> Overhead:
    """Return the overhead of a method, each of whose experts processes every token."""
    adapted = method_from(method)
    assert isinstance(adapted, AdapterMethod)
    parts = adapted.adapter(base, 0, "anna").parameters().values()
    values = sum(part.tensor.numel() for part in parts)
    sizes: dict[str, int] = {}
    for part in parts:
        role = part.role if part.role == "router" or adapted.shared(part) else "kept"
        sizes[role] = sizes.get(role, 0) + part.tensor.numel()
    sent = (sizes.get("generalist", 0), sizes.get("dense", 0))
    return Overhead(2.0 * values * tokens, sizes.get("router", 0), *sent)


def table(tokens: int) -> Table:
    """Return a table with the computed and the published values of each method."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(GPT2Config())
    whole = base_flops(base, tokens)
    methods = {
        "FedAvg, one set": {"name": "fedavg", **ONE_SET},
        "FedAvg, two sets": {"name": "fedavg"},
        "CoMiGS-1G1S": {"name": "comigs-1g1s"},
    }
    rows = [("GPT-2", f"{whole / 1e9:.2f} GFLOP", PAPER["GPT-2"][0], "", "", "", "")]
    for name, method in methods.items():
        added = overhead(base, tokens, method)
        flops, memory, sent = PAPER[name]
        rows.append(
            (
                name,
                f"+{added.flops / 1e6:.1f} MFLOP (+{100 * added.flops / whole:.2f} %)",
                flops,
                _mib(added.router),
                memory,
                f"{_mib(added.sent)} + {_mib(added.attention)}",
                sent,
            )
        )
    return Table(
        f"One sequence of {tokens} tokens, GPT-2 (124 M), bf16",
        ("", "forward pass", "paper", "routers", "paper", "sent per round", "paper"),
        rows,
        "Sent: the generalists on MLPs + the pairs on attention, tensors alone.",
        2,
    )


def _mib(values: int) -> str:
    return f"{values * BF16 / 2**20:.3f} MiB" if values else ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sequence")
    Console().print(table(parser.parse_args().tokens))


if __name__ == "__main__":
    main()
