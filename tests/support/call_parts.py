"""What the parser of calls finds in a text, for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from luce.text.call_parser import CallParser
from luce.text.reply_parser import CallArguments, CallEnded, CallStarted, Part, ReplyParser, TextPart, joined
from tests.support.tool_templates import marks, rendered

#: where the text of an assistant's message begins and ends in the templates of tool_templates
_AROUND = {
    "gemma4": ("<|turn>model\n", "<turn|>"),
    "harmony": ("<|start|>assistant", "<|call|>"),
    "cohere2": ("<|START_THINKING|><|END_THINKING|>", "<|END_OF_TURN_TOKEN|>"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
}


class Found(NamedTuple):
    """Text, calls (name and arguments), calls that came as text, calls that were cut."""

    text: str
    calls: list[tuple[str, Any]]
    bad: int = 0
    cut: int = 0


def parser(name: str, tools: Mapping[str, Any] | None, *, special: bool = True) -> CallParser:
    """The parser of a dialect. `special`: the vocabulary has its markers as special tokens."""
    return CallParser(marks(name, special=special), tools)


def pieces(name: str, text: str, cuts: Iterable[int] = (), *, special: bool = True) -> list[str]:
    """The text as pieces, special tokens whole."""
    marked = marks(name, special=special).marked(text)
    at = sorted({0, len(marked), *(cut % (len(marked) + 1) for cut in cuts)})
    return [marked[begin:end] for begin, end in pairwise(at)]


def fed(found: CallParser, texts: Iterable[str]) -> list[Part]:
    """All parts of a reply that comes in these pieces."""
    return joined([part for text in texts for part in found.push(text)] + found.flush())


def read(name: str, text: str, tools: Mapping[str, Any], *, special: bool = True) -> Found:
    """What a whole text holds. Arguments that are no JSON fail here."""
    found = parser(name, tools, special=special)
    return of_parts(fed(found, pieces(name, text, special=special)), found)


def of_parts(parts: Sequence[Part], found: CallParser | ReplyParser) -> Found:
    """Text and calls of the parts; each call has started, has arguments and has ended."""
    text, calls = "", list[tuple[str, Any]]()
    open_name, fragments = "", list[str]()
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
        elif isinstance(part, CallStarted):
            open_name, fragments = part.name, []
            assert part.call == len(calls)
        elif isinstance(part, CallArguments):
            fragments.append(part.fragment)
        elif isinstance(part, CallEnded):
            calls.append((open_name, json.loads("".join(fragments))))
            open_name = ""
    assert not open_name
    return Found(text, calls, found.bad_calls, found.cut_calls)


def message(content: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An assistant's message with calls."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"callabc{i:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ],
    }


def printed(name: str, content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """The text of a message with calls, as the dialect's template prints it."""
    begin, end = _AROUND.get(name, ("<|im_start|>assistant\n", "<|im_end|>"))
    text = rendered(name, [message(content, calls)])
    return text[text.index(begin) + len(begin) : text.rindex(end)]
