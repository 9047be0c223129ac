"""The messages of clients as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce.errors import RequestError

Message = Mapping[str, Any]
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: known roles, content as one string, tool arguments as objects."""
    plain = dict(message)
    if plain.get("role") == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if content is None:
        plain["content"] = ""
    elif isinstance(content, list | tuple):
        plain["content"] = "".join(_part(part, index, i) for i, part in enumerate(content))
    return plain


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the system messages at the start joined into one."""
    count = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if count < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in messages[:count])
    return [{**messages[0], "content": joined}, *messages[count:]]


def as_user(message: dict[str, Any]) -> dict[str, Any]:
    """The message; a system message as one of the user."""
    if message.get("role") != "system":
        return message
    return {**message, "role": "user", "content": f"System: {message['content']}"}


def with_system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the system message at the start of the first user message, for templates that take none."""
    first, *others = messages
    if first.get("role") != "system" or not others or others[0].get("role") != "user":
        return messages
    return [{**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]]


def _part(part: Any, message: int, index: int) -> str:
    where = f"messages[{message}].content[{index}]"
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXT_PARTS.get(kind)) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise RequestError(f"{where}: only text parts are supported", param=where, code="unsupported_content")
    return text
