"""The handlers of OpenAI's /v1/responses. Luce stores no response."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from aiohttp import web

from luce.api import Model
from luce.errors import NotFoundError
from luce.server.answer import answer
from luce.server.prepare import Job, chat_request_job, named_for
from luce.server.renamed import renamed
from luce.server.response import Json
from luce.server.responses_chat import ENCRYPTED, Translated, translated
from luce.server.responses_request import ResponsesRequest
from luce.server.responses_response import ResponsesDetails, ResponsesResponse
from luce.server.schema import decode
from luce.server.state import SERVER
from luce.text.effort import efforts

# Fields of the chat that carry a field of another name.
_MESSAGE = re.compile(r"messages(?:\[(\d+)\])?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function")
_FORMAT = re.compile(r"response_format(\.json_schema)?")


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    return await answer(request, partial(request.app[SERVER].chat_work, responses_job), ResponsesResponse)


async def stored(request: web.Request) -> web.StreamResponse:
    """GET and DELETE /v1/responses/{id}: there is none."""
    raise NotFoundError(
        f"there is no response {request.match_info['id'][:80]!r}: Luce stores no responses", code="response_not_found"
    )


def responses_job(
    body: bytes, headers: Mapping[str, str], model: Model, stopped: Callable[[], bool] = lambda: False
) -> Job:
    """The Job of a body. Raises RequestError, also soon after `stopped` has become true."""
    request, unknown = decode(body, ResponsesRequest)
    found = translated(request, model.fingerprint, reasons=len(efforts(model.chat)) > 1)
    field = partial(_field, found=found, form_is_text=request.response_format is None)
    with renamed(field):
        job = chat_request_job(found.chat, unknown + found.skipped_items, headers, model, stopped, inputs=found.inputs)
    return replace(
        named_for(job, field),
        skipped_tools=found.skipped_tools,
        details=ResponsesDetails(
            _echo(request),
            found.tools,
            summarised=request.reasoning is not None and request.reasoning.summary not in (None, "none"),
            encrypted=ENCRYPTED in (request.include or ()),
        ),
    )


def _echo(request: ResponsesRequest) -> Json:
    """The fields of the request that its response repeats."""
    reasoning, text = request.reasoning, request.text
    form = None if text is None else text.format
    choice = request.tool_choice
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": request.safety_identifier,
        "text": {
            "format": {"type": "text"} if form is None else _sent(form),
            "verbosity": (None if text is None else text.verbosity) or "medium",
        },
        "tool_choice": choice or "auto" if isinstance(choice, str | None) else _sent(choice),
        "tools": request.tools or [],
        "user": request.user,
    }


def _sent(value: object) -> Json:
    """The fields of a struct that were sent."""
    return {name: found for name in value.__struct_fields__ if (found := getattr(value, name)) is not None}  # type: ignore[attr-defined]


def _field(param: str, found: Translated, *, form_is_text: bool) -> str:
    """The body's name of a field of the chat."""
    if message := _MESSAGE.match(param):
        return (found.paths[int(message[1])] if message[1] else "input") + param[message.end() :]
    if tool := _TOOL.match(param):
        return list(found.tools.values())[int(tool[1])].path + param[tool.end() :]
    if form_is_text and (form := _FORMAT.match(param)):
        return "text.format" + param[form.end() :]
    return param
