"""What clients talk to: passes each request to the replica that has most of its prompt cached.

The response's bytes are the child's. The prompt's keys come from a replica, so that this process needs neither the
model file nor a tokenizer; where none tells them in time, the request's own text stands in for the prompt.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from luce.errors import TooLargeError
from luce.kvcache.block_keys import salted, text_keys
from luce.ray.actor_guard import guard_this_actor
from luce.ray.client_keys import ClientKeys
from luce.ray.cluster_config import parse_config
from luce.ray.group_watch import GroupWatch
from luce.ray.relayed_stream import PING, PING_SECONDS, RELAYING, RelayedStream, is_framed
from luce.ray.request_facts import (
    PROMPTS,
    body_limit,
    group_salt,
    lost_event,
    raw_target,
    request_text,
    text_headers,
)
from luce.ray.shared_routing import routing_of
from luce.server.errors import openai_error

#: seconds between two reports of a replica, and for one
REPORT_SECONDS, ASK_SECONDS = 0.5, 4.0
#: seconds without a request behind which an ingress asks for reports only so often: each node has one, and each replica
#: answers all of them
QUIET_SECONDS, QUIET_REPORT_SECONDS = 30.0, 5.0
#: seconds for the keys of a prompt: a long one takes a replica's tokenizer a while
KEYS_SECONDS = 5.0
#: replicas that a request is sent to, if they end before they have answered
TRIES = 3

Result = TypeVar("Result")
_log = logging.getLogger("ray.serve")


class Sent(NamedTuple):
    """A client's request: method, path with query, headers and body, and what the router gets to know of it."""

    request: tuple[str, str, list[tuple[str, str]], bytes]
    routing: Mapping[str, Any]


class Answer(NamedTuple):
    """A replica's response that has begun: the call of it, and the call's name."""

    call: Any
    name: str
    status: int
    headers: Sequence[Sequence[str]]

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return any(value.startswith("text/event-stream") for name, value in self.headers if _is_type(name))


class Ingress:
    """The deployment. `replicas`: the handle of their deployment; `content`: the configuration."""

    async def __init__(self, replicas: DeploymentHandle, content: Mapping[str, Any]) -> None:  # type: ignore[misc]
        config = parse_config(content)
        guard_this_actor(config)
        self._name, self._by_prefix, self._resume = config.name, config.routing == "prefix", config.resume
        self._routing, self._groups = routing_of(config.name), GroupWatch()
        self._ask = replicas
        self._forward = replicas.options(method_name="forward", stream=True)
        self._limit, self._clients = body_limit(config.replica.flags), ClientKeys(config.api_key_file)
        #: when a client's last request came
        self._requested = time.monotonic()
        if self._by_prefix:
            self._following = _apart(self._follow())

    async def __call__(self, request: Request) -> Response:
        """Any request of a client."""
        self._requested = time.monotonic()
        body = await self._body(request)
        if body is None:
            error = TooLargeError(f"the request body exceeds {self._limit >> 20} MiB (--max-body-mib)")
            return JSONResponse(openai_error(error), error.status)
        headers = text_headers(request.scope)
        routing = await self._keys(request, headers, body)
        sent = Sent((request.method, raw_target(request.scope), list(headers.items()), body), routing)
        answer = await self._answer(sent)
        if answer is None:
            lost = {"message": "no replica answers", "type": "server_error", "param": None, "code": "replica_lost"}
            return JSONResponse({"error": lost}, 503, {"Retry-After": "5"})
        response = StreamingResponse(self._bytes(sent, answer), answer.status)
        kept = [(name, value) for name, value in answer.headers if name.lower() not in RELAYING]
        response.raw_headers = [(name.lower().encode(), value.encode()) for name, value in kept]
        return response

    async def _body(self, request: Request) -> bytes | None:
        """A request's body, None if a replica would refuse it for its size."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limit:
                return None
        return bytes(body)

    async def _answer(self, sent: Sent, record: bytes = b"") -> Answer | None:
        """A replica's answer to a request, which goes to another one where it ends before; None if that is in vain.
        `record`: of a stream that is to go on."""
        for _ in range(TRIES):
            name = uuid.uuid4().hex
            self._routing.asked(name)
            call = self._forward.remote(*sent.request, record, call=name, **sent.routing)
            try:
                head = json.loads(await anext(aiter(call)))
            except BaseException as error:
                call.cancel()
                self._routing.ended(name)
                if not _is_failure(error):
                    raise
                # Nothing of it has reached the client.
                _log.warning("a replica has ended before it answered: %s", error)
            else:
                return Answer(call, name, head["status"], head["headers"])
        return None

    async def _keys(self, request: Request, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """What the router gets to know of a request."""
        path = request.url.path
        if not self._by_prefix or request.method != "POST" or path.removeprefix("/v1") not in PROMPTS:
            return {"keys": ()} if self._by_prefix else {}
        if not self._clients.may_ask(headers):
            # Any replica refuses it; nothing is tokenised for it before.
            return {"keys": ()}
        salt = group_salt(self._name, headers)
        missing = "no replica tells the keys of a prompt"
        asked = self._ask.prompt_keys.remote(path, body)
        plain: Sequence[bytes] | None = await _answered(asked, KEYS_SECONDS, missing)
        if plain is None:
            return {"keys": [salted(key, salt) for key in text_keys(request_text(body))]}
        return {"keys": [salted(key, salt) for key in plain], "plain": plain, "salt": salt}

    async def _bytes(self, sent: Sent, answer: Answer) -> AsyncIterator[bytes]:
        """The rest of a response. A client that leaves ends it, and with it the child's work. A stream whose replica is
        lost goes on at another one."""
        stream = RelayedStream() if is_framed(answer.headers) else None
        while True:
            try:
                async for chunk in answer.call:
                    if data := chunk if stream is None else stream.feed(chunk):
                        yield data
                return
            except (Exception, asyncio.CancelledError) as error:
                if not _is_failure(error) or (stream is None and not answer.streams):
                    raise
                _log.warning("a replica has ended in a response: %s", error)
            finally:
                answer.call.cancel()
                self._routing.ended(answer.name)
            if stream is None or not stream.lose():
                break
            waiting = asyncio.create_task(self._answer(sent, stream.record))
            try:
                for _ in range(math.ceil(self._resume / PING_SECONDS)):
                    if (await asyncio.wait([waiting], timeout=PING_SECONDS))[0]:
                        break
                    yield PING
                found = waiting.result() if waiting.done() else None
            except BaseException:
                self._drop(waiting)
                raise
            if found is None or not is_framed(found.headers):
                self._drop(waiting)
                break
            answer = found
        yield lost_event("the replica of this reply is lost")

    def _drop(self, waiting: asyncio.Task[Answer | None]) -> None:
        """End a call whose answer nobody reads."""

        def end(done: asyncio.Task[Answer | None]) -> None:
            if not done.cancelled() and done.exception() is None and (answer := done.result()) is not None:
                answer.call.cancel()
                self._routing.ended(answer.name)

        waiting.cancel()
        waiting.add_done_callback(end)

    async def _follow(self) -> None:
        """Ask all replicas what they have cached, again and again."""
        followed = -math.inf
        while True:
            now = time.monotonic()
            if now - self._requested < QUIET_SECONDS or now - followed >= QUIET_REPORT_SECONDS:
                followed = now
                await self._reports()
            await asyncio.sleep(REPORT_SECONDS)

    async def _reports(self) -> None:
        """One report of each replica."""
        await asyncio.gather(*(_apart(self._report(name)) for name in self._routing.names()))

    async def _report(self, name: str) -> None:
        """One report of a replica, which may be silent."""
        life, number = self._routing.followed(name)
        found = await _answered(self._ask.report.remote(target=name, life=life, after=number), ASK_SECONDS)
        if found is not None:
            self._routing.apply(name, found)

    async def status(self) -> dict[str, Any]:
        """The replicas as Luce sees them, and the groups that find no place, for `luce ray status`."""
        if self._by_prefix:
            await self._reports()
        loads = self._routing.loads()
        found = await asyncio.gather(*(_apart(self._describe(name)) for name in loads))
        replicas = [
            {"replica": name, "answers": each is not None, **load, **(each or {})}
            for (name, load), each in zip(loads.items(), found, strict=True)
        ]
        return {"replicas": replicas, "pending": await asyncio.to_thread(self._groups.report)}

    async def _describe(self, name: str) -> dict[str, Any] | None:
        """What a replica says of itself; None if it is silent."""
        found = await _answered(self._ask.describe.remote(target=name), ASK_SECONDS)
        return None if found is None else dict(found)


def _apart(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that is no part of a client's request: Serve takes calls of one request at the same time for one call."""
    return asyncio.create_task(work, context=contextvars.Context())


async def _answered(call: Awaitable[Any], seconds: float, missing: str = "") -> Any:
    """A replica's answer to a question, None if it fails or takes longer. `missing`: what the log says then, before the
    reason; "": nothing."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except BaseException as error:
        if not _is_failure(error):
            raise
        if missing:
            _log.warning("%s: %s", missing, error)
        return None


def _is_failure(error: BaseException) -> bool:
    """Whether an error of a call means that its replica has failed. A call raises the replica's own exceptions,
    CancelledError too; where this task is cancelled, the error is the task's."""
    task = asyncio.current_task()
    cancelled = isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()
    return cancelled or isinstance(error, Exception)


def _is_type(name: str) -> bool:
    return name.lower() == "content-type"
