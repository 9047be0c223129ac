"""A body of /v1/messages as a chat request: what Anthropic's protocol says in blocks, in messages of roles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from luce.config.sampling import SAMPLERS
from luce.server import schema
from luce.server.errors import invalid, unsupported
from luce.server.messages_request import (
    AnyBlock,
    DocumentBlock,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolAdditionBlock,
    ToolChoice,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from luce.server.schema import ChatRequest, Message
from luce.server.thinking_signature import carried

_Json = dict[str, Any]

#: between two blocks of a text
_GAP = "\n\n"
# A line of Claude Code with a hash that differs in every request, which would keep prompts from having a common prefix.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE)
_ROLES: dict[type[AnyBlock], tuple[str, ...]] = {
    TextBlock: ("user", "assistant", "system"),
    ThinkingBlock: ("assistant",),
    RedactedThinkingBlock: ("assistant",),
    ToolUseBlock: ("assistant",),
    ToolResultBlock: ("user",),
    DocumentBlock: ("user",),
    ImageBlock: ("user",),
    ToolAdditionBlock: ("system",),
    ToolRemovalBlock: ("system",),
}


@dataclass(frozen=True)
class Translated:
    """A chat request, and what only /v1/messages knows of it."""

    chat: ChatRequest
    #: tools that only Anthropic's servers or a schema of theirs can describe
    skipped_tools: int
    #: the model's name of each tool that it is shown, and its index in the body
    tools: Mapping[int, int]
    #: chat messages behind the last one with a mark of `cache_control`; None: no block has one
    after_mark: int | None
    #: the text of the reasoning stays in the signature
    omits_thinking: bool
    #: the field of the body that has the chat's response_format
    format_field: str


class _Placed(NamedTuple):
    """A block of a message and its path in the body."""

    block: AnyBlock
    path: str


def translated(request: MessagesRequest, fingerprint: str, *, reasons: bool) -> Translated:
    """The chat request of a body. `fingerprint`: of the model, for signatures; `reasons`: whether it can reason.

    Raises RequestError that names the field of the body.
    """
    if not request.messages:
        raise invalid("messages", "expected at least one message")
    shown, skipped = _shown_tools(request)
    messages, after_mark = _messages(request, fingerprint)
    if messages[-1].role == "assistant" and messages[-1].tool_calls:
        raise invalid("messages", "the last message has tool calls without their results")
    prefilled = messages[-1].role == "assistant"
    sampling = {key: getattr(request, key) for key in _sampling_keys()}
    chat = ChatRequest(
        **sampling,
        model=request.model,
        stream=request.stream,
        messages=messages,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or None,
        tools=[_function(tool, index) for index, tool in shown.items()] or None,
        metadata=request.metadata,
        prefill_compression=request.prefill_compression,
        keep_ratio=request.keep_ratio,
        response_format=_response_format(request),
        continue_final_message=prefilled or None,
        **_choice(request.tool_choice, [str(tool.name) for tool in shown.values()]),
        **_thinking(request, reasons=reasons),
    )
    omits = request.thinking is not None and request.thinking.display == "omitted"
    newer = request.output_config is not None and request.output_config.format is not None
    form = "output_config.format" if newer else "output_format"
    return Translated(chat, skipped, dict(enumerate(shown)), after_mark, omits, form)


def _sampling_keys() -> Iterator[str]:
    for name, sampler in SAMPLERS.items():
        if name != "max_tokens":
            yield from (name, *sampler.aliases)


# --- messages


def _messages(request: MessagesRequest, fingerprint: str) -> tuple[list[Message], int | None]:
    """The chat's messages, and how many stand behind the last one with a cache mark (None: no mark)."""
    system = [TextBlock(text=request.system)] if isinstance(request.system, str) else request.system or []
    found: list[Message] = []
    marked: int | None = None
    if any(tool.cache_control for tool in request.tools or ()) or any(block.cache_control for block in system):
        marked = 1
    texts = (_BILLING.sub("", block.text) for block in system)
    if text := _GAP.join(text for text in texts if text):
        found.append(Message("system", text))
    turns = list(_turns(request.messages or []))
    for role, group in groupby(turns, lambda turn: turn[0] if turn[0] != "system" else id(turn)):
        blocks = [block for _, placed in group for block in placed]
        calls = [call["id"] for call in found[-1].tool_calls or ()] if found else []
        found += _translated_turn("system" if isinstance(role, int) else role, blocks, calls, fingerprint)
        if any(_marked(block) for block, _ in blocks):
            marked = len(found)
    if request.cache_control:
        marked = len(found)
    if not found:
        raise invalid("messages", "expected at least one message with content")
    return found, None if marked is None else len(found) - marked


def _turns(turns: Sequence[Turn]) -> Iterator[tuple[str, list[_Placed]]]:
    """Each message that the model sees: its role and its blocks."""
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    for i, turn in enumerate(turns):
        if turn.clear_at == "next_user_message" and i < last_user:
            continue
        where = f"messages[{i}].content"
        if isinstance(turn.content, str):
            yield turn.role, [_Placed(TextBlock(text=turn.content), where)]
            continue
        placed = [_Placed(block, f"{where}[{j}]") for j, block in enumerate(turn.content)]
        for block, path in placed:
            if turn.role not in _ROLES[type(block)]:
                raise invalid(path, f"a message of role {turn.role} has no such block")
        yield turn.role, placed


def _translated_turn(role: str, blocks: list[_Placed], calls: list[str], fingerprint: str) -> Iterator[Message]:
    """The chat messages of neighbouring messages of one role; `calls`: ids of the calls just before them."""
    if role == "assistant":
        yield _assistant(blocks, fingerprint)
        return
    results = [placed for placed in blocks if isinstance(placed.block, ToolResultBlock)]
    order = {call: i for i, call in enumerate(calls)}
    for block, path in sorted(results, key=lambda placed: order.get(_call_id(placed.block), len(order))):
        assert isinstance(block, ToolResultBlock)
        text = _result_text(block, path)
        failed = "Error: " if block.is_error else ""
        yield Message("tool", failed + text, tool_call_id=block.tool_use_id)
    rest = [placed for placed in blocks if isinstance(placed.block, TextBlock | DocumentBlock | ImageBlock)]
    if rest or (role == "user" and not results):
        yield Message("user" if role == "user" else "system", _GAP.join(_text(*placed) for placed in rest))


def _assistant(blocks: list[_Placed], fingerprint: str) -> Message:
    thinking = [_thinking_text(block, fingerprint) for block, _ in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for block, _ in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return Message(
        "assistant",
        # Together, as they were generated.
        "".join(block.text for block, _ in blocks if isinstance(block, TextBlock)),
        tool_calls=calls or None,
        reasoning_content=_GAP.join(thinking) or None,
    )


def _thinking_text(block: ThinkingBlock, fingerprint: str) -> str:
    return block.thinking or carried(block.signature, fingerprint) or ""


def _call_id(block: AnyBlock) -> str:
    return block.tool_use_id if isinstance(block, ToolResultBlock) else ""


def _result_text(result: ToolResultBlock, path: str) -> str:
    if isinstance(result.content, str):
        return result.content
    return _GAP.join(_text(block, f"{path}.content[{i}]") for i, block in enumerate(result.content or ()))


def _text(block: AnyBlock | ToolReferenceBlock, path: str) -> str:
    """The text of a block that has one."""
    if isinstance(block, ImageBlock):
        raise unsupported(path, "images are not supported")
    if isinstance(block, ToolReferenceBlock):
        return f"Found the tool {block.tool_name}."
    if isinstance(block, DocumentBlock):
        return _GAP.join(text for text in (block.title, block.context, _document_text(block, path)) if text)
    assert isinstance(block, TextBlock)
    return block.text


def _document_text(document: DocumentBlock, path: str) -> str:
    source = document.source
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if source.get("type") == "content":
        try:
            content = msgspec.convert(source.get("content"), str | list[TextBlock | ImageBlock])
        except msgspec.ValidationError:
            raise invalid(f"{path}.source.content", "expected text or text blocks") from None
        if isinstance(content, str):
            return content
        return _GAP.join(_text(block, f"{path}.source.content[{i}]") for i, block in enumerate(content))
    raise unsupported(f"{path}.source", "only sources of type text and content are supported")


def _marked(block: AnyBlock) -> bool:
    nested = block.content if isinstance(block, ToolResultBlock) and isinstance(block.content, list) else []
    return block.cache_control is not None or any(inner.cache_control is not None for inner in nested)


# --- tools


def _shown_tools(request: MessagesRequest) -> tuple[dict[int, Tool], int]:
    """The tools that the model sees, by their index in the body, and the number of those that Luce cannot offer."""
    own = {i: tool for i, tool in enumerate(request.tools or ()) if tool.type in (None, "custom")}
    for i, tool in own.items():
        if not tool.name:
            raise invalid(f"tools[{i}].name", "is required")
        if tool.input_schema is None:
            raise invalid(f"tools[{i}].input_schema", "is required")
    changed = _changed_tools(request.messages or ())
    shown = {i: tool for i, tool in own.items() if changed.get(str(tool.name), not tool.defer_loading)}
    return shown, len(request.tools or ()) - len(own)


def _changed_tools(turns: Iterable[Turn]) -> dict[str, bool]:
    """Names of tools that the conversation adds (True) or removes."""
    found: dict[str, bool] = {}
    for turn in turns:
        for block in turn.content if isinstance(turn.content, list) else ():
            if isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
                found[block.tool.name] = isinstance(block, ToolAdditionBlock)
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                names = [inner.tool_name for inner in block.content if isinstance(inner, ToolReferenceBlock)]
                found |= dict.fromkeys(names, True)
    return found


def _function(tool: Tool, index: int) -> _Json:
    function: _Json = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: ToolChoice | None, names: Sequence[str]) -> _Json:
    """`tool_choice` and `parallel_tool_calls` of the chat."""
    if choice is None:
        return {}
    fields: _Json = (
        {}
        if choice.disable_parallel_tool_use is None
        else {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    )
    if choice.type == "any" and not names:
        raise invalid("tool_choice", "the request has no tools that the model is shown")
    if choice.type != "tool":
        return {**fields, "tool_choice": {"any": "required"}.get(choice.type, choice.type)}
    if choice.name not in names:
        raise invalid("tool_choice.name", f"the model is shown no tool {str(choice.name)[:80]!r}")
    return {**fields, "tool_choice": schema.ToolChoice(function={"name": choice.name})}


# --- reasoning and output


def _thinking(request: MessagesRequest, *, reasons: bool) -> _Json:
    """`thinking` and `reasoning_effort` of the chat. An effort is a hint, also to a model that cannot reason."""
    thinking, config = request.thinking, request.output_config
    fields: _Json = {}
    if thinking is not None:
        if thinking.type == "enabled" and thinking.budget_tokens is None:
            raise invalid("thinking.budget_tokens", "is required")
        fields["thinking"] = schema.Thinking(type=thinking.type, budget_tokens=thinking.budget_tokens)
    if reasons and config is not None and (thinking is None or thinking.type != "disabled"):
        fields["reasoning_effort"] = config.effort
    return fields


def _response_format(request: MessagesRequest) -> _Json | None:
    config = request.output_config
    wanted = request.output_format if config is None or config.format is None else config.format
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": wanted.schema, "strict": True}}
