"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from luce import __version__, log
from luce.api import Model
from luce.engine.events import Event, Failed, Finished, FinishReason, Progress, PromptScores, Tokens
from luce.errors import DeadlineError, LuceError
from luce.server.body import read_body
from luce.server.chat_response import ChatResponse
from luce.server.completion_response import CompletionResponse
from luce.server.errors import openai_error
from luce.server.prepare import Job, chat_job, completion_job
from luce.server.replies import Replies
from luce.server.response import ResponseBuilder
from luce.server.state import CALL, SERVER, Server
from luce.server.stream import ClientGoneError, EventStream
from luce.text.reasoning import Delta

_log = logging.getLogger(__name__)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    server = request.app[SERVER]
    return await _answer(request, partial(server.chat_work, chat_job), ChatResponse)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    server = request.app[SERVER]
    return await _answer(request, partial(server.text_work, completion_job), CompletionResponse)


async def _answer(
    request: web.Request,
    prepare: Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], Awaitable[Job]],
    builder_type: type[ResponseBuilder],
) -> web.StreamResponse:
    server = request.app[SERVER]
    server.serving_model()
    body = await read_body(request, server)
    model = server.serving_model()
    left = threading.Event()
    try:
        job = await prepare(body, request.headers, model, left.is_set)
    finally:
        # A client that has left cancels this task, not the thread.
        left.set()
    del body
    server.metrics.unknown_fields.inc(job.unknown_fields)
    builder = builder_type(job, model, __version__)
    call = request[CALL]
    call.log_fields |= {"stream": int(job.stream), "session": _short(job.session)}
    job = replace(job, session=_fair_key(request, job, server.keys.holder(request.headers)))
    with Replies(job, model, server.metrics, call.arrived) as replies:
        try:
            replies.admit()
            if job.stream:
                return await _stream(request, server, job, builder, replies)
            while not replies.ended:
                index, event = await replies.next()
                _add(builder, index, event)
            encoded = await server.work(lambda: msgspec.json.encode(builder.reply()))
            return web.Response(body=encoded, content_type="application/json")
        finally:
            call.log_fields |= builder.log_fields(call.arrived)


async def _stream(
    request: web.Request, server: Server, job: Job, builder: ResponseBuilder, replies: Replies
) -> web.StreamResponse:
    out = EventStream(request, server.config.write_timeout)
    try:
        await out.start()
        try:
            for index in range(job.choices):
                await _send(out, builder.opening(index))
            while not replies.ended:
                try:
                    index, event = await replies.next(server.config.sse_ping)
                except TimeoutError:
                    await out.ping()
                    continue
                delta = _add(builder, index, event)
                if isinstance(event, Tokens):
                    await _send(out, builder.chunk(index, delta, event.tokens))
                elif isinstance(event, Finished):
                    await _send(out, builder.chunk(index, delta))
                    await _send(out, builder.closing(index))
                elif isinstance(event, PromptScores):
                    encoded = await server.work(_scored, builder, index)
                    if encoded is not None:
                        await out.send_encoded(encoded)
                elif isinstance(event, Progress) and job.progress:
                    await out.send(builder.progress(index, event))
            if job.include_usage:
                await out.send(builder.usage_chunk())
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not isinstance(error, LuceError):
                log.failure(_log, "stream failed", error)
                error = LuceError("internal error")
            request[CALL].log_fields["error"] = error.code or error.type
            # The status is sent already, so the error is sent as an event, and the connection closes after it.
            await out.send(openai_error(error))
            request.protocol.close()
        await out.done()
    except ClientGoneError:
        request[CALL].client_gone = True
    return out.response


def _add(builder: ResponseBuilder, index: int, event: Event) -> Delta:
    """Give an event to the builder; raises the error of a sequence that failed."""
    if isinstance(event, Failed):
        raise event.error
    delta = builder.add(index, event)
    if isinstance(event, Finished) and event.reason is FinishReason.DEADLINE and not builder.choices[index].tokens:
        raise DeadlineError("the deadline of this request passed before its first token")
    return delta


async def _send(out: EventStream, chunk: dict[str, Any] | None) -> None:
    if chunk is not None:
        await out.send(chunk)


def _scored(builder: ResponseBuilder, index: int) -> bytes | None:
    chunk = builder.scored(index)
    return None if chunk is None else msgspec.json.encode(chunk)


def _fair_key(request: web.Request, job: Job, holder: str) -> str:
    """Who shares slots and chunks of prompts with others: a session of an API key, the key, or the connection."""
    if job.session or holder:
        return f"{holder}/{job.session}"
    return f"connection {id(request.protocol)}"


def _short(session: str) -> str | None:
    """Four hex digits that distinguish sessions in the log without revealing their ids."""
    return hashlib.blake2b(session.encode(errors="replace"), digest_size=2).hexdigest() if session else None
