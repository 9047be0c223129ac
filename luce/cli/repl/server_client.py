"""Requests to a server that speaks OpenAI's API, and its event streams. An event loop on a thread of its own does the
work, so that Ctrl+C interrupts every wait."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from luce.errors import ServerError, UsageError

T = TypeVar("T")
Json = dict[str, Any]

_CONNECT_SECONDS = 10.0
#: longest event of a stream, and longest message of an error
_EVENT_BYTES, _MESSAGE_CHARACTERS = 16 << 20, 300
#: names of the context's length in /v1/models
_LENGTHS = ("max_model_len", "context_length", "context_window", "max_context_length")


def base_url(text: str) -> str:
    """The address that paths such as /chat/completions follow: `/v1` is added to a bare host. Raises UsageError."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"--server: expected a URL such as http://127.0.0.1:8080/v1, got {text!r}")
    return text.rstrip("/") if parts.path.strip("/") else f"{text.rstrip('/')}/v1"


@dataclass(frozen=True)
class ListedModel:
    """A model as a server lists it."""

    #: the name, and those that mean the same
    names: tuple[str, ...]
    #: tokens; None if the server does not tell
    context: int | None
    #: kinds of requests; empty if the server does not tell
    capabilities: tuple[str, ...]


class ServerClient:
    """A server, reached with a key or none. Every failure is a ServerError of one line. Raises UsageError for a key
    that no header can hold."""

    def __init__(self, url: str, key: str) -> None:
        if not (key.isascii() and (key.isprintable() or not key)):
            raise UsageError("--api-key: expected printable ASCII characters")
        self.url = base_url(url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="luce-client", daemon=True)
        self._thread.start()
        self._session = self._call(self._open())

    def get(self, path: str, *, root: bool = False) -> Any:
        """The JSON of a GET. root: beside the API's /v1, not below it."""
        return self._call(self._get((self.url.removesuffix("/v1") if root else self.url) + path))

    def text(self, path: str, *, root: bool = False) -> str:
        """The text of a GET, as `get`."""
        body = self._call(self._read((self.url.removesuffix("/v1") if root else self.url) + path))
        return body.decode(errors="replace")

    def models(self) -> list[ListedModel]:
        """The models of the server, what is no model left out."""
        listed = self.get("/models")
        entries = listed.get("data") if isinstance(listed, dict) else None
        return [_listed(e) for e in entries or () if isinstance(e, dict) and isinstance(e.get("id"), str)]

    def stream(self, path: str, body: Json) -> Stream:
        """The events of a POST."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._post(path, body, events), self._loop)
        return Stream(events, work.cancel)

    def close(self) -> None:
        """End all requests. Idempotent."""
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _open(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS)
        return aiohttp.ClientSession(timeout=timeout, headers=self._headers)

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _get(self, url: str) -> Any:
        return _json(await self._read(url), self.url)

    async def _read(self, url: str) -> bytes:
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                await self._check(response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._failure(error) from None

    async def _post(self, path: str, body: Json, events: queue.SimpleQueue[Any]) -> None:
        """Put the JSON of each event, then None; or a ServerError."""
        try:
            async with self._session.post(self.url + path, json=body, allow_redirects=False) as response:
                await self._check(response)
                if response.content_type == "text/event-stream":
                    async for data in _events(response.content.iter_any(), self.url):
                        if data != b"[DONE]":
                            events.put(_json(data, self.url))
                else:  # a server that does not stream
                    events.put(_json(await response.read(), self.url))
            events.put(None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            events.put(self._failure(error))
        except ServerError as error:
            events.put(error)

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            text = (await response.content.read(1 << 16)).decode(errors="replace")
            raise ServerError(f"{self.url}: {response.status}: {_reason(text) or response.reason}")

    def _failure(self, error: Exception) -> ServerError:
        if isinstance(error, aiohttp.ClientConnectorDNSError | aiohttp.ClientConnectorSSLError):
            # Numbers of getaddrinfo and OpenSSL, of which os.strerror knows nothing or something else.
            return ServerError(f"{self.url}: {_short(error.os_error.strerror or str(error.os_error))}")
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
            return ServerError(f"{self.url}: {os.strerror(error.os_error.errno)}")
        if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError | ConnectionResetError):
            return ServerError(f"{self.url}: the server ended the connection in the middle of its response")
        reason = "no connection in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return ServerError(f"{self.url}: {_short(reason)}")


class Stream:
    """The events of a response, as JSON objects."""

    def __init__(self, events: queue.SimpleQueue[Any], cancel: Any) -> None:
        self._events = events
        self._cancel = cancel
        self._over = False

    def next(self) -> Json | None:
        """The next event; None at the end. Raises ServerError."""
        event = None if self._over else self._events.get()
        if isinstance(event, ServerError):
            self._over = True
            raise event
        self._over = event is None
        return event if isinstance(event, dict | None) else {}

    def close(self) -> None:
        """End the request. Idempotent."""
        self._over = True
        self._cancel()


def _listed(entry: Json) -> ListedModel:
    lengths = (entry.get(name) for name in _LENGTHS)
    context = next((n for n in lengths if isinstance(n, int) and not isinstance(n, bool)), None)
    return ListedModel((entry["id"], *_texts(entry.get("aliases"))), context, _texts(entry.get("capabilities")))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


async def _events(pieces: AsyncIterator[bytes], url: str) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    data: list[bytes] = []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) + sum(map(len, data)) > _EVENT_BYTES:
            raise ServerError(f"{url}: an event exceeds {_EVENT_BYTES:,} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if rest.startswith(b"data:"):
        data.append(rest[5:].strip())
    if data:
        yield b"\n".join(data)


def _json(data: bytes, url: str) -> Any:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise ServerError(f"{url}: the response is not JSON: {_short(data.decode(errors='replace'))}") from None
    if isinstance(value, dict) and value.get("error"):
        raise ServerError(f"{url}: {_reason(data.decode(errors='replace'))}")
    return value


def _reason(text: str) -> str:
    """The message in the body of an error, in one line."""
    try:
        body: Any = msgspec.json.decode(text)
    except msgspec.DecodeError:
        body = text
    for name in ("error", "message", "detail"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return _short(body if isinstance(body, str) else msgspec.json.encode(body).decode())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MESSAGE_CHARACTERS else line[: _MESSAGE_CHARACTERS - 1] + "…"
