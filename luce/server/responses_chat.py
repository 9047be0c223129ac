"""A body of /v1/responses as a chat request: what OpenAI's newer API says in items, in messages of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from luce.server.errors import invalid, unsupported
from luce.server.responses_items import ItemReader
from luce.server.responses_request import ResponsesRequest, TextFormat
from luce.server.responses_tools import Offered, chat_choice, offered_tools
from luce.server.schema import ChatRequest, Common, Message
from luce.text.reply_format import ReplyFormat

_Json = dict[str, Any]

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (
    ENCRYPTED,
    LOGPROBS,
    # Parts of items that only OpenAI's tools make.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


@dataclass(frozen=True)
class Translated:
    """A chat request, and what only /v1/responses knows of it."""

    chat: ChatRequest
    #: the tools that the model is shown, by its names for them, in their order
    tools: Mapping[str, Offered]
    skipped_tools: int
    skipped_items: int
    #: the item of the body with which each message of the chat begins
    paths: tuple[str, ...]

    @property
    def inputs(self) -> dict[str, ReplyFormat]:
        """What the texts are that tools are called with, by the model's names of the tools."""
        return {name: tool.input for name, tool in self.tools.items() if tool.input is not None}


def translated(request: ResponsesRequest, fingerprint: str, *, reasons: bool) -> Translated:
    """The chat request of a body. `fingerprint`: of the model, for encrypted reasoning; `reasons`: whether it can
    reason.

    Raises RequestError that names the field of the body.
    """
    _refuse_unsupported(request)
    reader = ItemReader(fingerprint)
    if request.instructions:
        reader.say(Message("system", request.instructions), "instructions")
    if isinstance(request.input, str):
        reader.say(Message("user", request.input), "input")
    else:
        reader.read(request.input or ())
    if not request.input or not reader.messages:
        raise invalid("input", "expected a text or at least one item with content")
    tools, skipped = offered_tools(request.tools or ())
    fields = {name: getattr(request, name) for name in Common.__struct_fields__}
    fields["response_format"] = _response_format(request)
    reasoning = request.reasoning
    if reasoning is not None and not reasons:
        # A hint, which agents send to every model.
        reasoning = msgspec.structs.replace(reasoning, effort=None)
    chat = ChatRequest(
        **fields,
        messages=reader.messages,
        max_output_tokens=request.max_output_tokens,
        tools=[tool.function for tool in tools.values()] or None,
        tool_choice=chat_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=reasoning,
        chat_template_kwargs=request.chat_template_kwargs,
        logprobs=LOGPROBS in (request.include or ()),
        top_logprobs=request.top_logprobs or None,
    )
    return Translated(chat, tools, skipped, reader.skipped, tuple(reader.paths))


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name) is not None:
            raise unsupported(name, "Luce stores no responses; send the whole conversation as input")
    if request.prompt is not None:
        raise unsupported("prompt", "Luce stores no prompts; send instructions and input")
    if request.background:
        raise unsupported("background", "Luce stores no responses")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise invalid("top_logprobs", f"needs include: [{LOGPROBS}]")
    for i, name in enumerate(request.include or ()):
        if name not in _INCLUDES:
            raise unsupported(f"include[{i}]", f"expected one of {', '.join(_INCLUDES)}")
    for name in ("return_token_ids", "return_progress", "timings_per_token"):
        if getattr(request, name):
            raise unsupported(name, "/v1/responses does not have it; /v1/chat/completions does")
    if request.n not in (None, 1):
        raise unsupported("n", "a response is one reply")
    if request.reasoning is not None and request.reasoning.exclude:
        raise unsupported("reasoning.exclude", "a response has its reasoning in an item of its own")


def _response_format(request: ResponsesRequest) -> _Json | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return request.response_format
    if request.response_format is not None:
        raise invalid("text.format", "the request has response_format too; a reply follows one of them")
    return {"type": form.type} if form.type == "json_object" else {"type": form.type, "json_schema": _schema(form)}


def _schema(form: TextFormat) -> _Json:
    if form.schema is None:
        raise invalid("text.format.schema", "is required")
    found: _Json = {"name": form.name or "reply", "schema": form.schema}
    return found if form.strict is None else {**found, "strict": form.strict}
