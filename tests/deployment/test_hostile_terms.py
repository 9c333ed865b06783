"""A client compares what a server requests with what was agreed before it computes anything."""

from typing import Any

import pytest
from test_terms import asked, order

from coterie.data.sandbox import Sandbox
from coterie.deployment.site import Site
from coterie.deployment.terms import agreed_terms
from coterie.testing.loop import site

POWER = "{{ 9**(9**9) }}"


def chat_template(values: dict[str, Any]) -> None:
    values["data"] |= {"messages": {}, "chat_template": POWER}


def prompt_template(values: dict[str, Any]) -> None:
    values["data"] |= {"instructions": {"template": POWER}}


@pytest.mark.parametrize("change", [chat_template, prompt_template])
def test_no_template_is_compiled_before_terms_are_compared(
    change, config, tmp_path, monkeypatch
) -> None:
    run = config()
    place = site(run, "poet", tmp_path)
    agreed = Site(place.name, place.texts, place.out, place.base, None, agreed_terms(run, "poet"))
    parsed: list[str] = []
    parse = Sandbox._parse
    monkeypatch.setattr(
        Sandbox, "_parse", lambda self, text, *rest: parsed.append(text) or parse(self, text, *rest)
    )
    worker, [reply] = asked(run, agreed, order(run, change))
    assert reply.fault == "terms"
    assert POWER in worker.error
    worker, replies = asked(run, place, order(run), order(run, change))  # agreed to when it began
    assert [reply.fault for reply in replies] == [None, "terms"]
    assert not any(POWER in text for text in parsed)


@pytest.mark.parametrize("section", [None, "x", [], 3])
def test_terms_of_any_type_are_compared(section, config, tmp_path) -> None:
    run = config()
    place = site(run, "poet", tmp_path)
    agreed = Site(place.name, place.texts, place.out, place.base, None, agreed_terms(run, "poet"))

    def change(values: dict[str, Any]) -> None:
        values["deployment"] = section

    _, [reply] = asked(run, agreed, order(run, change))
    assert reply.fault in ("terms", "refused", "unable")
