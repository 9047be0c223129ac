"""The body of Anthropic's /v1/messages. Known fields are checked strictly, unknown ones ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from luce.server.schema import CompressionMode, Sampling, Share, Stop
from luce.server.unserved import MESSAGES, with_unserved

_Json = dict[str, Any]
_Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Block(msgspec.Struct, kw_only=True, tag_field="type"):
    """A block of a content. `cache_control` never changes the prompt."""

    cache_control: _Json | None = None


class TextBlock(Block, kw_only=True, tag="text"):
    """Text of any role."""

    text: str


class ThinkingBlock(Block, kw_only=True, tag="thinking"):
    """Reasoning of an assistant."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block, kw_only=True, tag="redacted_thinking"):
    """Reasoning that only the server which wrote it can read."""

    data: str = ""


class ToolUseBlock(Block, kw_only=True, tag="tool_use"):
    """A call of a tool by an assistant."""

    id: str
    name: str
    input: _Json


class DocumentBlock(Block, kw_only=True, tag="document"):
    """A text that a user attaches."""

    source: _Json
    title: str | None = None
    context: str | None = None


class ImageBlock(Block, kw_only=True, tag="image"):
    """Refused: Luce reads text only."""


class ToolReferenceBlock(Block, kw_only=True, tag="tool_reference"):
    """The name of a deferred tool that a search has found."""

    tool_name: str


class ToolResultBlock(Block, kw_only=True, tag="tool_result"):
    """The result of a call, from a user."""

    tool_use_id: str
    content: str | list[TextBlock | DocumentBlock | ImageBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class NamedTool(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool of the request by its name."""

    name: str


class ToolAdditionBlock(Block, kw_only=True, tag="tool_addition"):
    """From here on the model has this deferred tool."""

    tool: NamedTool


class ToolRemovalBlock(Block, kw_only=True, tag="tool_removal"):
    """From here on the model has this tool no longer."""

    tool: NamedTool


AnyBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | ImageBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)


class Turn(msgspec.Struct):
    """One message of a conversation. `clear_at` of a system message: it goes when a user's message follows."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]
    clear_at: Literal["next_user_message", "never"] | None = None


class Tool(msgspec.Struct):
    """A tool: the client's own (type `custom` or none), or one of Anthropic's, which has no schema here."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: _Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: _Json | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """`thinking`. `display`: omitted leaves the text of thinking blocks to their signature."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """What the text of the reply must be: JSON that a schema allows."""

    type: Literal["json_schema"]
    schema: _Json


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


if TYPE_CHECKING:
    MessagesFields = Sampling
else:
    MessagesFields = with_unserved(Sampling, MESSAGES)


class MessagesRequest(MessagesFields, kw_only=True):
    """The body of /v1/messages, and without `max_tokens` that of /v1/messages/count_tokens."""

    model: str | None = None
    max_tokens: _Tokens | None = None
    messages: list[Turn] | None = None
    system: str | list[TextBlock] | None = None
    stream: bool | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    metadata: _Json | None = None
    prefill_compression: CompressionMode | None = None
    keep_ratio: Share | None = None
    cache_control: _Json | None = None
    # Accepted without effect.
    container: Any = None
    context_management: _Json | None = None
    service_tier: str | None = None
