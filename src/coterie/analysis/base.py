"""What a base is, where adapters stand in it, and what a run with it needs, as tables."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from coterie.adapters import Adapter, Layout, Trainable
from coterie.adapters.coverage import coverage
from coterie.analysis.need import kept_dtype, need_of, process_memory
from coterie.analysis.tables import Table
from coterie.bases import BaseSpec, check_base, load_skeleton, load_tokenizer
from coterie.bases.checks import check_vocabulary, embedding_rows
from coterie.bases.sites import QUERY_VALUE, layers
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.methods.adapter import AdapterMethod
from coterie.training.context import ClientId

LAYOUTS = {
    "experts and LoRA, as comigs-1g1s": Layout(),
    "LoRA on queries and values, as fedit": Layout(
        generalists=0, specialists=0, targets=QUERY_VALUE
    ),
}


def base_table(spec: BaseSpec, config: RunConfig) -> Table:
    """Return a base's architecture and size, from its configuration, its tokenizer and the headers
    of its weights."""
    check_base(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    tokenizer = load_tokenizer(spec, config.root)
    check_vocabulary(spec.name, tokenizer, skeleton)
    text = skeleton.config.get_text_config()
    window = getattr(text, "max_position_embeddings", None)
    blocks = {type(layer).__name__: 0 for layer in layers(skeleton).values()}
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    kept = kept_dtype(skeleton)
    template = "its own" if tokenizer.chat_template else "none; Coterie's plain one is used"
    rows = [
        ("architecture", type(skeleton).__name__),
        ("parameters", f"{count / 1e6:,.1f} million"),
        ("weights", f"{str(kept).removeprefix('torch.')}, {_mib(count * kept.itemsize)} MiB"),
        ("layers", f"{len(layers(skeleton))} ({', '.join(blocks)})"),
        ("width", f"{text.hidden_size:,}"),
        ("context", "no limit" if window is None else f"{window:,} tokens"),
        ("vocabulary", f"{len(tokenizer):,} tokens; {embedding_rows(skeleton):,} embeddings"),
        ("chat template", template),
    ]
    return Table(str(spec), ("", "base"), rows)


def stands_table(spec: BaseSpec, config: RunConfig, client: ClientId | None) -> Table:
    """Where adapters would stand in a base: a client's of the run, else those of two methods."""
    skeleton: Any = load_skeleton(spec, config.root)
    method = config.method
    makers: dict[str, Callable[[], Trainable]] = {
        what: partial(Adapter, skeleton, layout, 0, "", lambda part: True)
        for what, layout in LAYOUTS.items()
    }
    if client is not None and isinstance(method, AdapterMethod):
        makers = {config.label: partial(method.adapter, skeleton, config.seed, client)}
    rows: list[tuple[str, str]] = []
    for what, make in makers.items():
        try:
            lines = coverage(skeleton, make().parts().values()).lines()
        except CoterieError as error:
            lines = (str(error),)
        rows += [(what, line) for line in lines or ("nothing of the base",)]
    return Table("where adapters stand", ("adapter", "in the base"), rows)


def need_tables(config: RunConfig) -> Iterator[Table]:
    """For each base of a run, the memory of a client's process, and what a round sends."""
    programs = process_memory()
    names = [client.name for client in config.clients] or ["a client"]
    for spec, name in {config.base_of(name): name for name in reversed(names)}.items():
        title, need = f"{config.label} on {spec}", need_of(config, name)
        if need is None:
            note = "There is no estimate for this method, or for this base."
            yield Table(title, ("", "memory"), (), note)
            continue
        training = config.training_of(name)
        parts = {
            "Python and libraries, as here": programs,
            "base": need.weights,
            "checkpoint's pages, which the system can take back": need.pages,
            "adapter, gradients, optimiser": need.adapter,
            f"a training step ({training.at_once} samples at once)": need.step,
            f"or scoring ({config.evaluation.batch} windows at once)": need.scoring,
            "one client's process, at most": programs + need.memory,
        }
        note = (
            f"An estimate for a CPU, with windows of {config.data.window} tokens. In the local "
            "engine each further client adds its adapter and optimiser. An upload has "
            f"{need.traffic / 1e6:.2f} MB of tensors."
        )
        rows = [(what, _mib(count)) for what, count in parts.items() if count]
        yield Table(title, ("memory of a client", "MiB"), rows, note)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"
