"""Tools, past calls and their results in the way that a chat template takes them, or as text where it has no place."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from luce.models.calls import Bare, Calls, Json, Keywords, Tagged
from luce.models.tool_formats import shows_tools
from luce.text.keyword_reader import is_keyword

Message = dict[str, Any]

# A key of messages, not the variable that turns reasoning on.
_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
_BASE62 = string.digits + string.ascii_letters
_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to help with the user's request. Their signatures are within "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, write the function's name and its arguments like "
    "this:\n{example}"
)


def for_template(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, calls: Calls, source: str
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """The messages and the tools that a template gets. `calls`: how the model writes calls; `source`: the template's.

    Results stand in the order of the calls that they answer. The reasoning is `thinking` for a template that reads that
    alone, and with a text before calls `tool_plan` for one that reads that. A template that shows no tools gets them as
    text in the system message, and results as messages of the user; one that prints no calls gets them as text of the
    assistant.
    """
    found = [_parsed(message) for message in _in_order(_modern(messages))]
    if "reasoning_content" not in source:
        if _THINKING.search(source):
            found = [_with_thinking(message) for message in found]
        elif "tool_plan" in source:
            found = [_with_plan(message) for message in found]
    if calls.id_length:
        found = [_with_ids(message, calls.id_length) for message in found]
    if "tool_calls" not in source:
        found = _with_calls_as_text(found, calls)
    elif not calls.parallel:
        found = _one_call_each(found)
    if not shows_tools(source):
        found = _with_results_as_text(found)
        if tools:
            found = _introduced(found, tools, calls)
        return found, None
    if calls.results == "responses" and "tool_responses" in source:
        found = _with_responses(found)
    return found, tools


def call_text(calls: Calls, name: str, arguments: Any, number: int = 0) -> str:
    """One call as the model writes it, without the section around all calls. `number`: of the call in the
    conversation, which some dialects write."""
    kind = calls.arguments
    if isinstance(kind, Json) and kind.fields is not None:
        first = "" if kind.number is None else f'"{kind.number}": "{number}", '
        fields = f'"{kind.fields[0]}": {_json(name)}, "{kind.fields[1]}": {_json(arguments)}'
        return f"{calls.call[0]}{{{first}{fields}}}{calls.call[1]}"
    if isinstance(kind, Tagged):
        written = "".join(_tagged(kind, key, value) for key, value in arguments.items())
    elif isinstance(kind, Bare):
        written = _bare(kind, arguments)
    elif isinstance(kind, Keywords):
        written = ", ".join(_keyword(key, value) for key, value in arguments.items())
    else:
        written = _json(arguments)
    return f"{calls.call[0]}{calls.name[0]}{name}{calls.name[1]}{written}{calls.call[1]}"


def _tagged(kind: Tagged, key: str, value: Any) -> str:
    typed = "" if kind.typed is None else kind.typed.replace("%s", "true" if isinstance(value, str) else "false")
    text = value if isinstance(value, str) else _json(value)
    return f"{kind.key[0]}{key}{kind.key[1]}{typed}{kind.value[0]}{text}{kind.value[1]}"


def _bare(kind: Bare, value: Any) -> str:
    if isinstance(value, str):
        return f"{kind.quote}{value}{kind.quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_bare(kind, item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_bare(kind, item) for item in value) + "]"
    return _json(value)


def _keyword(name: str, value: Any) -> str:
    return f"{name}={_python(value)}" if is_keyword(name) else f"**{{{_json(name)}: {_python(value)}}}"


def _python(value: Any) -> str:
    """A value as a literal of Python, strings as JSON has them: these are Python's too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_json(key)}: {_python(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_python, value)) + "]"
    return repr(value) if value is None or isinstance(value, bool) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- what clients send


def _modern(messages: Sequence[Message]) -> list[Message]:
    """The messages with OpenAI's older function calls as tool calls."""
    found, called = [], ""
    for i, message in enumerate(messages):
        message = dict(message)
        function = message.pop("function_call", None)
        if isinstance(function, Mapping) and not message.get("tool_calls"):
            called = f"call_{i}"
            message["tool_calls"] = [{"id": called, "type": "function", "function": dict(function)}]
        if message.get("role") == "function":
            message |= {"role": "tool", "tool_call_id": called}
        found.append(message)
    return found


def _parsed(message: Message) -> Message:
    """The message with the arguments of its calls as objects; what is none is one with the text under `_raw`."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}


def _parsed_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            found = None
        arguments = found if isinstance(found, dict) else {"_raw": arguments}
    return {**call, "function": {**call["function"], "arguments": {} if arguments is None else arguments}}


def _in_order(messages: Sequence[Message]) -> list[Message]:
    """The messages with neighbouring results in the order of the calls that they answer."""
    found: list[Message] = []
    order: dict[Any, int] = {}
    for message in messages:
        if message.get("role") != "tool":
            order = {id: i for i, id in enumerate(_ids(message))}
            found.append(message)
            continue
        place = order.get(message.get("tool_call_id"), len(order))
        at = len(found)
        while (
            at
            and found[at - 1].get("role") == "tool"
            and place < order.get(found[at - 1].get("tool_call_id"), len(order))
        ):
            at -= 1
        found.insert(at, message)
    return found


def _functions(message: Message) -> list[tuple[str, Any]]:
    """Names and arguments of the calls of a message."""
    functions = [
        call["function"]
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    return [(str(function.get("name")), function.get("arguments") or {}) for function in functions]


def _ids(message: Message) -> list[Any]:
    """The ids of the calls of a message."""
    return [call.get("id") for call in message.get("tool_calls") or () if isinstance(call, Mapping)]


# --- what templates take


def _with_thinking(message: Message) -> Message:
    """The message with its reasoning under `thinking`. What it says before calls goes with it: templates that write
    reasoning there take one text."""
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    found = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not message.get("tool_calls") or not message.get("content"):
        return {**found, "thinking": reasoning}
    return {**found, "thinking": f"{reasoning}\n\n{message['content']}", "content": ""}


def _with_plan(message: Message) -> Message:
    """The message of calls with its reasoning, and with what it says before them, as `tool_plan`: templates that write
    a plan write nothing else in front of calls."""
    said = [text for key in ("reasoning_content", "content") if (text := message.get(key)) and text.strip()]
    if not message.get("tool_calls") or message.get("tool_plan") or not said:
        return message
    found = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**found, "content": "", "tool_plan": "\n\n".join(said)}


def _with_ids(message: Message, length: int) -> Message:
    """The message with ids of this many characters; equal ids stay equal."""
    found = dict(message)
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "id": _short(call.get("id"), length)} if isinstance(call, Mapping) else call
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        found["tool_call_id"] = _short(message["tool_call_id"], length)
    return found


def _short(id: Any, length: int) -> str:
    if isinstance(id, str) and len(id) == length and id.isalnum():
        return id
    number = int.from_bytes(hashlib.blake2b(str(id).encode(errors="replace"), digest_size=16).digest(), "big")
    return "".join(_BASE62[number // 62**i % 62] for i in range(length))


def _with_calls_as_text(messages: Sequence[Message], calls: Calls) -> list[Message]:
    """The messages with calls in the text, as the model writes them."""
    found: list[Message] = []
    numbers = itertools.count()
    for message in messages:
        functions = _functions(message)
        if functions:
            texts = (call_text(calls, name, arguments, next(numbers)) for name, arguments in functions)
            content = message.get("content") or ""
            lead = calls.lead if content else ""
            text = f"{content}{lead}{calls.section[0]}{calls.between.join(texts)}{calls.section[1]}"
            message = {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}
        found.append(message)
    return found


def _with_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with neighbouring results as one message of the user."""
    found: list[Message] = []
    for message in messages:
        if message.get("role") != "tool":
            found.append(message)
            continue
        text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if found and found[-1].get("results"):
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": "user", "content": text, "results": True})
    return [{key: value for key, value in message.items() if key != "results"} for message in found]


def _introduced(messages: list[Message], tools: Sequence[Mapping[str, Any]], calls: Calls) -> list[Message]:
    """The messages with the tools at the end of the system message, which begins them."""
    if isinstance(calls.arguments, Tagged | Bare | Keywords):
        example = call_text(calls, "function-name", {"parameter-name": "value"})
    else:
        example = call_text(calls, "<name>", "<arguments>").replace('"<name>"', "<function-name>")
        example = example.replace('"<arguments>"', "<args-json-object>").replace("<name>", "<function-name>")
    example = f"{calls.section[0]}{example}{calls.section[1]}"
    text = _INTRODUCTION.format(tools="\n".join(map(_json, tools)), example=example)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """The messages with each call in a message of its own, its result behind it."""
    found: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.pop(0))
        later = {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
        for i, call in enumerate(calls):
            found.append({**later, "content": "", "tool_calls": [call]} if i else {**message, "tool_calls": [call]})
            id = call.get("id") if isinstance(call, Mapping) else None
            own = [result for result in results if result.get("tool_call_id") == id]
            found += own
            results = [result for result in results if result not in own]
        found += results
    return found


def _with_responses(messages: Sequence[Message]) -> list[Message]:
    """The messages with results on the message of their calls, and the answer behind them as its content."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        if message.get("role") == "tool" and last.get("tool_calls"):
            names = {
                call.get("id"): call["function"].get("name") for call in last["tool_calls"] if call.get("function")
            }
            content = message.get("content") or ""
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                value = None
            name = names.get(message.get("tool_call_id"), message.get("name") or "unknown")
            response = {"name": name, "response": value if isinstance(value, dict) else content}
            found[-1] = {**last, "tool_responses": [*last.get("tool_responses", ()), response]}
        elif (
            message.get("role") == "assistant"
            and last.get("tool_responses")
            and not last.get("content")
            and not message.get("tool_calls")
        ):
            found[-1] = {**last, "content": message.get("content")}
        else:
            found.append(message)
    return found
