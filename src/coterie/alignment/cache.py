"""Cache of vocabulary maps: computing the map of two large vocabularies takes seconds.

The maps are in the folder `vocabulary-maps` of Coterie's cache; see `cache_path`. If the folder
cannot be read or written, maps are recomputed.
"""

from hashlib import blake2b
from pathlib import Path

import torch

from coterie.alignment.mapping import VocabularyMap, vocabulary_map
from coterie.alignment.vocabulary import Vocabulary
from coterie.errors import CoterieError
from coterie.files import cache_path, read_file, write_bytes
from coterie.messages import State

FORMAT = 1
"""Version of the algorithm that computes maps and of the format of cache files. A new version
invalidates all cached files."""


def cached_map(source: Vocabulary, target: Vocabulary) -> VocabularyMap:
    """Return the vocabulary map from `source` to `target`.

    If the map is not in the cache, it is computed and written to the cache.
    """
    mapping = load_map(source, target)
    if mapping is None:
        mapping = vocabulary_map(source, target)
        save_map(source, target, mapping)
    return mapping


def load_map(source: Vocabulary, target: Vocabulary) -> VocabularyMap | None:
    """Read a map from the cache. Return None if the map's file is missing or damaged."""
    try:
        state = State.decode(read_file(_path(source, target)))
        mapping = VocabularyMap(state["map"]["ids"], state["map"]["distances"])
    except (OSError, RuntimeError, CoterieError, KeyError):
        return None
    shape = (len(source.tokens),)
    is_valid = (
        mapping.ids.shape == mapping.distances.shape == shape
        and (mapping.ids.dtype, mapping.distances.dtype) == (torch.int32, torch.int16)
        and state.values.get("checksum") == _checksum(mapping)
    )
    return mapping if is_valid else None


def save_map(source: Vocabulary, target: Vocabulary, mapping: VocabularyMap) -> None:
    """Write a map to the cache, or do nothing if the cache cannot be written."""
    state = State({"map": vars(mapping)}, {"checksum": _checksum(mapping)})
    try:
        path = _path(source, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, state.encode())
    except (OSError, RuntimeError, CoterieError):
        return


def _path(source: Vocabulary, target: Vocabulary) -> Path:
    """Return the path of a map's file in the cache.

    Raises:
        RuntimeError: The user has no home folder.
    """
    pair = f"{FORMAT} {source.digest} {target.digest}".encode()
    return cache_path("vocabulary-maps", f"{blake2b(pair, digest_size=16).hexdigest()}.safetensors")


def _checksum(mapping: VocabularyMap) -> str:
    digest = blake2b(mapping.ids.contiguous().numpy().data, digest_size=16)
    digest.update(mapping.distances.contiguous().numpy().data)
    return digest.hexdigest()
