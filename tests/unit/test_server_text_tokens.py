"""luce/server/text_tokens.py: which tokens a text of the reply is made of."""

from __future__ import annotations

from luce.engine.events import Token
from luce.server.text_tokens import TextTokens
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, ReasoningPart, TextPart

END = 99


def texts(*steps: tuple[str, list[Part]], last: tuple[str, list[Part]] | None = None) -> list[tuple[str, list[int]]]:
    """Each text with its tokens; step i is token i, whose text it has, and the parts that it makes certain."""
    tokens = TextTokens(lambda token: token == END)
    found: list[Part] = []
    for i, (text, parts) in enumerate(steps):
        found += tokens.of(parts, Token(i, text), text)
    found += tokens.of([], Token(END, ""), "")
    if last is not None:
        found += tokens.of(last[1], None, last[0])
    return [(part.text, [token.id for token in part.tokens]) for part in found if isinstance(part, TextPart)]


def said(text: str) -> tuple[str, list[Part]]:
    return text, [TextPart(text)]


def test_each_token_has_its_text() -> None:
    assert texts(said("a"), said(" b")) == [("a", [0]), (" b", [1])]


def test_tokens_whose_text_comes_later_belong_to_that_text() -> None:
    # The bytes of a character, and the beginning of a stop string that was none.
    assert texts(("", []), ("", []), said("é!"), ("", []), said("STx")) == [("é!", [0, 1, 2]), ("STx", [3, 4])]


def test_markers_and_reasoning_have_none() -> None:
    found = texts(
        ("<think>", []),
        ("Hm", [ReasoningPart("Hm")]),
        ("", []),
        ("ü", [ReasoningPart("ü")]),
        ("</think>", []),
        ("\n\n", []),
        said("Yes"),
    )
    assert found == [("Yes", [6])]


def test_a_token_may_end_the_reasoning_and_begin_the_text() -> None:
    assert texts(("m</think>No", [ReasoningPart("m"), TextPart("No")]), said(".")) == [("No", [0]), (".", [1])]


def test_calls_have_none() -> None:
    found = texts(
        said("I look "),
        ("<tool", []),
        ("_call>", []),
        ("get", [CallStarted(0, "get")]),
        ("{}", [CallArguments(0, "{}")]),
        ("", []),
        ("</tool_call>", [CallEnded(0)]),
        ("\n", []),
        ("so", [TextPart("\nso")]),
    )
    assert found == [("I look ", [0]), ("\nso", [7, 8])]


def test_a_malformed_call_is_text_with_all_its_tokens() -> None:
    assert texts(("<tool", []), ("_call>", []), ("x", [TextPart("<tool_call>x")])) == [("<tool_call>x", [0, 1, 2])]


def test_what_is_held_back_keeps_its_token_for_later() -> None:
    assert texts(("a", [TextPart("a")]), ("<to", []), ("y", [TextPart("<toy")])) == [("a", [0]), ("<toy", [1, 2])]
    assert texts(("a<", [TextPart("a")]), ("b", [TextPart("<b")])) == [("a", [0]), ("<b", [1])]


def test_the_end_of_the_reply_gives_what_was_held_back() -> None:
    assert texts(said("a"), ("", []), last=("ST", [TextPart("ST")])) == [("a", [0]), ("ST", [1])]
