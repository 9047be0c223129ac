"""The prompt of a chat request, from its messages and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from luce.errors import ContextError, RequestError, UnavailableError
from luce.server.errors import invalid, unsupported
from luce.server.schema import ChatRequest, Message, ToolChoice
from luce.server.thinking import ReasoningSwitch
from luce.text.chat import ChatFormat
from luce.text.prompt_limit import PromptLimit

_Json = dict[str, Any]

_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "limit"}


def chat_prompt(request: ChatRequest, chat: ChatFormat, limit: PromptLimit) -> list[int]:
    """The prompt as ids. Raises RequestError, and what `limit` raises."""
    return _rendered(request, chat, limit)[0]


def chat_text(request: ChatRequest, chat: ChatFormat, limit: PromptLimit) -> str:
    """The prompt as text, control tokens by their name. Raises what chat_prompt raises."""
    _, messages, options = _rendered(request, chat, limit)
    return chat.text(messages, **options)


def _rendered(request: ChatRequest, chat: ChatFormat, limit: PromptLimit) -> tuple[list[int], list[_Json], _Json]:
    """The prompt as ids, and what the chat format makes it of: messages and options."""
    if not request.messages:
        raise invalid("messages", "expected at least one message")
    # No template writes less than a token per message.
    limit.check(len(request.messages))
    continues, opens = bool(request.continue_final_message), request.add_generation_prompt
    if continues and opens:
        raise invalid("continue_final_message", "add_generation_prompt opens a new message; set one of them only")
    kwargs = request.chat_template_kwargs or {}
    if taken := _TEMPLATE_NAMES & kwargs.keys():
        raise invalid("chat_template_kwargs", f"the server sets {min(taken)}")
    thinking = ReasoningSwitch(request, chat)
    messages = [_plain(message, i) for i, message in enumerate(request.messages)]
    options = {
        "tools": _tools(request),
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        **thinking.variables,
    }
    try:
        ids = chat.prompt(messages, limit=limit, **options)
    except (ContextError, UnavailableError):
        raise
    except RequestError as error:
        raise RequestError(str(error), param=error.param or "messages", code=error.code or "template_error") from None
    thinking.check(ids)
    return ids, messages, options


# --- messages


def _plain(message: Message, index: int) -> _Json:
    """A message for ChatFormat: only the fields that were sent, and a tool's result as text."""
    where = f"messages[{index}]"
    plain: _Json = {k: v for k, v in msgspec.structs.asdict(message).items() if v is not None}
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    if message.role in ("system", "developer", "user") and (message.content is None or message.content == []):
        raise invalid(f"{where}.content", "is required")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(f"{where}.tool_call_id", "is required")
    if message.role == "function" and not message.name:
        raise invalid(f"{where}.name", "is required")
    if isinstance(message.content, dict):
        if message.role not in ("tool", "function"):
            raise invalid(f"{where}.content", "expected text or a list of parts")
        plain["content"] = msgspec.json.encode(message.content).decode()
    return plain


# --- tools


def _tools(request: ChatRequest) -> list[_Json] | None:
    """The tools for the template. Forced calls need a grammar and are refused."""
    for i, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    for i, function in enumerate(request.functions or ()):
        _check_function(function, f"functions[{i}]")
    tools = request.tools or [{"type": "function", "function": function} for function in request.functions or ()]
    param, choice = "tool_choice", request.tool_choice
    if choice is None:
        param, choice = "function_call", request.function_call
    if choice not in (None, "auto", "none"):
        _check_choice(param, choice, [_name(tool) for tool in tools])
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        allowed = [_name(tool) for tool in choice.allowed_tools.tools]
        tools, choice = [tool for tool in tools if _name(tool) in allowed], choice.allowed_tools.mode
    if choice not in (None, "auto", "none"):
        raise unsupported(param, "only auto, none and allowed_tools are supported")
    return None if choice == "none" else tools or None


def _check_tool(tool: _Json, where: str) -> None:
    kind = tool.get("type")
    if kind != "function":
        raise invalid(f"{where}.type", f"expected function, got {str(kind)[:40]!r}")
    if not isinstance(tool.get("function"), dict):
        raise invalid(f"{where}.function", "is required")
    _check_function(tool["function"], f"{where}.function")


def _check_function(function: _Json, where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "is required")
    for key, kind, text in (("description", str, "text"), ("parameters", dict, "a JSON schema")):
        if not isinstance(function.get(key), kind | None):
            raise invalid(f"{where}.{key}", f"expected {text}")


def _check_choice(param: str, choice: str | ToolChoice | None, names: Sequence[str]) -> None:
    """Refuse a choice among tools that the request does not have."""
    if not names:
        raise invalid(param, "the request has no tools")
    if not isinstance(choice, ToolChoice):
        return
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise invalid(f"{param}.allowed_tools", "is required")
        chosen = [_name(tool) for tool in choice.allowed_tools.tools]
    else:
        chosen = [_name(choice.function or {"name": choice.name})]
    for name in chosen:
        if name not in names:
            raise invalid(param, f"the request has no tool {str(name)[:80]!r}")


def _name(tool: _Json) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")
