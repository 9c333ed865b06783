"""Writing with a client's model: on from a prompt, or an answer to the run's template."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.cli import terminal
from coterie.errors import CoterieError


@dataclass(frozen=True)
class Writing:
    """How to write: at most `tokens` tokens; temperature 0 takes the likeliest each time."""

    tokens: int
    temperature: float
    top_p: float
    seed: int


def write(run: Path, client: str, prompt: str, how: Writing) -> str:
    """The prompt and what the client's model writes after it.

    Raises CoterieError if the prompt and the tokens asked for do not fit in the base's context.
    """
    from coterie.api import tokenizer
    from coterie.runs import RunFolder

    if RunFolder(run).description["config"]["data"].get("messages") is not None:
        terminal.complain(
            "Note: this run is on conversations, and --prompt is continued as plain text. To talk "
            f"with the model: coterie chat {run} --client {client}"
        )
    encoder: Any = tokenizer(run, client)
    ids = encoder(prompt or encoder.bos_token or encoder.eos_token)["input_ids"]
    found = _continued(run, client, ids, [encoder.eos_token_id], how)
    return encoder.decode(found, skip_special_tokens=True)


def answer(run: Path, client: str, fields: Mapping[str, str], how: Writing) -> str:
    """What the client's model answers to the run's template, filled in with these fields.

    Raises CoterieError, too, if the run is not on instructions or the template has other fields.
    """
    from coterie.api import tokenizer
    from coterie.bases import context_token
    from coterie.data.chat import chat_template
    from coterie.data.items import Instruction, Turn
    from coterie.data.parts import PartEncoder
    from coterie.data.spec import CHAT
    from coterie.data.templates import render
    from coterie.data.tokens import bare_encoder
    from coterie.evaluation.generation import before_any, ends_of
    from coterie.runs import RunFolder

    data = RunFolder(run).description["config"]["data"]
    instructions = data.get("instructions")
    if instructions is None:
        raise CoterieError(
            f"The run {run} is not on instructions and has no template to fill in; use --prompt."
        )
    prompt = render(instructions["template"], fields, "The prompt")
    encoder: Any = tokenizer(run, client)
    begun, markers = [context_token(encoder)], ()
    if instructions["template"] == CHAT:
        chat = chat_template(encoder, data.get("chat_template"))
        parts = chat.opening_and_answer((Turn("user", prompt.strip()),))
        markers = chat.markers
        begun = []  # as the template begins
    else:
        parts = Instruction(prompt, "A").parts
    ids = [*begun, *PartEncoder(bare_encoder(encoder)[0]).opening(parts)]
    ends, stops = ends_of(encoder, markers)
    found = _continued(run, client, ids, ends, how)
    text = encoder.decode(found[len(ids) :], skip_special_tokens=True)
    return before_any(text, stops).strip()


def _continued(run: Path, client: str, ids: list[int], ends: list[int], how: Writing) -> list[int]:
    """The tokens and those that the model writes after them, up to an end token."""
    import torch

    from coterie.api import load
    from coterie.evaluation.generation import context_length, generated

    model = load(run, client)
    longest = context_length(model)
    if longest is not None and len(ids) + how.tokens > longest:
        raise CoterieError(
            f"The prompt's {len(ids)} tokens and {how.tokens} new ones exceed the base's "
            f"context of {longest} tokens; lower --tokens."
        )
    torch.manual_seed(how.seed)
    warm = how.temperature > 0
    sampling = {"temperature": how.temperature, "top_p": how.top_p} if warm else {}
    prompt = torch.tensor([ids], device=model.device)
    found = generated(
        model,
        prompt,
        torch.ones_like(prompt),
        max_new_tokens=how.tokens,
        do_sample=warm,
        eos_token_id=ends,
        pad_token_id=ends[0],
        **sampling,
    )
    return found[0].tolist()
