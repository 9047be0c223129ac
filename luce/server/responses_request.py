"""The body of OpenAI's /v1/responses. Known fields are checked strictly, unknown ones ignored and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from luce.server.schema import Choice, Common, Reasoning
from luce.server.unserved import RESPONSES, with_unserved

_Json = dict[str, Any]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: text, or parts that `responses_items` reads
Content = str | list[_Json]


class MessageItem(msgspec.Struct):
    """A message. Items without a type are messages too."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningText(msgspec.Struct):
    """A piece of a reasoning."""

    text: str = ""


class ReasoningItem(msgspec.Struct):
    """The reasoning of a reply; `encrypted_content` restores it where Luce has made it."""

    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct):
    """A call of a function, `namespace` that of its tool."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(msgspec.Struct):
    """A call of a custom tool."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class LocalShellCallItem(msgspec.Struct):
    """A call of OpenAI's shell that runs at the client; older clients name it by `id`."""

    action: _Json
    call_id: str | None = None
    id: str | None = None


class OutputItem(msgspec.Struct):
    """What a call has returned: text, parts, or a JSON object; that of a local shell may name its call by `id`."""

    output: str | list[_Json] | _Json
    call_id: str | None = None
    id: str | None = None


class TextFormat(msgspec.Struct):
    """What the text of the reply must be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: _Json | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """`text`. The verbosity is accepted without effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(msgspec.Struct):
    """A tool of type `function`."""

    name: str
    description: str | None = None
    parameters: _Json | None = None
    strict: bool | None = None


class GrammarFormat(msgspec.Struct):
    """The form of a custom tool's input; `text` has no syntax."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct):
    """A tool of type `custom`: its input is a text, not JSON."""

    name: str
    description: str | None = None
    format: GrammarFormat | None = None


class NamespaceTool(msgspec.Struct):
    """A tool of type `namespace`: a group of tools that are called by their name within it."""

    name: str
    tools: list[_Json]
    description: str | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice` as an object: a tool, or `allowed_tools`."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[_Json] | None = None


if TYPE_CHECKING:
    ResponsesFields = Common
else:
    ResponsesFields = with_unserved(Common, RESPONSES)


class ResponsesRequest(ResponsesFields, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[_Json] | None = None
    instructions: str | None = None
    max_output_tokens: _Tokens | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    tools: list[_Json] | None = None
    tool_choice: Choice | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: _Json | None = None
    # Refused unless they ask for nothing.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    # Accepted without effect.
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    client_metadata: _Json | None = None
    prompt_cache_retention: str | None = None
    context_management: Any = None
