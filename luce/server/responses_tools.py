"""Tools of a /v1/responses body as functions of a chat: namespaces flattened, custom tools with one text parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from luce.server import schema
from luce.server.errors import invalid, unsupported
from luce.server.responses_request import CustomTool, FunctionTool, NamespaceTool, ToolChoice
from luce.server.schema import converted
from luce.text.reply_format import ReplyFormat

_Json = dict[str, Any]

#: the one parameter of a custom tool, as the model sees it
INPUT = "input"


class Offered(NamedTuple):
    """A tool that the model is shown."""

    name: str
    namespace: str | None
    #: it is called with a text, not with JSON
    custom: bool
    #: its place in the body
    path: str
    #: as the chat has it
    function: _Json
    #: what the text is that it is called with; None: any
    input: ReplyFormat | None = None


def model_name(namespace: str | None, name: str) -> str:
    """The name of a tool as the model sees it."""
    if namespace is None:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def offered_tools(tools: Sequence[_Json]) -> tuple[dict[str, Offered], int]:
    """The tools by the model's name of each, and the number of those that only OpenAI's servers could run.

    Raises RequestError that names the tool.
    """
    found: dict[str, Offered] = {}
    skipped = 0
    for tool in _flat(tools, "tools"):
        if tool is None:
            skipped += 1
            continue
        name = tool.function["function"]["name"]
        if name in found:
            raise invalid(f"{tool.path}.name", f"another tool has the name {name[:80]!r} too")
        found[name] = tool
    return found, skipped


def _flat(tools: Sequence[_Json], where: str, namespace: str | None = None) -> Iterator[Offered | None]:
    """Each tool; None for one that cannot be offered. Agents send kinds without a name and kinds to come."""
    for i, tool in enumerate(tools):
        path, kind = f"{where}[{i}]", tool.get("type")
        if not tool.get("name"):
            yield None
        elif kind == "function":
            yield _function(converted(tool, FunctionTool, path), namespace, path)
        elif kind == "custom":
            yield _custom(converted(tool, CustomTool, path), namespace, path)
        elif kind == "namespace" and namespace is None:
            group = converted(tool, NamespaceTool, path)
            yield from _flat(group.tools, f"{path}.tools", group.name)
        else:
            yield None


def _function(tool: FunctionTool, namespace: str | None, path: str) -> Offered:
    function: _Json = {"name": model_name(namespace, tool.name)}
    for key in ("description", "parameters", "strict"):
        if (value := getattr(tool, key)) is not None:
            function[key] = value
    return Offered(tool.name, namespace, False, path, {"type": "function", "function": function})


def _custom(tool: CustomTool, namespace: str | None, path: str) -> Offered:
    description, form = tool.description or "", None
    if tool.format is not None and tool.format.type == "grammar":
        syntax, definition = tool.format.syntax, tool.format.definition
        if syntax is None or not definition:
            raise invalid(f"{path}.format", "a grammar needs its syntax and its definition")
        description += f"\n\nThe input follows this {syntax} grammar:\n{definition}"
        form = ReplyFormat("regex" if syntax == "regex" else "grammar", definition, param=f"{path}.format.definition")
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": model_name(namespace, tool.name), "description": description.strip(), "parameters": parameters}
    return Offered(tool.name, namespace, True, path, {"type": "function", "function": function}, form)


def chat_choice(
    choice: schema.Choice | ToolChoice | None, offered: dict[str, Offered]
) -> schema.Choice | schema.ToolChoice | None:
    """`tool_choice` of the chat. Raises RequestError that names the field."""
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type == "allowed_tools":
        names = [name for i, tool in enumerate(choice.tools or ()) for name in _allowed(tool, i, offered)]
        if not names and choice.mode == "auto":
            return "none"
        if not names:
            raise invalid("tool_choice.tools", "names no tool that the model is shown")
        allowed = schema.AllowedTools(choice.mode, [{"type": "function", "name": name} for name in names])
        return schema.ToolChoice("allowed_tools", allowed_tools=allowed)
    if choice.type not in ("function", "custom"):
        raise unsupported("tool_choice.type", "only function, custom and allowed_tools are supported")
    (name,) = _named(choice, "tool_choice", offered)
    return schema.ToolChoice(function={"name": name})


def _allowed(tool: _Json, index: int, offered: dict[str, Offered]) -> list[str]:
    where = f"tool_choice.tools[{index}]"
    wanted = converted(tool, ToolChoice, where)
    if wanted.type == "namespace":
        return [name for name, tool in offered.items() if tool.namespace == wanted.name]
    # Other kinds are tools that were left out of the request as well.
    return _named(wanted, where, offered) if wanted.type in ("function", "custom") else []


def _named(wanted: ToolChoice, where: str, offered: dict[str, Offered]) -> list[str]:
    name = model_name(wanted.namespace, str(wanted.name))
    if name not in offered:
        raise invalid(f"{where}.name", f"the request has no tool {name[:80]!r}")
    return [name]
