"""Conversations at random, and the chat templates that tests render them with."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from coterie.data.items import Conversation, Turn

TEMPLATES = Path(__file__).parents[3] / "shared" / "templates"
NAMES = [
    *("cohere2", "deepseekv3", "gemma", "gemma3", "glm4moe", "gptoss", "granite_3.0_instruct"),
    *("lfm2", "lfm2_2_5", "llama3", "llama3_1", "llama3_2", "llama_2_chat", "mistral", "phi3"),
    *("phi3_5", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
    *("qwen3_instruct_2507", "zephyr"),
]
needs_templates = pytest.mark.skipif(
    not TEMPLATES.is_dir(), reason="needs the chat templates beside the repository"
)
WORDS = [
    *("yes", "no", "the", "a+b", "(c)*", "[d]", "\\e", "$1", "^f|", "{{ g }}", "{% h %}"),
    *("<|im_end|>", "<end>", "[INST]", "</s>", "###", "User:", "assistant", "café", "漢字", "🙂"),
    *("\u2028", "don't", "I'm", "3.14", ".", ",", "!", "\t", "ï", ""),
]
SPACES = ("", "", " ", "\n", "  \n\t")


class Exchange(NamedTuple):
    """One exchange: a question, thoughts of the assistant (None: without), and the answer."""

    user: str
    thinking: str | None
    answer: str


class Talk(NamedTuple):
    """A conversation, in parts."""

    system: str | None
    exchanges: list[Exchange]

    def turns(self) -> tuple[Turn, ...]:
        turns = [] if self.system is None else [Turn("system", self.system)]
        for user, thinking, answer in self.exchanges:
            tag = "" if thinking is None else f"<think>{thinking}</think>"
            turns += [Turn("user", user), Turn("assistant", tag + answer)]
        return tuple(turns)

    def conversation(self) -> Conversation:
        return Conversation(self.turns())

    def in_words(self) -> "Talk":
        """Return the conversation with a unique word in place of every text."""
        exchanges = [
            Exchange(f"USER{n}USER", None if thinking is None else f"THINK{n}THINK", f"SAID{n}SAID")
            for n, (_, thinking, _) in enumerate(self.exchanges)
        ]
        return Talk(None if self.system is None else "ADVICE", exchanges)


def talk(draw: random.Random, system: bool = True, longest: int = 8) -> Talk:
    def text() -> str:
        words = draw.choices(WORDS, k=draw.randint(1, longest))
        inside = draw.choice((" ", " ", "\n")).join([*words, draw.choice(("so", "what?", "1"))])
        return draw.choice(SPACES) + inside + draw.choice(SPACES)

    count = range(draw.randint(1, 5))
    exchanges = [Exchange(text(), text() if draw.random() < 0.3 else None, text()) for _ in count]
    return Talk(text() if system and draw.random() < 0.5 else None, exchanges)
