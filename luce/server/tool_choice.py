"""The tools of a chat request: which the template shows, and which the reply may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from luce.models.calls import Calls
from luce.server.errors import invalid
from luce.server.schema import ChatRequest, ToolChoice
from luce.text.call_format import CallableTool, CallFormat
from luce.text.call_parser import CallableTools
from luce.text.reply_format import ReplyFormat

_Json = dict[str, Any]

NO_INPUTS: Mapping[str, ReplyFormat] = MappingProxyType({})
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
# What ends a name in one format of calls or another: a call of such a tool would come back as text.
_WRITABLE = re.compile(r"[^\s\x00-\x1f\x7f\"<>{}()]+")


@dataclass(frozen=True)
class ChosenTools:
    """What `tools` and `tool_choice` of a request come to, or the older `functions` and `function_call`."""

    #: the tools that the template shows, None for none
    shown: list[_Json] | None
    #: the tools that the reply may call, None if it may call none
    callable: CallableTools | None
    #: the request has tools that it forbids to call
    forbidden: bool
    #: the tools that the reply may call, with their schemas, for a grammar
    tools: tuple[CallableTool, ...] = ()
    #: the reply consists of calls
    required: bool = False
    #: of the one tool that the request names
    named: bool = False

    def call_format(self, calls: Calls, *, exact: bool, mode: str, strict: bool) -> CallFormat | None:
        """What a grammar holds the calls of the reply to; None: calls are as the model writes them.

        `calls`: the dialect of the model; `exact`: its calls begin with a special token; `mode`: `--tool-grammar`;
        `strict`: the schema of every tool is.
        """
        if self.callable is None:
            return None
        tools = tuple(replace(tool, strict=True) if strict else tool for tool in self.tools)
        forced = self.required or any(tool.strict or tool.input is not None for tool in tools)
        if not forced and (mode == "off" or (mode == "auto" and not exact)):
            return None
        return CallFormat(calls, tools, required=self.required, parallel=not self.callable.single)


def chosen_tools(
    request: ChatRequest,
    *,
    parallel: bool = True,
    keep: bool = False,
    inputs: Mapping[str, ReplyFormat] = NO_INPUTS,
) -> ChosenTools:
    """The tools of a request. `parallel`: the model can call several tools in one reply; `keep`: tools that it may not
    call are shown all the same; `inputs`: what the texts of tools are that are called with one, by the tools' names.

    Raises RequestError that names the field.
    """
    for i, tool in enumerate(request.tools or ()):
        _check_tool(tool, f"tools[{i}]")
    for i, function in enumerate(request.functions or ()):
        _check_function(function, f"functions[{i}]")
    field = "tools" if request.tools else "functions"
    tools = request.tools or [{"type": "function", "function": function} for function in request.functions or ()]
    param, choice = "tool_choice", request.tool_choice
    if choice is None:
        param, choice = "function_call", request.function_call
    if choice not in (None, "auto", "none"):
        _check_choice(param, choice, [_name(tool) for tool in tools])
    allowed = [_name(tool) for tool in tools]
    several, named = request.parallel_tool_calls is not False, False
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        allowed = [_name(tool) for tool in choice.allowed_tools.tools]
        choice = choice.allowed_tools.mode
    elif isinstance(choice, ToolChoice):
        # A named tool is called once, unless the request asks for more.
        allowed, several = [_name(choice.function or {"name": choice.name})], bool(request.parallel_tool_calls)
        choice, named = "required", True
    if choice == "none" or not tools:
        return ChosenTools(tools if keep and tools else None, None, forbidden=bool(tools))
    found = tuple(
        _callable(tool["function"], f"{field}[{i}]" + ".function" * (field == "tools"), inputs)
        for i, tool in enumerate(tools)
        if _name(tool) in allowed
    )
    schemas = {tool.name: tool.parameters for tool in found}
    single = not (several and parallel)
    return ChosenTools(tools, CallableTools(schemas, single), False, found, choice == "required", named)


def _callable(function: _Json, where: str, inputs: Mapping[str, ReplyFormat]) -> CallableTool:
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise invalid(f"{where}.strict", "expected true or false")
    name = str(function["name"])
    if strict and not _NAME.fullmatch(name):
        raise invalid(f"{where}.name", "the name of a strict tool has 1 to 64 letters, digits, _, -, . and :")
    return CallableTool(name, function.get("parameters"), bool(strict), f"{where}.parameters", inputs.get(name))


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
    if not _WRITABLE.fullmatch(name):
        raise invalid(f"{where}.name", 'expected a name without white space, control characters and "<>{}()')
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
        if not chosen and choice.allowed_tools.mode == "required":
            raise invalid(f"{param}.allowed_tools.tools", "names no tool that the reply could call")
    else:
        chosen = [_name(choice.function or {"name": choice.name})]
    for name in chosen:
        if name not in names:
            raise invalid(param, f"the request has no tool {str(name)[:80]!r}")


def _name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else tool.get("name")
