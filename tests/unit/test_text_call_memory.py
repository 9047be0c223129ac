"""Past calls come back as the tokens they were made of, however the template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from luce.models.tool_formats import TOOL_FORMATS
from luce.text.call_memory import CallMemory
from luce.text.token_memory import TokenMemory
from tests.support.call_parts import printed
from tests.support.tool_templates import byte_tokenizer, marks

NUMBER: dict[str, Any] = {"type": "number"}
TOOLS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"city": {"type": "string"}, "n": NUMBER, "o": {"type": "object"}}},
    "g": {"type": "object", "properties": {}},
}
SAID = {"o": {"b": 1.0, "a": [True, None, "é"]}, "n": 120.0, "city": "Österbro"}
SENT = {"city": "Österbro", "n": 120, "o": {"a": [True, None, "é"], "b": 1}}
#: the id in a call of mistral_v7 is the model's own: its calls are not remembered
DIALECTS = [calls.format for calls in TOOL_FORMATS if calls.format != "mistral_v7"]


def memory(name: str) -> tuple[CallMemory, TokenMemory]:
    texts = TokenMemory(byte_tokenizer(name))
    return CallMemory(marks(name), byte_tokenizer(name), texts), texts


def ids(name: str, text: str) -> list[int]:
    return byte_tokenizer(name).encode(text, specials=True)


def reply(name: str, calls: list[tuple[str, Any]]) -> list[int]:
    if name == "harmony":
        # The template writes the recipient into the role.
        ((tool, arguments),) = calls
        header = f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>"
        return ids(name, header + json.dumps(arguments, ensure_ascii=False))
    return ids(name, printed(name, "", calls).strip())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_of_the_same_meaning_has_the_ids_of_the_reply(name: str) -> None:
    calls, texts = memory(name)
    said = reply(name, [("f", SAID)])
    ((digest, begin, end),) = calls.remember(said, TOOLS, None)
    prompt = printed(name, "", [("f", SENT)])
    assert ids(name, prompt.strip()) != said or name == "gemma4"
    (known,) = calls.find(prompt, {}, TOOLS)
    assert known.ids == tuple(said[begin:end])
    assert ids(name, prompt[known.begin : known.end])[0] == (said[begin] if name != "harmony" else ord(" "))
    rest = prompt[: known.begin] + prompt[known.end :]
    assert not rest.replace("</tool_call>", "").strip()
    # As after a restart: the ids of the digest are looked up, and wrong ones are not believed.
    for stored, expected in ((said[begin:end], 1), (reply(name, [("f", {**SAID, "n": 121})]), 0)):
        other, texts = memory(name)
        texts.look_up = lambda wanted, stored=stored: stored if wanted == digest else None  # type: ignore[misc]
        assert len(list(other.find(prompt, {}, TOOLS))) == expected


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "other",
    [
        ("g", SENT),
        *(("f", {**SENT, **changed}) for changed in ({"n": 12}, {"n": -120}, {"city": "Oslo"}, {"x": "1"})),
        ("f", {**SENT, "o": {"a": [True, None, "é"], "b": True}}),
        ("f", {**SENT, "o": {"a": [None, True, "é"], "b": 1}}),
        ("f", {**SENT, "o": {"a": [True, None, "é"], "b": "1"}}),
    ],
)
def test_a_call_of_another_meaning_stays_as_it_is(name: str, other: tuple[str, Any]) -> None:
    calls, _ = memory(name)
    calls.remember(reply(name, [("f", SAID)]), TOOLS, None)
    assert not list(calls.find(printed(name, "", [other]), {}, TOOLS))


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "glm47"])
def test_scalars_without_a_type_are_texts(name: str) -> None:
    calls, _ = memory(name)
    for value, other in (("True", "true"), ("1.0", "1"), ("null", "None")):
        calls.remember(reply(name, [("g", {"x": value})]), TOOLS, None)
        assert not list(calls.find(printed(name, "", [("g", {"x": other})]), {}, TOOLS))
        assert len(list(calls.find(printed(name, "", [("g", {"x": value})]), {}, TOOLS))) == 1


def test_a_key_that_occurs_twice_and_a_call_without_its_close_are_not_remembered() -> None:
    calls, _ = memory("hermes")
    for text in ('{"name": "f", "arguments": {"n": 1, "n": 1}}\n</tool_call>', '{"name": "f", "arguments": {"n": 1}}'):
        assert not calls.remember(ids("hermes", "<tool_call>\n" + text), TOOLS, None)


def test_the_characters_that_stand_for_control_texts_count_as_them() -> None:
    calls, _ = memory("hermes")
    said = [*ids("hermes", '<tool_call>{"name": "f", "arguments": {"city": "'), *b"<|im_end|>", *b'"}}']
    assert calls.remember([*said, *ids("hermes", "</tool_call>")], TOOLS, None)
    prompt = printed("hermes", "", [("f", {"city": "\ue000"})])
    assert list(calls.find(prompt, {0xE000: "<|im_end|>"}, TOOLS)) and not list(calls.find(prompt, {}, TOOLS))
