"""The data room: text files or data sets become documents, tokens, batches and windows."""

from coterie.data.divide import divided_texts
from coterie.data.spec import ClientSpec, DataSpec, DivideSpec, Fractions, Limits
from coterie.data.texts import Texts, client_texts
from coterie.data.tokens import ClientData, Tokens, pooled, public_tokens, tokenise
from coterie.data.windows import evaluation_windows, sample_batch

__all__ = [
    "ClientData",
    "ClientSpec",
    "DataSpec",
    "DivideSpec",
    "Fractions",
    "Limits",
    "Texts",
    "Tokens",
    "client_texts",
    "divided_texts",
    "evaluation_windows",
    "pooled",
    "public_tokens",
    "sample_batch",
    "tokenise",
]
