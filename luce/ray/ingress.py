"""What clients talk to: passes each request to the replica that has most of its prompt cached.

The response's bytes are the child's. The prompt's keys come from a replica, so that this process needs neither the
model file nor a tokenizer; where none tells them in time, the request's own text stands in for the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from luce.kvcache.block_keys import salted, text_keys
from luce.ray.cluster_config import parse_config
from luce.ray.request_facts import PROMPTS, group_salt, lost_event, request_text
from luce.ray.shared_routing import routing_of

#: seconds between two reports of a replica, and for one
REPORT_SECONDS, ASK_SECONDS = 0.5, 4.0
#: seconds for the keys of a prompt: a long one takes a replica's tokenizer a while
KEYS_SECONDS = 5.0
#: replicas that a request is sent to, if they end before they have answered
TRIES = 3

Result = TypeVar("Result")
_log = logging.getLogger("ray.serve")


class Ingress:
    """The deployment. `replicas`: the handle of their deployment; `content`: the configuration."""

    async def __init__(self, replicas: DeploymentHandle, content: Mapping[str, Any]) -> None:  # type: ignore[misc]
        config = parse_config(content)
        self._name, self._by_prefix = config.name, config.routing == "prefix"
        self._routing = routing_of(config.name)
        self._ask = replicas
        self._forward = replicas.options(method_name="forward", stream=True)
        if self._by_prefix:
            self._following = _apart(self._follow())

    async def __call__(self, request: Request) -> Response:
        """Any request of a client."""
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        routing = await self._keys(request, body)
        for _ in range(TRIES):
            name = uuid.uuid4().hex
            call = self._forward.remote(request.method, path, list(request.headers.items()), body, call=name, **routing)
            try:
                head = json.loads(await anext(aiter(call)))
            except (RayError, StopAsyncIteration) as error:
                # Nothing has reached the client.
                _log.warning("a replica has ended before it answered: %s", error)
                self._routing.ended(name)
                continue
            except BaseException:
                call.cancel()
                self._routing.ended(name)
                raise
            response = StreamingResponse(self._bytes(call, name, head), head["status"])
            response.raw_headers = [(name.lower().encode(), value.encode()) for name, value in head["headers"]]
            return response
        lost = {"message": "no replica answers", "type": "server_error", "param": None, "code": "replica_lost"}
        return JSONResponse({"error": lost}, 503, {"Retry-After": "5"})

    async def _keys(self, request: Request, body: bytes) -> dict[str, Any]:
        """What the router gets to know of a request."""
        path = request.url.path
        if not self._by_prefix or request.method != "POST" or path.removeprefix("/v1") not in PROMPTS:
            return {"keys": ()} if self._by_prefix else {}
        salt = group_salt(self._name, request.headers)
        try:
            async with asyncio.timeout(KEYS_SECONDS):
                plain: Sequence[bytes] = await self._ask.prompt_keys.remote(path, body)
        except (TimeoutError, RayError) as error:
            _log.warning("no replica tells the keys of a prompt: %s", error)
            return {"keys": [salted(key, salt) for key in text_keys(request_text(body))]}
        return {"keys": [salted(key, salt) for key in plain], "plain": plain, "salt": salt}

    async def _bytes(self, call: Any, name: str, head: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The rest of a response. A client that leaves ends it, and with it the child's work."""
        streams = any(value.startswith("text/event-stream") for name, value in head["headers"] if _is_type(name))
        try:
            async for chunk in call:
                yield chunk
        except RayError as error:
            _log.warning("a replica has ended in a response: %s", error)
            if not streams:
                raise
            yield lost_event("the replica of this reply is lost")
        finally:
            call.cancel()
            self._routing.ended(name)

    async def _follow(self) -> None:
        """Ask all replicas what they have cached, again and again."""
        while True:
            await self._reports(self._routing.names())
            await asyncio.sleep(REPORT_SECONDS)

    async def _reports(self, names: Sequence[str]) -> list[dict[str, Any] | None]:
        """One report of each."""
        return await asyncio.gather(*(_apart(self._report(name)) for name in names))

    async def _report(self, name: str) -> dict[str, Any] | None:
        """One report of a replica; None if it is silent."""
        life, number = self._routing.followed(name)
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(ASK_SECONDS):
                found = await self._ask.report.remote(target=name, life=life, after=number)
            if found is not None:
                self._routing.apply(name, found)
                return dict(found)
        return None

    async def status(self) -> list[dict[str, Any]]:
        """The replicas as Luce sees them, for `luce ray status`."""
        loads = self._routing.loads()
        found = await self._reports(list(loads))
        return [
            {"replica": name, "answers": each is not None, **load}
            for (name, load), each in zip(loads.items(), found, strict=True)
        ]


def _apart(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that is no part of a client's request: Serve takes calls of one request at the same time for one call."""
    return asyncio.create_task(work, context=contextvars.Context())


def _is_type(name: str) -> bool:
    return name.lower() == "content-type"
