"""What is no HTTP/1.1, half-closed connections, and compressed bodies, sent as bytes."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import socket
import zlib
from typing import Any

import pytest
import zstandard

from luce import __version__, log
from luce.config.settings import Config
from luce.errors import DeviceError
from luce.server.app import start
from luce.server.state import Server
from tests.support.http_server import Running, running
from tests.support.scripted_model import REPLY, saying

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
SECRET = b"Once-upon-a-time-" * 100


def request(*headers: bytes, version: bytes = b"1.1", **fields: Any) -> bytes:
    """A chat request as bytes."""
    body = json.dumps({**HI, **fields}).encode()
    sent = (b"Content-Type: application/json", b"Content-Length: %d" % len(body), *headers)
    return HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) + b"\r\n".join(sent) + b"\r\n\r\n" + body


async def answer(here: Running, sent: bytes, *, half_close: bool = False) -> bytes:
    """All bytes up to the end of the connection, which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
    writer.write(sent)
    if half_close:
        writer.write_eof()
    got = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    await writer.wait_closed()
    return got


def one_response(got: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body of a connection's only response."""
    head, _, body = got.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert status.startswith("HTTP/1.1 ") and len(body) == int(headers["content-length"])
    return int(status.split(" ")[1]), headers, json.loads(body)


MALFORMED = {
    "Content-Length in characters": HEAD + b"Content-Length: " + SECRET + b"\r\n\r\n",
    "control character in a key": HEAD + b"Authorization: Bearer " + SECRET + b"\x01\r\n\r\n",
    "NUL in a header": HEAD + b"X-Name: " + SECRET + b"\0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + SECRET,
    "chunks": HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET,
    "long line": b"GET /" + SECRET * 100 + b" HTTP/1.1\r\n\r\n",
    "long header": HEAD + b"X-Name: " + SECRET * 100 + b"\r\n\r\n",
    "many headers": HEAD + (SECRET[:20] + b": x\r\n") * 500 + b"\r\n",
    "no Host": b"GET /livez HTTP/1.1\r\nX-Name: " + SECRET + b"\r\n\r\n",
    "method": SECRET[:20] + b" / HTTP/1.1\r\n\r\n",
    "address": b"GET http://[" + SECRET + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SECRET,
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_requests(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    writer = log.configure("debug")
    try:
        async with running() as here:
            status, headers, body = one_response(await answer(here, MALFORMED[name]))
            assert status == 400 and headers["content-type"] == "application/json"
            assert headers["server"] == f"luce/{__version__}" and headers["connection"] == "close"
            assert body["error"]["code"] == "malformed_http" and body["error"]["type"] == "invalid_request_error"
            assert headers["x-request-id"].startswith("req_") and "Once" not in json.dumps(body)
            assert (await here.get("/livez"))[0] == 200
            _, text, _ = await here.get("/metrics")
            assert 'luce_requests_total{endpoint="other",status="400"} 1.0' in text
    finally:
        await asyncio.to_thread(writer.stop)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "route=/" not in line]
    # The same line for each of them.
    assert line.partition(" warning ")[2] == "malformed request status=400 client=127.0.0.1"


REFUSED = {
    "HTTP/0.9": (b"GET /livez\r\n\r\n", 505, "http_version_not_supported"),
    "HTTP/0.9 as it is": (b"GET /livez\r\n", 505, "http_version_not_supported"),
    "HTTP/0.9 named": (b"GET /livez HTTP/0.9\r\n\r\n", 505, "http_version_not_supported"),
    "CONNECT": (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n" + SECRET, 501, "not_supported"),
    "websocket": (
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + SECRET,
        501,
        "not_supported",
    ),
    "upgrade with a body": (request(b"Connection: upgrade", b"Upgrade: foo/2"), 501, "not_supported"),
    "Expect": (request(b"Expect: frob"), 417, "expectation_failed"),
    "Expect, no endpoint": (
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: frob\r\n\r\n",
        417,
        "expectation_failed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_requests_that_are_refused_whatever_their_path(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sent, expected, code = REFUSED[name]
    writer = log.configure("info")
    try:
        async with running() as here:
            status, headers, body = one_response(await answer(here, sent))
            assert (status, body["error"]["code"]) == (expected, code)
            assert headers["connection"] == "close" and headers["server"] == f"luce/{__version__}"
            assert here.model.engine.stats().steps == 0
    finally:
        await asyncio.to_thread(writer.stop)
    (line,) = capsys.readouterr().err.splitlines()
    assert " request " in line and f"status={expected}" in line and "Once" not in line


async def test_what_clients_offer_or_expect_as_a_rule() -> None:
    offer = (b"Connection: Upgrade, HTTP2-Settings, close", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")
    async with running() as here:
        status, _, body = one_response(await answer(here, request(*offer)))
        assert status == 200 and body["choices"][0]["message"]["content"] == REPLY
        got = await answer(here, request(b"Expect: 100-continue", b"Connection: close"))
        interim, _, rest = got.partition(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue" and one_response(rest)[0] == 200


async def test_bugs_are_logged_without_what_a_request_holds(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as here:

        def bug(*args: Any, **options: Any) -> Any:
            try:
                raise ValueError("a-prompt")
            except ValueError:
                raise KeyError("a-key") from None

        here.server.shown_model(None).reply_text = bug  # type: ignore[method-assign]
        status, body, _ = await here.post(CHAT, HI)
        assert status == 500 and body["error"]["message"] == "internal error"
        assert "request handler failed" in caplog.text and "KeyError" in caplog.text and "in bug" in caplog.text
        assert "a-prompt" not in caplog.text.replace('ValueError("a-prompt")', "")
        assert "a-key" not in caplog.text.replace('KeyError("a-key")', "")


# --- half-closed connections


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_half_closes_gets_its_reply(version: bytes) -> None:
    async with running(model={"delay": 0.02}) as here:
        got = await answer(here, request(version=version), half_close=True)
        # Clients skip what comes before the response, and need not: HTTP/1.0 has no such thing.
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert got.startswith(interim) == (version == b"1.1")
        body = json.loads(got.removeprefix(interim).partition(b"\r\n\r\n")[2])
        assert body["choices"][0]["message"]["content"] == REPLY and here.model.engine.stats().cancelled == 0


async def test_a_client_that_half_closes_gets_its_stream() -> None:
    async with running(model={"delay": 0.02}) as here:
        got = await answer(here, request(stream=True), half_close=True)
        assert b"data: [DONE]\n\n" in got and got.endswith(b"0\r\n\r\n")


async def test_a_client_that_half_closes_behind_several_requests() -> None:
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with running() as here:
        assert (await answer(here, get * 3, half_close=True)).count(b"HTTP/1.1 200 OK") == 3
        assert await answer(here, b"", half_close=True) == b""
        assert await answer(here, get[:-9], half_close=True) == b""


async def test_half_a_body_and_no_more() -> None:
    async with running() as here:
        assert await answer(here, request()[:-5], half_close=True) == b""
        assert here.model.engine.stats().steps == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_half_closes_and_leaves_later(stream: bool) -> None:
    forever = {"script": saying("x", end=False), "delay": 0.005, "context": 60_000}
    async with running(model=forever) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(request(stream=stream))
        writer.write_eof()
        await here.until(lambda: here.model.engine.stats().predicted_tokens > 50)
        await reader.read(10)
        writer.transport.abort()  # with bytes unread, so the kernel sends a reset
        await here.quiet()
        assert here.model.engine.stats().cancelled == 1


# --- compressed bodies


def packed(encoding: str, data: bytes) -> bytes:
    if encoding == "zstd":
        return zstandard.compress(data)
    if encoding == "raw deflate":
        stream = zlib.compressobj(wbits=-15)
        return stream.compress(data) + stream.flush()
    return zlib.compress(data) if encoding == "deflate" else gzip.compress(data)


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "deflate", "raw deflate", "zstd", "ZSTD"])
async def test_compressed_bodies(encoding: str) -> None:
    header = {"Content-Encoding": encoding.removeprefix("raw ")}
    body = json.dumps(HI).encode()
    method = encoding.lower()
    async with running(max_body_mib=1) as here:
        # In one part, in two, and without a size in front.
        for sent in (packed(method, body), packed(method, body[:20]) + packed(method, body[20:])):
            if "raw" in encoding and sent != packed(method, body):
                continue
            status, reply, _ = await here.post(CHAT, sent, headers=header)
            assert status == 200 and reply["choices"][0]["message"]["content"] == REPLY, reply
        for wrong in (packed(method, body)[:-12], b"not compressed", b""):
            status, reply, _ = await here.post(CHAT, wrong, headers=header)
            assert status == 400 and reply["error"]["code"] in ("invalid_body", "invalid_json"), wrong
        bomb = packed(method, bytes(256 << 20))
        status, reply, _ = await here.post(CHAT, bomb, headers=header)
        assert len(bomb) < 1 << 20 and status == 413 and reply["error"]["code"] == "request_too_large"


async def test_many_parts_and_large_windows_are_refused() -> None:
    async with running() as here:
        many = gzip.compress(b" ") * 100
        status, body, _ = await here.post(CHAT, many, headers={"Content-Encoding": "gzip"})
        assert status == 400 and body["error"]["code"] == "invalid_body"
        params = zstandard.ZstdCompressionParameters(window_log=27)
        out = io.BytesIO()
        with zstandard.ZstdCompressor(compression_params=params).stream_writer(out, closefd=False) as stream:
            stream.write(json.dumps(HI).encode())
        status, body, _ = await here.post(CHAT, out.getvalue(), headers={"Content-Encoding": "zstd"})
        assert status == 400 and body["error"]["code"] == "invalid_body"


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, zstd", "frob"])
async def test_other_encodings_are_refused_by_name(encoding: str) -> None:
    async with running() as here:
        status, body, headers = await here.post(CHAT, json.dumps(HI).encode(), headers={"Content-Encoding": encoding})
        assert status == 415 and body["error"]["code"] == "unsupported_media_type"
        assert "gzip, deflate and zstd" in body["error"]["message"]
        assert headers["Accept-Encoding"] == "gzip, deflate, zstd"


async def test_an_encoding_is_no_secret_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(model={"hook": _fails}) as here:
        await here.post(CHAT, b"Once", headers={"Content-Encoding": "zstd"})
        await here.post(CHAT, b'{"messages": "Once"}')
        await here.post(CHAT, {**HI, "user": "Once", "messages": [{"role": "user", "content": "Once"}]})
    assert "Once" not in caplog.text and not any("Once" in str(vars(record)) for record in caplog.records)


def _fails(step: Any) -> None:
    raise DeviceError("cuda:0: launch failed")


async def test_a_connection_that_came_before_the_end_is_answered() -> None:
    """A client that connects while the server ends is told when to try again; it would not repeat a request whose
    connection just closes."""
    server = await asyncio.to_thread(Server, Config())
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    listener = await start(server, [sock])
    connections = [await asyncio.open_connection(*sock.getsockname()) for _ in range(3)]
    # The server accepts them.
    await asyncio.sleep(0.05)
    server.draining = True
    ended = asyncio.create_task(listener.cleanup())
    while sock.fileno() >= 0:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    for _, writer in connections[:2]:
        writer.write(request())
    for reader, _ in connections[:2]:
        status, headers, body = one_response(await reader.read())
        assert (status, headers["retry-after"], body["error"]["code"]) == (503, "1", "draining")
    # One that asks nothing does not keep the server.
    await ended
    assert await connections[2][0].read() == b""
    for _, writer in connections:
        writer.close()
    server.close()
