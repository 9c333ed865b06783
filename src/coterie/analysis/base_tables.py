"""Tables about a base: its architecture, the layers that adapters cover, and what a run needs."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from coterie.adapters import Adapter, Layout, Trainable
from coterie.adapters.coverage import coverage
from coterie.analysis.held import kept_dtype
from coterie.analysis.need import Need, need_of
from coterie.analysis.sizes import clients_by_base
from coterie.analysis.tables import Table
from coterie.bases import BaseSpec, check_base, load_skeleton, load_tokenizer
from coterie.bases.checks import check_vocabulary, embedding_rows
from coterie.bases.devices import device_type
from coterie.bases.sites import QUERY_VALUE, layers
from coterie.config.run import RunConfig
from coterie.errors import CoterieError, plural
from coterie.memory import process_memory
from coterie.methods.adapter import AdapterMethod
from coterie.training.context import ClientId

QUERIES_AND_VALUES = Layout(generalists=0, specialists=0, targets=QUERY_VALUE)
LAYOUTS = {
    "experts and LoRA, as in the method comigs-1g1s": Layout(),
    "LoRA on queries and values, as in the method fedit": QUERIES_AND_VALUES,
}
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
"""The names of device types in tables."""


def base_table(spec: BaseSpec, config: RunConfig) -> Table:
    """Return a table of a base's architecture and size, without loading the base's weights."""
    check_base(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    tokenizer = load_tokenizer(spec, config.root)
    check_vocabulary(spec.name, tokenizer, skeleton)
    text_config = skeleton.config.get_text_config()
    window = getattr(text_config, "max_position_embeddings", None)
    blocks = {type(layer).__name__: 0 for layer in layers(skeleton).values()}
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    dtype = kept_dtype(skeleton)
    template = "the base's own" if tokenizer.chat_template else "none (Coterie's plain template)"
    rows = [
        ("architecture", type(skeleton).__name__),
        ("parameters", f"{count / 1e6:,.1f} million"),
        ("weights", f"{str(dtype).removeprefix('torch.')}, {_mib(count * dtype.itemsize)} MiB"),
        ("layers", f"{len(layers(skeleton))} ({', '.join(blocks)})"),
        ("width", f"{text_config.hidden_size:,}"),
        ("context", "no limit" if window is None else f"{window:,} tokens"),
        ("vocabulary", f"{len(tokenizer):,} tokens; {embedding_rows(skeleton):,} embeddings"),
        ("chat template", template),
    ]
    return Table(str(spec), ("", "base"), rows)


def coverage_table(spec: BaseSpec, config: RunConfig, client: ClientId | None) -> Table:
    """Return a table that shows which layers of a base have adapters.

    Args:
        spec: The base.
        config: The run.
        client: The client for whose adapter the layers are shown. If `client` is None, or if the
            method trains no adapters, the layers are shown for the adapters of two common methods.
    """
    skeleton: Any = load_skeleton(spec, config.root)
    method = config.method
    makers: dict[str, Callable[[], Trainable]] = {
        name: partial(Adapter, skeleton, layout, 0, "", lambda parameter: True)
        for name, layout in LAYOUTS.items()
    }
    if client is not None and isinstance(method, AdapterMethod):
        makers = {config.label: partial(method.adapter, skeleton, config.seed, client)}
    rows: list[tuple[str, str]] = []
    for name, make in makers.items():
        try:
            lines = coverage(skeleton, make().parameters().values()).lines()
        except CoterieError as error:
            lines = (str(error),)
        rows += [(name, line) for line in lines or ("none",)]
    return Table("layers that adapters cover", ("adapter", "location in the base"), rows)


def need_tables(config: RunConfig) -> Iterator[Table]:
    """Yield two tables for each base of a run: what a client, the server and the disk need."""
    libraries, device = process_memory(), device_type(config.device)
    for spec, name in clients_by_base(config).items():
        title, need = f"{config.label} on {spec}", need_of(config, name, device)
        if need is None:
            note = "There is no estimate for this method with this base."
            yield Table(title, ("", "memory"), (), note)
            continue
        libraries = libraries if device == "cpu" else 0
        training = config.training_of(name)
        memory = {
            "Python and libraries (measured in this process)": libraries,
            "base": need.weights,
            "checkpoint, memory-mapped (the OS can reclaim it)": need.pages,
            "adapter, gradients, optimiser state": need.adapter,
            "copies, and the best model so far": need.copies,
            f"training step ({training.at_once} samples at once)": need.step,
            f"scoring ({config.evaluation.batch} windows at once)": need.scoring,
            "applying a download": need.receiving,
            "unused memory of the heap": need.work - int(need.work / (1 + need.heap)),
            "peak memory of one client's process": libraries + need.memory,
        }
        note = (
            f"Computed for a {DEVICES.get(device, device)} and windows of {config.data.window} "
            "tokens. The peak includes the training step, scoring or applying a download, "
            "whichever needs more memory. In the local engine, each additional client adds the "
            "memory of one adapter, its gradients, its optimiser state and its copies."
        )
        rows = [(item, _mib(size)) for item, size in memory.items() if size]
        yield Table(title, ("memory of a client", "MiB"), rows, note)
        yield _run_table(need)


def _run_table(need: Need) -> Table:
    """Return a table of a run's traffic, of the server's memory and of the disk."""
    note = "The largest download includes other clients' uploads if the method forwards them."
    columns = (f"a run with {plural(need.clients, 'client')}", "MiB")
    if need.exchange is None:
        note = "There is no estimate of this method's messages."
        return Table("traffic, server and disk", columns, (), note)
    sizes = {
        "largest upload of a client": need.exchange.up,
        "largest download of a client": need.exchange.down + need.exchange.peers,
        "server's memory, without Python and libraries": need.exchange.server,
        "run folder with all clients (two checkpoints)": need.disk,
    }
    rows = [(item, f"{size / 2**20:,.1f}") for item, size in sizes.items()]
    return Table("traffic, server and disk", columns, rows, note)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"
