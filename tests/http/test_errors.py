"""Statuses and error bodies: mistakes, keys, methods, sizes, states of the server."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luce.errors import DeviceError
from luce.runtime.step import Step
from luce.server import state
from luce.text.chat import ChatFormat
from tests.support.http_server import Running, running
from tests.support.key_files import write_keys
from tests.support.scripted_model import REPLY, saying

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"messages": None}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"messages": [{"role": "king"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "invalid_value"),
        (
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "system", "content": "b"},
                    {"role": "user", "content": [{"type": "image_url"}]},
                ]
            },
            "messages[2].content[0]",
            "unsupported_content",
        ),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10**20}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": ["a", "b" * 257]}, "stop[1]", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "invalid_value"),
        ({"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_value"),
        ({"timeout_s": 0}, "timeout_s", "invalid_value"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        ({"stop_regex": "x"}, "stop_regex", "unsupported_parameter"),
        ({"stop_regex": ""}, "stop_regex", "unsupported_parameter"),
        ({"priority": 1}, "priority", "unsupported_parameter"),
        ({"priority": -1}, "priority", "unsupported_parameter"),
        ({"priority": "high"}, "priority", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": False, "stream_options": {}}, "stream_options", "invalid_value"),
        ({"typical_p": 0.5}, "typical_p", "unsupported_parameter"),
        ({"xtc_probability": 0.5}, "xtc_probability", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ],
)
async def test_mistakes_name_their_field(fields: dict[str, Any], param: str, code: str) -> None:
    async with running() as here:
        status, body, _ = await here.post(CHAT, {**HI, **fields})
        assert status == 400, body
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert (body["error"]["param"], body["error"]["code"]) == (param, code)
        assert body["error"]["type"] == "invalid_request_error" and param in body["error"]["message"]


@pytest.mark.parametrize(
    "raw, code",
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"messages": NaN}', "invalid_json"),
        (b'{"user": "\xff"}', "invalid_json"),
        (b'{"user": "\xed\xa0\x80"}', "invalid_json"),
        (b'{"user": "\\u12"}', "invalid_json"),
        (b"[" * 200_000, "invalid_value"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b"[]", "invalid_value"),
        (b'"text"', "invalid_value"),
        (b"null", "invalid_value"),
    ],
)
async def test_bodies_that_are_no_json_object(raw: bytes, code: str) -> None:
    async with running() as here:
        status, body, _ = await here.post(CHAT, raw)
        assert status == 400 and body["error"]["code"] == code, body


async def test_json_that_is_deep_but_valid() -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": [deep]}
    async with running() as here:
        tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
        status, body, _ = await here.post(CHAT, {**HI, "tools": tools})
        assert status == 400 and body["error"]["type"] == "invalid_request_error", body


async def test_a_template_error_is_the_clients() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant"}]
    async with running() as here:
        kwargs = {"strict": True, "tools_in_user": 1}
        status, _, _ = await here.post(CHAT, {"messages": messages, "chat_template_kwargs": kwargs, "max_tokens": 1})
        assert status == 200
        model = here.server.shown_model(None)
        model.chat = ChatFormat(None, model.tokenizer)
        status, body, _ = await here.post(CHAT, HI)
        assert status == 400 and body["error"]["code"] == "template_error"
        assert (await here.get("/v1/models"))[1]["data"][0]["capabilities"] == ["completion", "structured_outputs"]


async def test_a_prompt_that_is_too_long() -> None:
    async with running(model={"context": 64}) as here:
        status, body, _ = await here.post(CHAT, {"messages": [{"role": "user", "content": "x" * 100}]})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in body["error"]["message"]
        assert "your messages resulted in 119 tokens" in body["error"]["message"]
        # langchain-openai looks for the code there.
        assert body["error"]["message"].endswith("(context_length_exceeded)")


async def test_bodies_that_are_too_large() -> None:
    async with running(max_body_mib=1) as here:
        large = json.dumps({**HI, "user": "x" * (2 << 20)}).encode()
        status, body, _ = await here.post(CHAT, large)
        assert status == 413 and body["error"]["type"] == "request_too_large"

        async def pieces() -> Any:
            for start in range(0, len(large), 65536):
                yield large[start : start + 65536]

        json_type = {"Content-Type": "application/json"}
        async with here.client.post(
            here.url + CHAT, data=pieces(), headers=json_type
        ) as response:  # chunked: no Content-Length
            assert response.status == 413
        bomb = gzip.compress(b" " * (64 << 20))
        status, _, _ = await here.post(CHAT, bomb, headers={"Content-Encoding": "gzip"})
        assert len(bomb) < 1 << 20 and status == 413


async def test_gzip_bodies() -> None:
    async with running() as here:
        packed = gzip.compress(json.dumps({**HI, "temperature": 0}).encode())
        status, body, _ = await here.post(CHAT, packed, headers={"Content-Encoding": "gzip"})
        assert status == 200 and body["choices"][0]["message"]["content"] == REPLY
        status, body, _ = await here.post(CHAT, b"not gzip", headers={"Content-Encoding": "gzip"})
        assert status == 400 and body["error"]["type"] == "invalid_request_error"


async def test_endpoints_that_do_not_exist() -> None:
    async with running() as here:
        status, body, _ = await here.get("/v1/nothing")
        assert status == 404 and body["error"]["type"] == "not_found_error"
        assert "unknown endpoint: GET /v1/nothing" in body["error"]["message"]
        status, body, headers = await here.get(CHAT)
        assert status == 405 and headers["Allow"] == "POST" and body["error"]["code"] == "method_not_allowed"
        for path in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations"):
            status, body, _ = await here.post(path, {})
            assert status == 400 and body["error"]["code"] == "unsupported_endpoint"
        status, body, headers = await here.post("/v1/other/messages", {})
        assert status == 404
        assert body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "unknown endpoint: POST /v1/other/messages"},
            "request_id": headers["request-id"],
        }


async def test_aliases_without_v1_and_with_doubled_slashes() -> None:
    async with running() as here:
        for path in ("/chat/completions", "/v1//chat/completions", "//v1/chat/completions"):
            status, body, _ = await here.post(path, {**HI, "temperature": 0})
            assert status == 200 and body["choices"][0]["message"]["content"] == REPLY
        assert (await here.post("/completions?beta=true", {"prompt": "x", "max_tokens": 1}))[0] == 200
        for path in ("/models", "//v1//models", "/v1//models//scripted"):
            assert (await here.get(path))[0] == 200
        assert (await here.get("//v1//nothing"))[0] == 404
        assert (await here.get("//v1/chat/completions"))[0] == 405


async def test_request_ids() -> None:
    async with running() as here:
        _, _, headers = await here.post(CHAT, {**HI, "max_tokens": 1})
        assert headers["x-request-id"] == headers["request-id"] and len(headers["x-request-id"]) == 28
        _, _, headers = await here.post(CHAT, {}, headers={"x-request-id": "mine-1"})
        assert headers["x-request-id"] == "mine-1"
        _, _, headers = await here.post(CHAT, {}, headers={"x-request-id": "x" * 129})
        assert headers["x-request-id"].startswith("req_")


# --- keys, hosts, origins


async def test_keys(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys", "# comment\nfile-key\n\nbob:bob-key\nann:ann-key:admin\n")
    async with running(api_key=("flag-key",), api_key_file=file) as here:
        status, body, headers = await here.post(CHAT, HI)
        assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
        assert body["error"]["type"] == "authentication_error" and body["error"]["code"] == "invalid_api_key"
        for wrong in ("Bearer nope", "Basic flag-key", "Bearer ", "flag-key", "Bearer bob:bob-key", "Bearer bob"):
            assert (await here.get("/v1/models", headers={"Authorization": wrong}))[0] == 401
        for key in ("flag-key", "file-key", "bob-key", "ann-key"):
            for sent in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"api-key": key}):
                assert (await here.get("/v1/models", headers=sent))[0] == 200
        for path in ("/", "/health", "/livez"):
            assert (await here.get(path))[0] == 200
        for path in ("/metrics", "/v1/models/x", "/nothing", "//v1/models"):
            assert (await here.get(path))[0] == 401
        file.write_text("new-key\n")
        await asyncio.to_thread(here.server.keys.reload)
        assert (await here.get("/v1/models", headers={"x-api-key": "file-key"}))[0] == 401
        assert (await here.get("/v1/models", headers={"x-api-key": "new-key"}))[0] == 200


async def test_names_of_other_sites_are_refused_on_loopback() -> None:
    async with running(allowed_host=("box.lan",)) as here:
        for name in ("evil.example", "localhost.evil.example", "[", ""):
            status, body, _ = await here.get("/v1/models", headers={"Host": name})
            assert status == 403 and body["error"]["type"] == "permission_error", name
        for name in ("localhost", "LOCALHOST:99", "127.0.0.1:8080", "[::1]:5", "box.lan"):
            assert (await here.get("/v1/models", headers={"Host": name}))[0] == 200
    async with running(api_key=("k",)) as here:
        headers = {"Host": "evil.example", "x-api-key": "k"}
        assert (await here.get("/v1/models", headers=headers))[0] == 200


async def test_cors() -> None:
    async with running(cors_origin=("https://a.example",)) as here:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Headers": "x-b"}
        async with here.client.options(here.url + CHAT, headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Allow-Headers"] == "x-b"
            assert response.headers["Vary"] == "Origin"
        events = here.client.post(here.url + CHAT, json={**HI, "stream": True, "max_tokens": 1}, headers=asked)
        async with events as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
            await response.read()
        _, _, headers = await here.get("/health", headers={"Origin": "https://b.example"})
        assert "Access-Control-Allow-Origin" not in headers
    async with running(cors_origin=("*",)) as here:
        _, _, headers = await here.get("/health", headers={"Origin": "https://b.example"})
        assert headers["Access-Control-Allow-Origin"] == "https://b.example"


async def test_cors_by_default_is_for_pages_of_this_machine() -> None:
    async def allowed(here: Running, origin: str) -> bool:
        _, _, headers = await here.get("/livez", headers={"Origin": origin})
        return "Access-Control-Allow-Origin" in headers

    async with running() as here:
        assert await allowed(here, "http://localhost:3000") and await allowed(here, "http://[::1]:1")
        assert not await allowed(here, "https://evil.example") and not await allowed(here, "null")
        assert not await allowed(here, "http://localhost.evil.example")
    async with running(api_key=("k",)) as here:
        assert not await allowed(here, "http://localhost:3000")


# --- states


async def test_before_the_model_is_loaded() -> None:
    async with running(loaded=False) as here:
        status, body, headers = await here.get("/health")
        assert (status, body) == (503, {"status": "loading", "progress": 0.0}) and headers["Retry-After"]
        here.server.pool.default.progress = 0.25
        assert (await here.get("/health"))[1] == {"status": "loading", "progress": 0.25}
        assert (await here.get("/livez"))[:2] == (200, {"status": "ok"})
        status, body, headers = await here.post(CHAT, HI)
        assert status == 503 and body["error"]["code"] == "loading" and int(headers["Retry-After"]) >= 1
        assert (await here.get("/v1/models"))[0] == 503
        assert (await here.get("/metrics"))[0] == 200


async def test_while_draining() -> None:
    async with running() as here:
        here.server.draining = True
        assert (await here.get("/health"))[:2] == (503, {"status": "draining"})
        status, body, headers = await here.post(CHAT, HI)
        assert status == 503 and body["error"]["code"] == "draining" and headers["Retry-After"]


async def test_without_a_shard_that_is_gone_for_good() -> None:
    async with running() as here:
        assert (await here.post(CHAT, HI))[0] == 200
        here.model.gone = why = "shard 1 (cpu:1): the daemon is lost"
        assert (await here.get("/health"))[:2] == (503, {"status": "error", "reason": why})
        status, body, headers = await here.post(CHAT, HI)
        assert status == 503 and body["error"]["code"] == "shard_lost" and why in body["error"]["message"]
        assert headers["Retry-After"]
        for path in ("/livez", "/v1/models", "/metrics"):
            assert (await here.get(path))[0] == 200


async def test_head_answers() -> None:
    async with running() as here:
        for path in ("/", "/health"):
            async with here.client.head(here.url + path) as response:
                assert response.status == 200 and await response.read() == b""


def failing_after(steps: int) -> Callable[[Step], None]:
    left = [steps]

    def hook(step: Step) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DeviceError("cuda:0: launch failed")

    return hook


async def test_a_device_error_is_a_500_or_an_event() -> None:
    async with running(model={"hook": failing_after(0)}) as here:
        status, body, _ = await here.post(CHAT, HI)
        assert status == 500 and body["error"]["code"] == "engine_error"
        assert body["error"]["type"] == "server_error" and "cuda:0" in body["error"]["message"]
    async with running(model={"hook": failing_after(3)}) as here:
        events = await here.events(CHAT, {**HI, "temperature": 0})
        assert events[-1]["error"]["code"] == "engine_error"
        assert not any(e["choices"][0]["finish_reason"] for e in events[:-1])


async def test_an_error_in_a_stream_ends_the_connection() -> None:
    async with running(model={"hook": failing_after(3)}) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        body = json.dumps({**HI, "temperature": 0, "stream": True}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        text = await reader.read()  # to the end of the connection, which is otherwise kept alive for 75 s
        assert b'"engine_error"' in text and b"data: [DONE]\n\n" in text and text.endswith(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


async def test_a_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as here:
        here.server.shown_model(None).reply_text = None  # type: ignore[method-assign,assignment]
        status, body, _ = await here.post(CHAT, HI)
        assert status == 500 and body["error"]["message"] == "internal error"
        assert "request handler failed" in caplog.text


async def test_a_wait_that_is_too_long() -> None:
    slow = {"delay": 0.02, "script": saying("x", end=False), "context": 4096}
    async with running(parallel=1, max_queue_seconds=0.1, model=slow) as here:
        running_one = here.client.post(here.url + CHAT, json={**HI, "temperature": 0, "stream": True})
        async with running_one as response:
            await response.content.readline()
            status, body, headers = await here.post(CHAT, HI)
            assert status == 503 and body["error"]["code"] == "overloaded" and headers["Retry-After"]
            events = await here.events(CHAT, HI)
            assert events[-1]["error"]["code"] == "overloaded"


async def test_an_engine_that_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STALLED_SECONDS", 0.05)
    gate = threading.Event()
    async with running(model={"hook": lambda step: gate.wait() and None}) as here:
        waiting = asyncio.create_task(here.chat())
        while (await here.get("/health"))[0] == 200:
            await asyncio.sleep(0.01)
        status, body, _ = await here.get("/health")
        assert status == 503 and body["status"] == "error" and "no progress" in body["reason"]
        assert (await here.get("/livez"))[0] == 200
        gate.set()
        await waiting
        assert (await here.get("/health"))[0] == 200


async def test_deadlines() -> None:
    slow = {"delay": 0.02, "script": saying("x", end=False)}
    async with running(model=slow) as here:
        body = {**HI, "temperature": 0, "timeout_s": 0.5}
        status, reply, _ = await here.post(CHAT, body)
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert reply["choices"][0]["finish_details"]["cause"] == "deadline"
    async with running(model=slow, chunk=2) as here:  # the prompt alone takes ten steps
        body["timeout_s"] = 0.05
        status, reply, _ = await here.post(CHAT, body)
        assert status == 504 and reply["error"]["type"] == "timeout_error"
        events = await here.events(CHAT, body)
        assert events[-1]["error"]["type"] == "timeout_error"


async def test_strict_model_and_aliases() -> None:
    async with running(alias=("one", "two"), strict_model=True) as here:
        for name, served in (("one", "one"), ("two", "two"), (None, "one")):
            status, body, _ = await here.post(CHAT, {**HI, "model": name, "max_tokens": 1})
            assert status == 200 and body["model"] == served
        status, body, _ = await here.post(CHAT, {**HI, "model": "three"})
        assert status == 404 and body["error"]["code"] == "model_not_found"


async def test_a_model_without_further_names_has_no_alias() -> None:
    async with running() as here:
        (entry,) = (await here.get("/v1/models"))[1]["data"]
        assert (entry["id"], entry["aliases"]) == ("scripted", [])


async def test_models() -> None:
    async with running(alias=("one", "org/two")) as here:
        _, body, _ = await here.get("/v1/models")
        assert body["object"] == "list" and [m["id"] for m in body["data"]] == ["one"]
        assert (body["first_id"], body["last_id"], body["has_more"]) == ("one", "one", False)
        assert body["data"][0]["aliases"] == ["org/two"]
        for name in ("one", "org/two"):
            status, card, _ = await here.get(f"/v1/models/{name}")
            assert status == 200 and card == body["data"][0]
        assert card["max_model_len"] == card["context_length"] == 512 and card["owned_by"] == "luce"
        status, body, _ = await here.get("/v1/models/zzz")
        assert status == 404 and body["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\nGET /l"])
async def test_incomplete_headers_close_the_connection(sent: bytes) -> None:
    async with running(keepalive=0.2) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.port)
        writer.write(sent)
        await asyncio.wait_for(reader.read(), 20)  # returns when the server closes
        writer.close()
