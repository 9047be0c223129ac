"""Answers a request for replies: its job, the events of its sequences, and the response, whole or streamed."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace

import msgspec
from aiohttp import web

from luce import log
from luce.api import Model
from luce.engine.events import Event, Failed, Finished, FinishReason, Progress, PromptScores, Tokens
from luce.errors import DeadlineError, LuceError, RequestError, ShardLostError
from luce.server.body import read_body
from luce.server.genai_span import genai_span
from luce.server.metrics import Metrics
from luce.server.prepare import Job
from luce.server.relay import FramedStream, StreamRecord, begins_record
from luce.server.replies import Replies
from luce.server.response import ResponseBuilder, origin
from luce.server.schema import NamedModel, named_model
from luce.server.state import CALL, SERVER, Call, Result, Server, check_devices
from luce.server.stream import COMMENT_PING, ClientGoneError, EventStream, ServerSentEvent
from luce.server.stream_frames import RELAY_HEADER
from luce.text.grammar import WantedReply
from luce.text.reply_parser import Part

_log = logging.getLogger(__name__)


async def answer(
    request: web.Request,
    prepare: Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], Awaitable[Job]],
    builder_type: type[ResponseBuilder],
) -> web.StreamResponse:
    """The response to a request. `prepare` makes the job of a body, on a worker thread."""
    server, call = request.app[SERVER], request[CALL]
    call.relayed = server.keys.is_admin(request.headers.get(RELAY_HEADER, ""))
    out = (FramedStream if call.relayed else EventStream)(request, server.config.write_timeout)
    try:
        async with received(request, devices=True, out=out) as (body, model):
            job = await prepared(request, prepare, body, model)
            return await _answer(request, job, model, builder_type, out)
    except ClientGoneError:
        call.client_gone = True
    except Exception as error:
        # Before the headers of a stream that waited for its model, the error has a status.
        if not out.started:
            raise
        with contextlib.suppress(ClientGoneError):
            await _send_failure(request, out, error, builder_type.refusal)
            if builder_type.end:
                await out.send_encoded(builder_type.end)
    return out.response


async def _answer(
    request: web.Request, job: Job, model: Model, builder_type: type[ResponseBuilder], out: EventStream
) -> web.StreamResponse:
    """The response to a job. Raises ClientGoneError."""
    server = request.app[SERVER]
    server.metrics.unknown_fields.inc(job.unknown_fields)
    server.metrics.skipped_tools.inc(job.skipped_tools)
    job = await _with_grammar(job, model, server.metrics)
    call = request[CALL]
    record = _record(call, job)
    if record is not None:
        job = replace(job, params=replace(job.params, seed=record.seed))
        origin.set(record.origin)
    builder = builder_type(job, model)
    call.log_fields |= {"stream": int(job.stream), "session": _short(job.session)}
    job = replace(job, session=_fair_key(request, job, server.keys.holder(request.headers)))
    ended = frozenset[int]() if record is None else record.ended
    given = {} if record is None else record.given(range(job.choices))
    with Replies(job, model, server.metrics, call.arrived, given=given, ended=ended) as replies:
        try:
            replies.admit()
            if job.stream:
                await _stream(request, job, builder, replies, out, record)
                return out.response
            while not replies.ended:
                index, event = await replies.next()
                _add(builder, index, event)
            encoded = await server.work(lambda: msgspec.json.encode(builder.reply()))
            return web.Response(body=encoded, content_type="application/json")
        finally:
            parsers = [choice.parser for choice in builder.choices]
            server.metrics.bad_tool_calls.inc(sum(parser.bad_calls + parser.cut_calls for parser in parsers))
            call.log_fields |= builder.log_fields(call.arrived)
            if server.tracing is not None:
                call.span = genai_span(job, builder, call.arrived, time.monotonic())


def _record(call: Call, job: Job) -> StreamRecord | None:
    """The record of a stream that may go on elsewhere, or comes from there; None for any other request. Raises
    RequestError."""
    if call.record:
        if not begins_record(job):
            raise RequestError("this request has no stream that could go on")
        return StreamRecord.read(call.record)
    return StreamRecord.new(job) if call.relayed and begins_record(job) else None


async def _with_grammar(job: Job, model: Model, metrics: Metrics) -> Job:
    """The job with the grammar of its replies, once it is compiled."""
    wanted = WantedReply(job.reply_format, job.call_format)
    if not any(wanted):
        return job
    try:
        grammar = await model.grammars.compiled(wanted, job.reasoning_tokens)
    except RequestError as error:
        metrics.grammar_refused.labels(error.code).inc()
        raise
    metrics.grammar_relaxed.inc(len(grammar.relaxed))
    return replace(job, grammar=grammar)


@contextlib.asynccontextmanager
async def received(
    request: web.Request, *, devices: bool, out: EventStream | None = None
) -> AsyncIterator[tuple[bytes, Model]]:
    """The body of a request and the model that it names, which is loaded if needed and stays until the block ends.
    `devices`: the request needs those of the model. `out`: the stream of its replies, if it asks for one, which is
    started and kept alive where the load takes long.

    Raises UnavailableError, NotFoundError for an unknown model, ClientGoneError, and what the load and
    luce.server.body.read_body raise.
    """
    server = request.app[SERVER]
    server.check_open(devices=devices)
    body = await read_body(request, server)
    server.check_open()
    named = await server.work(named_model, body) if server.pool.several else NamedModel()

    async def heartbeat() -> float:
        assert out is not None
        await out.start()
        await out.send_encoded(COMMENT_PING)
        return server.config.sse_ping

    streams = out is not None and named.stream is True
    async with server.pool.lease(server.pool.entry(named.model), heartbeat if streams else None) as model:
        if devices:
            check_devices(model)
        yield body, model


async def prepared(
    request: web.Request,
    prepare: Callable[[bytes, Mapping[str, str], Model, Callable[[], bool]], Awaitable[Result]],
    body: bytes,
    model: Model,
) -> Result:
    """What `prepare` makes of a body, on a worker thread."""
    left = threading.Event()
    try:
        return await prepare(body, request.headers, model, left.is_set)
    finally:
        # A client that has left cancels this task, not the thread.
        left.set()


async def _stream(
    request: web.Request,
    job: Job,
    builder: ResponseBuilder,
    replies: Replies,
    out: EventStream,
    record: StreamRecord | None,
) -> None:
    """Send the events of all replies, behind those that a record has. Raises ClientGoneError."""
    await out.start()
    try:
        await _open_replies(job, builder, out, record)
        await _send_replies(request.app[SERVER], builder, replies, out)
        if record is None or not record.closed:
            _note(out, "closed")
            await out.send(builder.ending())
    except ClientGoneError:
        raise
    except Exception as error:
        await _send_failure(request, out, error, builder.failure)
    if builder.end and (record is None or not record.over):
        _note(out, "over")
        await out.send_encoded(builder.end)


async def _open_replies(job: Job, builder: ResponseBuilder, out: EventStream, record: StreamRecord | None) -> None:
    """Send the first events of all replies. Those that a record has, and what followed them, are only made again."""
    if record is not None and not record.opened:
        _note(out, *record.head)
    for index in range(job.choices):
        events = list(builder.opening(index))
        if record is None or index not in record.opened:
            _note(out, "opened", index)
            await out.send(events)
    for index, event in () if record is None else record.events:
        list(_events(builder, index, event, _add(builder, index, event)))


async def _send_replies(server: Server, builder: ResponseBuilder, replies: Replies, out: EventStream) -> None:
    while not replies.ended:
        # Not after each wait alone: the progress of a long prompt is an event that sends nothing.
        if out.silence >= server.config.sse_ping:
            await out.send_encoded(builder.ping())
        try:
            index, event = await replies.next(server.config.sse_ping - out.silence)
        except TimeoutError:
            continue
        if isinstance(out, FramedStream):
            if _goes_on_elsewhere(event):
                out.abort()
                raise ClientGoneError
            out.note_event(index, event)
        parts = _add(builder, index, event)
        if isinstance(event, PromptScores):
            await out.send_encoded(await server.work(_encoded_scores, builder, index))
        else:
            await out.send(_events(builder, index, event, parts))


def _events(builder: ResponseBuilder, index: int, event: Event, parts: list[Part]) -> Iterable[ServerSentEvent]:
    """What a stream says of an event."""
    if isinstance(event, Tokens):
        return builder.extension(index, parts, event.tokens)
    if isinstance(event, Finished):
        return [*builder.extension(index, parts), *builder.closing(index)]
    return builder.progress(index, event) if isinstance(event, Progress) else ()


def _goes_on_elsewhere(event: Event) -> bool:
    """Whether an event ends a reply that another server can go on with: this one ends, or has lost a shard."""
    if isinstance(event, Finished):
        return event.reason is FinishReason.SHUTDOWN
    return isinstance(event, Failed) and isinstance(event.error, ShardLostError)


def _note(out: EventStream, *values: object) -> None:
    if isinstance(out, FramedStream):
        out.note(*values)


async def _send_failure(
    request: web.Request,
    out: EventStream,
    error: Exception,
    events: Callable[[LuceError], Iterable[ServerSentEvent]],
) -> None:
    """Send an error as `events`, for the status is sent already; the connection closes behind it."""
    if not isinstance(error, LuceError):
        log.failure(_log, "stream failed", error)
        error = LuceError("internal error")
    request[CALL].log_fields["error"] = error.code or error.type
    await out.send(events(error))
    request.protocol.close()


def _add(builder: ResponseBuilder, index: int, event: Event) -> list[Part]:
    """Give an event to the builder; raises the error of a sequence that failed."""
    if isinstance(event, Failed):
        raise event.error
    parts = builder.add(index, event)
    if isinstance(event, Finished) and event.reason is FinishReason.DEADLINE and not builder.choices[index].tokens:
        raise DeadlineError("the deadline of this request passed before its first token")
    return parts


def _encoded_scores(builder: ResponseBuilder, index: int) -> bytes:
    return b"".join([event.encoded() for event in builder.scores(index)])


def _fair_key(request: web.Request, job: Job, holder: str) -> str:
    """Who shares slots and chunks of prompts with others: a session of an API key, the key, or the connection."""
    if job.session or holder:
        return f"{holder}/{job.session}"
    return f"connection {id(request.protocol)}"


def _short(session: str) -> str | None:
    """Four hex digits that distinguish sessions in the log without revealing their ids."""
    return hashlib.blake2b(session.encode(errors="replace"), digest_size=2).hexdigest() if session else None
