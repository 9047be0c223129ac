"""The prompt of a chat request, from its messages and its tools."""

from __future__ import annotations

from typing import Any

import msgspec

from luce.api import Model
from luce.errors import ContextError, RequestError, UnavailableError
from luce.server.errors import invalid
from luce.server.schema import ChatRequest, Message
from luce.server.thinking import ReasoningSwitch
from luce.server.tool_choice import chosen_tools
from luce.text.prompt_limit import PromptLimit

_Json = dict[str, Any]

_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "limit"}


def chat_prompt(request: ChatRequest, model: Model, limit: PromptLimit) -> list[int]:
    """The prompt as ids. Raises RequestError, and what `limit` raises."""
    return _rendered(request, model, limit)[0]


def chat_text(request: ChatRequest, model: Model, limit: PromptLimit) -> str:
    """The prompt as text, control tokens by their name. Raises what chat_prompt raises."""
    _, messages, options = _rendered(request, model, limit)
    return model.chat.text(messages, **options)


def _rendered(request: ChatRequest, model: Model, limit: PromptLimit) -> tuple[list[int], list[_Json], _Json]:
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
    thinking = ReasoningSwitch(request, model.chat, model.envelope.unasked)
    messages = [_plain(message, i) for i, message in enumerate(request.messages)]
    options = {
        "tools": chosen_tools(request, keep=model.config.tools_none == "keep").shown,
        "add_generation_prompt": not continues if opens is None else opens,
        "continue_final_message": continues,
        **thinking.variables,
    }
    try:
        ids = model.chat.prompt(messages, limit=limit, **options)
    except (ContextError, UnavailableError):
        raise
    except RequestError as error:
        raise RequestError(str(error), param=error.param or "messages", code=error.code or "template_error") from None
    thinking.check(ids)
    return ids, messages, options


def _plain(message: Message, index: int) -> _Json:
    """A message for ChatFormat: only the fields that were sent, and a tool's result as text."""
    where = f"messages[{index}]"
    plain: _Json = {k: v for k, v in msgspec.structs.asdict(message).items() if v is not None}
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    refusal = plain.pop("refusal", "")
    if message.role == "assistant" and not message.content:
        # The refusal stands in the place of the content.
        plain["content"] = refusal
    if message.role in ("system", "developer", "user") and (message.content is None or message.content == []):
        raise invalid(f"{where}.content", "is required")
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(f"{where}.tool_call_id", "is required")
    for i, call in enumerate(message.tool_calls or ()):
        if not isinstance(call.get("id"), str | None):
            raise invalid(f"{where}.tool_calls[{i}].id", "expected text")
    if message.role == "function" and not message.name:
        raise invalid(f"{where}.name", "is required")
    if isinstance(message.content, dict):
        if message.role not in ("tool", "function"):
            raise invalid(f"{where}.content", "expected text or a list of parts")
        plain["content"] = msgspec.json.encode(message.content).decode()
    return plain
