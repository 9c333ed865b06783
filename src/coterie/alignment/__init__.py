"""Token alignment: maps between two tokenizers' vocabularies, and between their token positions."""

from coterie.alignment.cache import cached_map
from coterie.alignment.mapping import VocabularyMap, vocabulary_map
from coterie.alignment.read import read_vocabulary
from coterie.alignment.vocabulary import Vocabulary

__all__ = [
    "Vocabulary",
    "VocabularyMap",
    "cached_map",
    "read_vocabulary",
    "vocabulary_map",
]
