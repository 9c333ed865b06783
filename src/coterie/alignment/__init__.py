"""Token alignment: maps between two tokenizers' vocabularies, and between their token positions."""

from coterie.alignment.cache import cached_map as cached_map
from coterie.alignment.mapping import VocabularyMap as VocabularyMap
from coterie.alignment.mapping import vocabulary_map as vocabulary_map
from coterie.alignment.read import read_vocabulary as read_vocabulary
from coterie.alignment.vocabulary import Vocabulary as Vocabulary
