"""The words of a text in any script, as Rouge-L compares them."""

from unicodedata import normalize

import regex
from rouge_score.tokenizers import Tokenizer

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}ー"
"""Scripts that are written without spaces between words."""
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
    """A tokenizer for `rouge_score` that finds the words of any script.

    In ASCII text with words, the words are those of `rouge_score`'s default tokenizer without
    stemming: runs of letters and digits. A character is a word of its own in scripts without
    spaces, such as Japanese, Chinese and Thai, and so is an emoji. In a text without any word,
    every character is one, so that an answer given exactly never scores 0.
    """

    def tokenize(self, text: str) -> list[str]:
        """Return the words in their order, with case, widths and ligatures folded."""
        # Compatibility forms of symbols are letters: NFKC would make the word cokeTM of Coke™.
        text = _NO_SYMBOLS.sub(lambda run: normalize("NFKC", run[0]), _VARIATION.sub("", text))
        text = normalize("NFC", text.casefold())
        return _WORD.findall(text) or _CHARACTER.findall(text)
