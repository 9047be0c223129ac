"""The handlers of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from aiohttp import web

from luce.api import Model
from luce.server.answer import answer, prepared, received
from luce.server.chat_prompt import chat_prompt
from luce.server.errors import invalid
from luce.server.messages_chat import Translated, translated
from luce.server.messages_request import MessagesRequest
from luce.server.messages_response import MessagesDetails, MessagesResponse
from luce.server.prepare import Job, chat_request_job, named_for
from luce.server.renamed import renamed
from luce.server.schema import decode
from luce.server.state import SERVER
from luce.server.status import json_response
from luce.text.effort import efforts
from luce.text.prompt_limit import PromptLimit

# Fields of a chat request that carry a field of another name.
_FIELDS = (
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"continue_final_message"), "messages"),
    (re.compile(r"stop\b"), "stop_sequences"),
)
_FORMAT = re.compile(r"response_format(\.json_schema)?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function(?:\.(?=name|description|strict)|\.(parameters))?")


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    return await answer(request, partial(request.app[SERVER].chat_work, messages_job), MessagesResponse)


async def count_tokens(request: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens: the tokens of the prompt that /v1/messages would read. Needs no device."""
    server = request.app[SERVER]
    async with received(request, devices=False) as (body, model):
        count = await prepared(request, partial(server.chat_work, token_count), body, model)
    return json_response({"input_tokens": count})


def messages_job(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> Job:
    """The Job of a body. Raises RequestError, also soon after `stopped` has become true."""
    request, unknown = decode(body, MessagesRequest)
    if request.max_tokens is None:
        raise invalid("max_tokens", "is required")
    found = _translated(request, model)
    with renamed(partial(_field, found=found)):
        job = chat_request_job(found.chat, unknown, headers, model, stopped)
    return replace(
        named_for(job, partial(_field, found=found)),
        skipped_tools=found.skipped_tools,
        details=MessagesDetails(_marked_tokens(job, found.after_mark), found.omits_thinking),
    )


def token_count(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> int:
    """The count for a body. Raises as messages_job."""
    request, _ = decode(body, MessagesRequest)
    found = _translated(request, model)
    with renamed(partial(_field, found=found)):
        return len(chat_prompt(found.chat, model, PromptLimit(model.context, stopped)))


def _translated(request: MessagesRequest, model: Model) -> Translated:
    return translated(request, model.fingerprint, reasons=len(efforts(model.chat)) > 1)


def _marked_tokens(job: Job, after_mark: int | None) -> int:
    """Tokens up to the last cache mark. Counted from the end, because templates join system messages."""
    if after_mark is None:
        return 0
    ends = job.boundaries[0] or (len(job.prompts[0]),)
    return ends[max(len(ends) - 1 - after_mark, 0)]


def _field(param: str, found: Translated) -> str:
    if tool := _TOOL.match(param):
        field = ".input_schema" if tool[2] else "."
        return f"tools[{found.tools[int(tool[1])]}]{field}{param[tool.end() :]}"
    for pattern, name in ((_FORMAT, found.format_field), *_FIELDS):
        if field_match := pattern.match(param):
            return name + param[field_match.end() :]
    return param
