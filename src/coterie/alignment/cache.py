"""Vocabulary maps that are kept: a map of two large vocabularies takes seconds to find.

They lie in $COTERIE_CACHE, or in ~/.cache/coterie/vocabulary-maps. The folder may be deleted at any
time; where it cannot be read or written, maps are found anew.
"""

import os
from hashlib import blake2b
from pathlib import Path

import torch

from coterie.alignment.mapping import VocabularyMap, vocabulary_map
from coterie.alignment.vocabulary import Vocabulary
from coterie.errors import CoterieError
from coterie.files import write_bytes
from coterie.messages import State

FORMAT = 1
"""Counts up when the rules of a map or the file change, so that older files are not found."""


def cached_map(source: Vocabulary, target: Vocabulary) -> VocabularyMap:
    """The map from source to target, from the cache or found now and kept there."""
    found = kept_map(source, target)
    if found is None:
        found = vocabulary_map(source, target)
        keep_map(source, target, found)
    return found


def kept_map(source: Vocabulary, target: Vocabulary) -> VocabularyMap | None:
    """A map that is in the cache; None if it is not there, or damaged."""
    try:
        state = State.decode(_path(source, target).read_bytes())
        found = VocabularyMap(state["map"]["ids"], state["map"]["distances"])
    except (OSError, RuntimeError, CoterieError, KeyError):
        return None
    shape = (len(source.tokens),)
    good = (
        found.ids.shape == found.distances.shape == shape
        and (found.ids.dtype, found.distances.dtype) == (torch.int32, torch.int16)
        and state.values.get("checksum") == _checksum(found)
    )
    return found if good else None


def keep_map(source: Vocabulary, target: Vocabulary, found: VocabularyMap) -> None:
    """Write a map into the cache, if that can be done."""
    state = State({"map": vars(found)}, {"checksum": _checksum(found)})
    try:
        path = _path(source, target)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, state.encode())
    except (OSError, RuntimeError, CoterieError):
        return


def _path(source: Vocabulary, target: Vocabulary) -> Path:
    """Raises RuntimeError if there is no home."""
    pair = f"{FORMAT} {source.digest} {target.digest}".encode()
    folder = os.environ.get("COTERIE_CACHE")
    place = Path(folder) if folder else Path.home() / ".cache/coterie/vocabulary-maps"
    return place / f"{blake2b(pair, digest_size=16).hexdigest()}.safetensors"


def _checksum(found: VocabularyMap) -> str:
    digest = blake2b(found.ids.contiguous().numpy().data, digest_size=16)
    digest.update(found.distances.contiguous().numpy().data)
    return digest.hexdigest()
