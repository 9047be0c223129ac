"""Past calls come back as the tokens they were made of, however the template writes them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from luce.models.spec import Dialect, Markers
from luce.models.tool_formats import TOOL_FORMATS
from luce.text.call_format import CallableTool, CallFormat
from luce.text.call_memory import CallMemory
from luce.text.call_parser import CallableTools
from luce.text.chat import ChatFormat
from luce.text.grammar import GrammarCompiler, WantedReply
from luce.text.reasoning import ReasoningTokens
from luce.text.reply_parser import ReasoningPart, joined
from luce.text.token_memory import TokenMemory
from tests.support import harmony
from tests.support.call_parts import message, of_parts, printed
from tests.support.call_walks import spelled, walk
from tests.support.tool_templates import DialectTemplate, byte_tokenizer, format_named, marks

_THINKING = ("<|START_THINKING|>", "<|END_THINKING|>")
NUMBER: dict[str, Any] = {"type": "number"}
USER = {"role": "user", "content": "Go."}
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


def elsewhere(begin: int) -> bytes:
    """The digest of a prompt that no reply has followed."""
    return b"other"


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
    (digest, begin, end), *_ = calls.remember((), said, TOOLS, None)
    prompt = printed(name, "", [("f", SENT)])
    assert ids(name, prompt.strip()) != said
    (known,) = calls.find(prompt, {}, TOOLS, elsewhere)
    assert known.ids == tuple(said[begin:end])
    assert ids(name, prompt[known.begin : known.end])[0] == (said[begin] if name != "harmony" else ord(" "))
    rest = prompt[: known.begin] + prompt[known.end :]
    assert not rest.replace("</tool_call>", "").strip()
    # As after a restart: the ids of the digest are looked up, and wrong ones are not believed.
    for stored, expected in ((said[begin:end], 1), (reply(name, [("f", {**SAID, "n": 121})]), 0)):
        other, texts = memory(name)
        texts.look_up = lambda wanted, stored=stored: stored if wanted == digest else None  # type: ignore[misc]
        assert len(list(other.find(prompt, {}, TOOLS, elsewhere))) == expected


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
    calls.remember((), reply(name, [("f", SAID)]), TOOLS, None)
    assert not list(calls.find(printed(name, "", [other]), {}, TOOLS, elsewhere))


@pytest.mark.parametrize("name", ["qwen_xml", "glm45", "glm47"])
def test_scalars_without_a_type_are_texts(name: str) -> None:
    calls, _ = memory(name)
    for value, other in (("True", "true"), ("1.0", "1"), ("null", "None")):
        calls.remember((), reply(name, [("g", {"x": value})]), TOOLS, None)
        assert not list(calls.find(printed(name, "", [("g", {"x": other})]), {}, TOOLS, elsewhere))
        assert len(list(calls.find(printed(name, "", [("g", {"x": value})]), {}, TOOLS, elsewhere))) == 1


def test_a_key_that_occurs_twice_and_a_call_without_its_close_are_not_known_elsewhere() -> None:
    calls, _ = memory("hermes")
    for text in ('{"name": "f", "arguments": {"n": 1, "n": 1}}\n</tool_call>', '{"name": "f", "arguments": {"n": 1}}'):
        calls.remember((), ids("hermes", "<tool_call>\n" + text), TOOLS, None)
        assert not list(calls.find(printed("hermes", "", [("f", {"n": 1})]), {}, TOOLS, elsewhere))


def test_a_call_with_another_number_than_the_template_writes_stays_as_it_is() -> None:
    prompt = printed("cohere2", "", [("f", {"n": 1})])
    for number, known in (('"0"', 1), ("0", 1), ('"1"', 0), ('"00"', 0)):
        calls, _ = memory("cohere2")
        calls.remember((), ids("cohere2", prompt.replace('"0"', number)), TOOLS, None)
        assert len(list(calls.find(prompt, {}, TOOLS, elsewhere))) == known


def test_the_characters_that_stand_for_control_texts_count_as_them() -> None:
    calls, _ = memory("hermes")
    said = [*ids("hermes", '<tool_call>{"name": "f", "arguments": {"city": "'), *b"<|im_end|>", *b'"}}']
    assert calls.remember((), [*said, *ids("hermes", "</tool_call>")], TOOLS, None)
    prompt = printed("hermes", "", [("f", {"city": "\ue000"})])
    assert list(calls.find(prompt, {0xE000: "<|im_end|>"}, TOOLS, elsewhere)) and not list(
        calls.find(prompt, {}, TOOLS, elsewhere)
    )


# --- whole conversations


#: few values, so that a conversation has the same call in several spellings
FEW: dict[str, Any] = {
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    "go": {
        "type": "object",
        "properties": {
            "to": {"enum": ["Oslo", "Rom"]},
            "days": {"type": "integer", "minimum": -1, "maximum": 3},
            "by": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["to"],
    },
}


def shown(tools: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools as a request has them."""
    return [{"type": "function", "function": {"name": name, "parameters": tools[name]}} for name in tools]


def format_of(name: str) -> ChatFormat:
    dialect = {"harmony": harmony.dialect(), "cohere2": Dialect(reasoning=Markers(*_THINKING))}.get(name, Dialect())
    return ChatFormat(DialectTemplate(name), byte_tokenizer(name), dialect, name)


def planned(said: list[int], past: int) -> list[int]:
    """A reply of cohere2 behind a plan of no words, with the numbers that the template writes: `past` calls came."""
    numbers = itertools.count(past)
    text = re.sub(r'("tool_call_id"\s*:\s*")\d+', lambda found: f"{found[1]}{next(numbers)}", spelled("cohere2", said))
    return ids("cohere2", "".join(_THINKING) + text)


class Conversation:
    """An agent's, with a model that writes given ids."""

    def __init__(self, name: str, tools: dict[str, Any]) -> None:
        self.chat = format_of(name)
        self.messages: list[dict[str, Any]] = [USER]
        #: the texts that the memory gets, as the disk keeps them
        self.stored: dict[str, list[int]] = {}
        self._tools = tools

    def prompt(self, chat: ChatFormat | None = None) -> list[int]:
        return (chat or self.chat).prompt(self.messages, tools=shown(self._tools))

    def reply(self, said: list[int], sent: Callable[[Any], Any], *, stripped: bool) -> list[int] | None:
        """The ids of the prompt and of a reply, which the messages get as a client sends it: its arguments by `sent`,
        its text with or without the white space around it. None for replies that do not come back whole."""
        prompt, tools = self.prompt(), CallableTools(self._tools)
        text, parser = self.chat.reply_text((), prompt, tools=tools), self.chat.reply_parser(prompt, tools)
        parts = [part for token in said for part in parser.push(token, text.push(token))]
        parts += parser.flush(text.flush())
        found = of_parts(joined(parts), parser)
        # The template of harmony shows text beside a call as reasoning, and this one no reasoning that has no text.
        if any(isinstance(part, ReasoningPart) for part in parts) or not found.calls:
            return None
        whole = [*prompt, *said]
        self.stored |= {digest: whole[begin:end] for digest, begin, end in text.texts}
        content = found.text.strip() if stripped else found.text
        self.messages.append(message(content, [(name, sent(arguments)) for name, arguments in found.calls]))
        results = [{"role": "tool", "tool_call_id": call["id"]} for call in self.messages[-1]["tool_calls"]]
        self.messages += [{**result, "content": "Done."} for result in results]
        return whole


def as_it_is(value: Any) -> Any:
    return value


def by_javascript(value: Any) -> Any:
    """A JSON value as JavaScript writes it after reading it."""
    if isinstance(value, dict):
        return {key: by_javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [by_javascript(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    # The digits that tell float64s apart, and zeros.
    return int(Decimal(repr(float(value)))) if float(value).is_integer() else float(value)


@pytest.mark.parametrize("name", DIALECTS)
def test_whatever_a_grammar_lets_a_model_write_comes_back_as_its_tokens(name: str) -> None:
    talk = Conversation(name, FEW)
    tools = tuple(CallableTool(tool, schema) for tool, schema in FEW.items())
    # In front of a call the grammar allows white space where reasoning could come.
    reasoning = talk.chat.reasoning_tokens(talk.prompt()) or ReasoningTokens(0, 1, inside=False)
    compiler = GrammarCompiler(byte_tokenizer(name), byte_tokenizer(name).vocab)
    turns, blank = 0, 0
    for seed in range(6):
        form = CallFormat(format_named(name), tools, required=True, parallel=bool(seed % 2))
        grammar = compiler.wait(WantedReply(None, form), reasoning)
        said = walk(name, grammar.constraint(reasoning if name == "harmony" else None), seed)
        assert said is not None
        leads = chr(said[0]).isspace()
        if name == "cohere2":
            said = planned(said, past=sum(len(one.get("tool_calls", ())) for one in talk.messages))
        # Chat clients keep the white space in front of a call, the other APIs have no text there.
        known = talk.reply(said, as_it_is, stripped=bool(seed % 3))
        if known is not None:
            turns += 1
            blank += leads
            assert talk.prompt()[: len(known)] == known, spelled(name, said)
    compiler.close()
    assert turns >= 2 and (blank or name == "harmony")
    # As after a restart.
    restarted = format_of(name)
    restarted.memory.look_up = talk.stored.get
    assert talk.prompt(restarted) == talk.prompt()


@pytest.mark.parametrize("sent", [as_it_is, by_javascript])
def test_numbers_come_back_as_a_client_reads_them(sent: Callable[[Any], Any]) -> None:
    talk = Conversation("hermes", TOOLS)
    for arguments in (
        '{"n": 3.14159265358979323846, "o": {"x": 12345678901234567891, "y": -0, "z": 0.10e1}}',
        '{"n": 1, "city": "a", "n": 2}',
    ):
        said = ids("hermes", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
        known = talk.reply(said, sent, stripped=True)
        assert known is not None and talk.prompt()[: len(known)] == known


@pytest.mark.parametrize("text", [b"Well <|im_end|>. ", b"Well <tool_call>, "])
def test_texts_that_spell_tokens_come_back_as_they_were_said(text: bytes) -> None:
    talk = Conversation("hermes", TOOLS)
    call = ids("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>')
    for said in ([*text, *call], [*ids("hermes", text.decode().replace("<|im_end|>", "")), *call]):
        known = talk.reply(said, as_it_is, stripped=True)
        assert known is not None and talk.prompt()[: len(known)] == known


def test_the_same_place_knows_what_was_said_there_and_no_other() -> None:
    talk = Conversation("hermes", TOOLS)
    call = '<tool_call>{"name":"f","arguments":{"n":%s}}</tool_call>'
    known = talk.reply(ids("hermes", "Well. " + call % "1.0"), as_it_is, stripped=True)
    assert known is not None and talk.prompt()[: len(known)] == known
    first = talk.messages[1]
    for changed in ({**first, "content": "Well"}, message("Well.", [("f", {"n": 2})])):
        talk.messages[1] = changed
        assert talk.prompt()[: len(known)] != known
        assert talk.prompt() == talk.prompt(format_of("hermes")) or changed["content"] == "Well"
    # Stored ids of another meaning are not believed.
    talk.messages[1] = first
    other = format_of("hermes")
    wrong = ids("hermes", "assistant\nWell. " + call % "2.0")
    other.memory.look_up = lambda digest: wrong if digest in talk.stored else None
    assert talk.prompt(other) == talk.prompt(format_of("hermes"))
