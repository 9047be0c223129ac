"""Content blocks of /v1/messages: what parts become, streamed and whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from luce.server.content_blocks import ContentBlocks
from luce.server.thinking_signature import carried, sign
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, ReasoningPart, TextPart, joined
from tests.support.messages_stream import StreamedMessage

Json = dict[str, Any]

REASONED = [ReasoningPart("Let me "), ReasoningPart("see.\n")]
SPACE = [TextPart("\n"), TextPart("\n")]
SAID = [TextPart("\n"), TextPart("I will"), TextPart(" look. ")]


def call(number: int, name: str, *fragments: str) -> list[Part]:
    return [CallStarted(number, name), *(CallArguments(number, text) for text in fragments), CallEnded(number)]


def grown(parts: Sequence[Part], *, omits: bool = False) -> tuple[Json, ContentBlocks]:
    """The message that the events say, and the blocks."""
    blocks = ContentBlocks(lambda text: f"signed {text}", omits_thinking=omits)
    message = StreamedMessage()
    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {"output_tokens": 1}}
    message.take({"type": "message_start", "message": {**empty, "role": "assistant", "type": "message", "id": "msg_"}})
    events = [event for part in parts for event in blocks.extend([part])]
    for event in (*events, *blocks.close()):
        assert event.name == event.data["type"]
        message.take(event.data)
    return message.message, blocks


def whole(blocks: ContentBlocks) -> list[Json]:
    """The complete blocks as a client reads them."""
    found: list[Json] = msgspec.json.decode(msgspec.json.encode(blocks.closed))
    return found


@pytest.mark.parametrize(
    ("parts", "kinds"),
    [
        ([], []),
        (SPACE, []),
        (SAID, ["text"]),
        (REASONED, ["thinking"]),
        ([*REASONED, *SAID], ["thinking", "text"]),
        ([*REASONED, *SPACE, *call(0, "f", "{}")], ["thinking", "tool_use"]),
        ([*SAID, *call(0, "f", "{}"), *SPACE, *call(1, "g", "{}")], ["text", "tool_use", "tool_use"]),
        ([*call(0, "f", '{"a":', "[1]}"), *SAID, *REASONED], ["tool_use", "text", "thinking"]),
        ([*SPACE, *REASONED, *SPACE], ["thinking"]),
    ],
)
def test_a_block_is_opened_only_for_content(parts: list[Part], kinds: list[str]) -> None:
    message, blocks = grown(parts)
    assert [block["type"] for block in message["content"]] == kinds
    assert message["content"] == whole(blocks)
    assert blocks.calls == ("tool_use" in kinds)


def test_blocks_hold_what_the_parts_say() -> None:
    message, _ = grown([*REASONED, *SAID, *call(0, "read", '{"path": "a', '.txt", "n": 3}'), *call(1, "stop", "{}")])
    thinking, text, read, stop = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Let me see.\n", "signature": "signed Let me see.\n"}
    assert text == {"type": "text", "text": "\nI will look. "}
    assert (read["name"], read["input"]) == ("read", {"path": "a.txt", "n": 3})
    assert (stop["name"], stop["input"]) == ("stop", {})
    assert read["id"].startswith("toolu_") and len({read["id"], stop["id"]}) == 2


def test_the_division_into_parts_changes_nothing() -> None:
    parts = [*REASONED, *SPACE, *SAID, *call(0, "f", '{"a"', ": 1}"), *SPACE, *call(1, "g", "{", "}")]
    together, _ = grown(joined(parts))
    for seed in range(20):
        cut: list[Part] = []
        for part in parts:
            if isinstance(part, TextPart | ReasoningPart):
                at = random.Random(seed).randint(0, len(part.text))
                cut += [type(part)(text) for text in (part.text[:at], part.text[at:]) if text]
            else:
                cut.append(part)
        found, _ = grown(cut)
        for block in (*together["content"], *found["content"]):
            block.pop("id", None)
        assert found["content"] == together["content"]


def test_reasoning_may_be_left_to_the_signature() -> None:
    message, blocks = grown([*REASONED, *SAID], omits=True)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": "signed Let me see.\n"}
    assert message["content"] == whole(blocks)


def test_a_call_that_was_cut_has_no_arguments() -> None:
    blocks = ContentBlocks(str, omits_thinking=False)
    events = [*blocks.extend([CallStarted(0, "f"), CallArguments(0, '{"a": "b')]), *blocks.close()]
    assert [event.name for event in events] == ["content_block_start", "content_block_delta", "content_block_stop"]
    assert whole(blocks)[0]["input"] == {}


@pytest.mark.parametrize(
    "text", ['{"a": 1e400, "b": -0.0}', '{"a": 123456789012345678901234567890, "b": 1.10}', '{"a": 1, "a": 2}', "{ }"]
)
def test_arguments_come_as_the_model_wrote_them(text: str) -> None:
    _, blocks = grown([])
    for _ in (*blocks.extend(call(0, "f", text)), *blocks.close()):
        pass
    assert f'"input":{text}' in msgspec.json.encode(blocks.closed).decode()


def test_a_signature_carries_a_text_of_the_same_model_only() -> None:
    text = "Größe \ud800 🎉\n"
    signed = sign(text, "model a", carries=True)
    assert carried(signed, "model a") == text
    assert carried(signed, "model b") is None
    for at in range(0, len(signed) - 2, 5):
        changed = signed[:at] + ("A" if signed[at] != "A" else "B") + signed[at + 1 :]
        assert carried(changed, "model a") is None
    for foreign in ("", "no base64 !", "ErUBCkYIBhgCIkD", "é", sign(text, "model a", carries=False)):
        assert carried(foreign, "model a") is None
    assert sign(text, "model a", carries=False) != sign(text + ".", "model a", carries=False)
