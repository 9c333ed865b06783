"""The tokenizer of ROUGE-L, for texts in any script."""

from unicodedata import normalize

import regex
from rouge_score.tokenizers import Tokenizer

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}ー"
"""The scripts that are written without spaces between words, and the mark of long vowels."""
_WORD = regex.compile(
    rf"""(?V1)
    (?=[[\p{{L}}\p{{N}}]&&[{_UNSPACED}]])\X  # a character of a script without spaces
    | [[\p{{L}}\p{{N}}]--[{_UNSPACED}]][[\p{{L}}\p{{M}}\p{{N}}\u200c\u200d]--[{_UNSPACED}]]*
    | (?=[[\p{{Extended_Pictographic}}\p{{Regional_Indicator}}]--[©®™]])\X  # an emoji
    """,
    regex.VERBOSE,
)
_NO_SYMBOLS = regex.compile(r"\P{S}+")
_CHARACTER = regex.compile(r"(?=\S)\X")
_VARIATION = regex.compile(r"\p{Variation_Selector}")


class UnicodeTokenizer(Tokenizer):
    """A tokenizer for `rouge_score` that splits a text in any script into words.

    A word is a run of letters and digits. Every emoji is a word, and so is every character of a
    script that is written without spaces between words, such as Chinese, Japanese or Thai. The
    words of an ASCII text are the same as those of `rouge_score`'s default tokenizer without
    stemming. If a text contains no words, for example because it consists of punctuation, every
    character is treated as a word. An answer that equals the right answer therefore never scores 0.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text in order and in lower case.

        Full-width characters and ligatures are replaced with plain characters.
        """
        # Symbols keep their form: NFKC would turn the ™ of Coke™ into letters (the word coketm).
        text = _NO_SYMBOLS.sub(lambda run: normalize("NFKC", run[0]), _VARIATION.sub("", text))
        text = normalize("NFC", text.casefold())
        return _WORD.findall(text) or _CHARACTER.findall(text)
