"""The tools of a chat request: which the template shows, and which the reply may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luce.server.errors import invalid, unsupported
from luce.server.schema import ChatRequest, ToolChoice
from luce.text.call_parser import CallableTools

_Json = dict[str, Any]


@dataclass(frozen=True)
class ChosenTools:
    """What `tools` and `tool_choice` of a request come to, or the older `functions` and `function_call`."""

    #: the tools that the template shows, None for none
    shown: list[_Json] | None
    #: the tools that the reply may call, None if it may call none
    callable: CallableTools | None
    #: the request has tools that it forbids to call
    forbidden: bool


def chosen_tools(request: ChatRequest, *, parallel: bool = True) -> ChosenTools:
    """The tools of a request. `parallel`: the model can call several tools in one reply.

    Raises RequestError that names the field. Forced calls need a grammar and are refused.
    """
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
    allowed = [_name(tool) for tool in tools]
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        allowed = [_name(tool) for tool in choice.allowed_tools.tools]
        choice = choice.allowed_tools.mode
    if choice not in (None, "auto", "none"):
        raise unsupported(param, "only auto, none and allowed_tools are supported")
    if choice == "none" or not tools:
        return ChosenTools(None, None, forbidden=bool(tools))
    schemas = {_name(tool): tool["function"].get("parameters") for tool in tools if _name(tool) in allowed}
    single = request.parallel_tool_calls is False or not parallel
    return ChosenTools(tools, CallableTools(schemas, single), forbidden=False)


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


def _name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")
