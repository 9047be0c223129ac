"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from luce.server.answer import answer
from luce.server.chat_response import ChatResponse
from luce.server.completion_response import CompletionResponse
from luce.server.prepare import chat_job, completion_job
from luce.server.state import SERVER


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    server = request.app[SERVER]
    return await answer(request, partial(server.chat_work, chat_job), ChatResponse)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    server = request.app[SERVER]
    return await answer(request, partial(server.text_work, completion_job), CompletionResponse)
