"""The data room: text files or data sets become documents, tokens, batches and windows."""

from coterie.data.batch import Batch
from coterie.data.divide import divided_texts
from coterie.data.examples import Examples, Instruction
from coterie.data.spec import (
    ClientSpec,
    DataSpec,
    DivideSpec,
    Fractions,
    InstructionSpec,
    Limits,
)
from coterie.data.templates import inlined, render
from coterie.data.texts import Texts, client_texts
from coterie.data.tokens import ClientData, Split, Tokens, pooled, tokenise
from coterie.data.windows import evaluation_windows, sample_batch, tokens_per_sample

__all__ = [
    "Batch",
    "ClientData",
    "ClientSpec",
    "DataSpec",
    "DivideSpec",
    "Examples",
    "Fractions",
    "Instruction",
    "InstructionSpec",
    "Limits",
    "Split",
    "Texts",
    "Tokens",
    "client_texts",
    "divided_texts",
    "evaluation_windows",
    "inlined",
    "pooled",
    "render",
    "sample_batch",
    "tokenise",
    "tokens_per_sample",
]
