"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from luce import __version__
from luce.api import Model
from luce.engine.events import Event, Failed, Finished, FinishReason, Progress, PromptScores, Tokens
from luce.errors import BodyTimeoutError, DeadlineError, LuceError, RequestError, TooLargeError
from luce.server.chat_response import ChatShape
from luce.server.completion_response import TextShape
from luce.server.errors import openai_error
from luce.server.prepare import Job, chat_job, completion_job
from luce.server.replies import Replies
from luce.server.response import Shape
from luce.server.state import CALL, SERVER, Server
from luce.server.stream import ClientGoneError, EventStream
from luce.text.reasoning import Said

_log = logging.getLogger(__name__)

_BODY_SECONDS = 60.0


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _answer(request, chat_job, ChatShape)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _answer(request, completion_job, TextShape)


async def _answer(
    request: web.Request, prepare: Callable[[bytes, Mapping[str, str], Model], Job], shaped: type[Shape]
) -> web.StreamResponse:
    server = request.app[SERVER]
    server.serving_model()
    body = await _read_body(request, server.config.max_body_mib)
    model = server.serving_model()
    job = await server.work(prepare, body, request.headers, model)
    del body
    server.metrics.unknown_fields.inc(job.unknown)
    shape = shaped(job, model, __version__)
    call = request[CALL]
    call.figures |= {"stream": int(job.stream), "session": _short(job.session)}
    with Replies(job, model, server.metrics, call.arrived) as replies:
        try:
            replies.admit()
            if job.stream:
                return await _stream(request, server, job, shape, replies)
            while not replies.ended:
                index, event = await replies.next()
                _add(shape, index, event)
            encoded = await server.work(lambda: msgspec.json.encode(shape.reply()))
            return web.Response(body=encoded, content_type="application/json")
        finally:
            call.figures |= shape.figures(call.arrived)


async def _stream(request: web.Request, server: Server, job: Job, shape: Shape, replies: Replies) -> web.StreamResponse:
    out = EventStream(request, server.config.write_timeout)
    await out.start()
    try:
        try:
            for index in range(job.choices):
                await _send(out, shape.opening(index))
            while not replies.ended:
                try:
                    index, event = await replies.next(server.config.sse_ping)
                except TimeoutError:
                    await out.ping()
                    continue
                said = _add(shape, index, event)
                if isinstance(event, Tokens):
                    await _send(out, shape.chunk(index, said, event.tokens))
                elif isinstance(event, Finished):
                    await _send(out, shape.chunk(index, said))
                    await _send(out, shape.closing(index))
                elif isinstance(event, PromptScores):
                    encoded = await server.work(_scored, shape, index)
                    if encoded is not None:
                        await out.send_encoded(encoded)
                elif isinstance(event, Progress) and job.progress:
                    await out.send(shape.progress(index, event))
            if job.include_usage:
                await out.send(shape.usage_chunk())
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            if not isinstance(error, LuceError):
                _log.exception("a stream failed")
                error = LuceError("internal error")
            request[CALL].figures["error"] = error.code or error.type
            # The status is sent already: the error comes as an event, and the connection ends with it.
            await out.send(openai_error(error))
            request.protocol.close()
        await out.done()
    except ClientGoneError:
        request[CALL].gone = True
    return out.response


def _add(shape: Shape, index: int, event: Event) -> Said:
    """Give an event to the shape; raises the error of a sequence that failed."""
    if isinstance(event, Failed):
        raise event.error
    said = shape.add(index, event)
    if isinstance(event, Finished) and event.reason is FinishReason.DEADLINE and not shape.choices[index].tokens:
        raise DeadlineError("the time for this request was over before its first token")
    return said


async def _send(out: EventStream, chunk: dict[str, Any] | None) -> None:
    if chunk is not None:
        await out.send(chunk)


def _scored(shape: Shape, index: int) -> bytes | None:
    chunk = shape.scored(index)
    return None if chunk is None else msgspec.json.encode(chunk)


async def _read_body(request: web.Request, limit_mib: int) -> bytes:
    """The body, decompressed. The application's client_max_size bounds what is kept of it."""
    too_large = TooLargeError(f"the request body exceeds {limit_mib} MiB (--max-body-mib)")
    if request.content_length is not None and request.content_length > limit_mib << 20:
        raise too_large
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise BodyTimeoutError(f"the request body did not arrive within {_BODY_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError:
        raise RequestError("request body: cannot be decoded as its headers say", code="invalid_body") from None


def _short(session: str) -> str | None:
    """Four digits that tell sessions apart in the log without naming them."""
    return hashlib.blake2b(session.encode(errors="replace"), digest_size=2).hexdigest() if session else None
