"""The input items of a /v1/responses body as messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from luce.server.errors import invalid, unsupported
from luce.server.responses_request import (
    CustomCallItem,
    FunctionCallItem,
    LocalShellCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from luce.server.responses_tools import INPUT, model_name
from luce.server.schema import Message, converted
from luce.server.thinking_signature import carried

_Json = dict[str, Any]

_LOCAL_SHELL = "local_shell"
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
#: items whose content only OpenAI's servers have
_ELSEWHERE = ("item_reference", "compaction", "compaction_summary")


@dataclass
class _Assistant:
    """Neighbouring items of the model: together one message, as it was generated."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Json] = field(default_factory=list)
    path: str = ""

    def message(self) -> Message:
        """The message."""
        reasoning = "\n\n".join(text for text in self.reasoning if text)
        return Message(
            "assistant", "".join(self.texts), tool_calls=self.calls or None, reasoning_content=reasoning or None
        )


class ItemReader:
    """Reads items in order. `messages` is what they say, `paths` the item with which each message begins.

    `fingerprint`: of the model, whose encrypted reasoning it restores.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self.messages: list[Message] = []
        self.paths: list[str] = []
        #: items of kinds that have nothing for the model
        self.skipped = 0
        self._open: _Assistant | None = None
        #: results that came in a row, and the order of the calls before them
        self._results: list[tuple[int, str, Message]] = []
        self._order: dict[str, int] = {}
        self._kinds: dict[str, Callable[[_Json, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "local_shell_call": self._shell_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
            "local_shell_call_output": self._output,
        }

    def read(self, items: Sequence[_Json]) -> None:
        """All items. Raises RequestError that names the item."""
        for i, item in enumerate(items):
            path, kind = f"input[{i}]", item.get("type", "message")
            if kind in _ELSEWHERE:
                raise unsupported(path, f"Luce stores no items, so it cannot read one of type {kind}")
            if not isinstance(kind, str) or kind not in self._kinds:
                self.skipped += 1
                continue
            if not kind.endswith("_output"):
                self._end_results()
            self._kinds[kind](item, path)
        if self._open is not None and self._open.calls:
            raise invalid("input", "the last item is a call without its output")
        self._end_message()
        self._end_results()

    def say(self, message: Message, path: str) -> None:
        """One more message."""
        self._end_message()
        self.messages.append(message)
        self.paths.append(path)

    # --- kinds of items

    def _message(self, item: _Json, path: str) -> None:
        found = converted(item, MessageItem, path)
        if found.role != "assistant":
            self.say(Message(found.role, _content(found.content)), path)
        else:
            self._assistant(path).texts.append(_text(found.content, f"{path}.content"))

    def _reasoning(self, item: _Json, path: str) -> None:
        found = converted(item, ReasoningItem, path)
        text = carried(found.encrypted_content or "", self._fingerprint)
        if text is None:
            text = "\n\n".join(piece.text for piece in found.content or found.summary or ())
        self._assistant(path).reasoning.append(text)

    def _function_call(self, item: _Json, path: str) -> None:
        found = converted(item, FunctionCallItem, path)
        self._call(found.call_id, model_name(found.namespace, found.name), found.arguments, path)

    def _custom_call(self, item: _Json, path: str) -> None:
        found = converted(item, CustomCallItem, path)
        arguments = msgspec.json.encode({INPUT: found.input}).decode()
        self._call(found.call_id, model_name(found.namespace, found.name), arguments, path)

    def _shell_call(self, item: _Json, path: str) -> None:
        found = converted(item, LocalShellCallItem, path)
        arguments = msgspec.json.encode(found.action).decode()
        self._call(_call_id(found, path), _LOCAL_SHELL, arguments, path)

    def _output(self, item: _Json, path: str) -> None:
        found = converted(item, OutputItem, path)
        content = found.output if isinstance(found.output, dict) else _content(found.output)
        call_id = _call_id(found, path)
        self._end_message()
        self._results.append((self._order.get(call_id, len(self._order)), path, Message("tool", content)))
        self._results[-1][2].tool_call_id = call_id

    # --- grouping

    def _assistant(self, path: str) -> _Assistant:
        if self._open is None:
            self._open = _Assistant(path=path)
        return self._open

    def _call(self, call_id: str, name: str, arguments: str, path: str) -> None:
        function = {"name": name, "arguments": arguments}
        self._assistant(path).calls.append({"id": call_id, "type": "function", "function": function})

    def _end_message(self) -> None:
        if self._open is not None:
            self.messages.append(self._open.message())
            self.paths.append(self._open.path)
            self._order = {call["id"]: i for i, call in enumerate(self._open.calls)}
            self._open = None

    def _end_results(self) -> None:
        """Results in the order of their calls, as templates expect them."""
        for _, path, message in sorted(self._results, key=lambda result: result[0]):
            self.say(message, path)
        self._results.clear()


def _call_id(item: LocalShellCallItem | OutputItem, path: str) -> str:
    found = item.call_id or item.id
    if not found:
        raise invalid(f"{path}.call_id", "is required")
    return found


def _content(content: str | list[_Json]) -> str | list[Any]:
    """A content for the chat, which refuses parts that are no text. No part is the same as an empty text."""
    return content or ""


def _text(content: str | list[_Json], path: str) -> str:
    """The text of an assistant's parts."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.get(_TEXT_PARTS.get(str(part.get("type")), ""))
        if not isinstance(text, str):
            raise unsupported(f"{path}[{i}]", "only parts with a text are supported")
        texts.append(text)
    return "".join(texts)
