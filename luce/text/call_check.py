"""Whether a chat template writes calls in the dialect that was chosen for it: a call is rendered and read back."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

from luce.errors import LuceError
from luce.text.call_parser import CallableTools
from luce.text.chat import ChatFormat
from luce.text.reply_parser import CallArguments, CallStarted

_NAME = "check_call"
#: a value of each type that templates print in all dialects
_ARGUMENTS: dict[str, Any] = {
    "text": 'two\n "lines"',
    "count": 3,
    "share": 0.5,
    "flag": True,
    "list": ["a", 1],
    "inner": {"key": "value"},
}
_TYPES = ("string", "integer", "number", "boolean", "array", "object")
_SCHEMA = {"type": "object", "properties": {key: {"type": kind} for key, kind in zip(_ARGUMENTS, _TYPES, strict=True)}}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "A check.", "parameters": _SCHEMA}}]
_USER: dict[str, Any] = {"role": "user", "content": "Check."}
_CALL = {"id": "check0000", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
_TURN: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "check0000", "name": _NAME, "content": "done"},
]


def call_mismatch(chat: ChatFormat) -> str | None:
    """What is wrong with a call that the template has written, on one line; None if it is read back as it was, or the
    file has no template. Blocks while the template renders."""
    if chat.template is None:
        return None
    try:
        whole = chat.prompt([_USER, *_TURN], tools=_TOOLS, add_generation_prompt=False)
        asked = chat.prompt([_USER], tools=_TOOLS)
    except LuceError as error:
        return f"the chat template refuses a conversation with a call ({error})"
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, asked, strict=False)))
    tools = CallableTools({_NAME: _SCHEMA})
    text = chat.reply_text((), whole[:shared], remember=False, tools=tools)
    parser = chat.reply_parser(whole[:shared], tools)
    parts = [part for token in whole[shared:] for part in parser.push(token, text.push(token))]
    parts += parser.flush(text.flush())
    calls = sum(isinstance(part, CallStarted) for part in parts)
    if calls != 1:
        return f"of one call that the chat template writes, {calls} are found"
    found = json.loads("".join(part.fragment for part in parts if isinstance(part, CallArguments)))
    wrong = [key for key in {**_ARGUMENTS, **found} if found.get(key) != _ARGUMENTS.get(key)]
    kinds = dict(zip(_ARGUMENTS, _TYPES, strict=True))
    return (
        f"arguments that the chat template writes are read back otherwise ({_listed(wrong, kinds)})" if wrong else None
    )


def _listed(keys: list[str], kinds: dict[str, str]) -> str:
    return ", ".join(kinds.get(key, f"a further one, {key[:40]!r}") for key in keys)
