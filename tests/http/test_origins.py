"""Web pages of other sites: what a browser sends without asking is refused, what it asks for is not allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http_server import Running, running

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
EVIL = "https://evil.example"
#: types of bodies that a page may send to any server without a preflight (Fetch, CORS-safelisted request headers)
SIMPLE = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    None,
)


async def send(here: Running, kind: str | None, **headers: str) -> tuple[int, Any]:
    """Status and body of a POST with these headers, and without those that a client library adds."""
    sent = headers if kind is None else {"Content-Type": kind, **headers}
    options = {"skip_auto_headers": ["Content-Type"]}
    async with here.client.post(here.url + CHAT, data=json.dumps(HI).encode(), headers=sent, **options) as response:
        assert "Access-Control-Allow-Origin" not in response.headers or headers.get("Origin") != EVIL
        return response.status, await response.json()


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_bodies_need_a_json_type(kind: str | None, path: str) -> None:
    async with running() as here:
        status, body = await send(here, kind)
        assert status == 415 and body["error"]["code"] == "unsupported_media_type"
        assert "`Content-Type: application/json`" in body["error"]["message"]
        assert here.model.engine.stats().steps == 0


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "text/json", "application/vnd.api+json"]
)
async def test_json_types(kind: str) -> None:
    async with running() as here:
        assert (await send(here, kind))[0] == 200


@pytest.mark.parametrize("settings", [{}, {"host": "0.0.0.0"}, {"cors_origin": ("https://a.example",)}])
async def test_a_page_of_another_site_makes_nothing_compute(settings: dict[str, Any]) -> None:
    async with running(**settings) as here:
        for kind in (*SIMPLE, "application/json"):
            for origin in (EVIL, "null", "http://[", "http://127.0.0.1.evil.example:1"):
                status, body = await send(here, kind, Origin=origin, **{"Sec-Fetch-Mode": "no-cors"})
                assert status == 403 and body["error"]["code"] == "forbidden", (kind, origin)
                assert "--cors-origin" in body["error"]["message"]
        asked = {
            "Origin": EVIL,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        async with here.client.options(here.url + CHAT, headers=asked) as response:
            # A browser goes on only after a status of 200 to 299 with the origin allowed.
            assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers
        assert (await here.get("/v1/models", headers={"Origin": EVIL}))[0] == 403
        assert here.model.engine.stats().steps == 0


async def test_with_a_key_too() -> None:
    async with running(api_key=("k",)) as here:
        assert (await send(here, "application/json", Origin=EVIL, Authorization="Bearer k"))[0] == 403
        assert (await send(here, "application/json", Authorization="Bearer k"))[0] == 200


async def test_pages_that_may() -> None:
    async with running(cors_origin=("https://a.example",)) as here:
        assert (await send(here, "application/json", Origin="https://a.example"))[0] == 200
        assert (await send(here, "text/plain", Origin="https://a.example"))[0] == 415
    async with running(cors_origin=("*",)) as here:
        assert (await send(here, "application/json", Origin="null"))[0] == 200
    async with running() as here:
        for origin in ("http://localhost:3000", here.url):
            assert (await send(here, "application/json", Origin=origin))[0] == 200
    async with running(api_key=("k",)) as here:
        # A page behind the same proxy as the server.
        headers = {"Origin": "https://box.lan", "Host": "box.lan", "x-api-key": "k"}
        assert (await send(here, "application/json", **headers))[0] == 200
        assert (await send(here, "application/json", **headers | {"Host": "box.lan:81"}))[0] == 403


async def test_a_rebound_name_does_not_purge_the_cache() -> None:
    async with running(host=("0.0.0.0",), allowed_host=("box.lan",)) as here:
        for name, status in {
            "evil.example": 403,
            "evil.example:8080": 403,
            "localhost:8080": 200,
            "127.0.0.1": 200,
            "192.168.1.2:8080": 200,
            "[fe80::1]:80": 200,
            "box.lan": 200,
            "": 403,
        }.items():
            async with here.client.delete(here.url + "/v1/cache", headers={"Host": name}) as response:
                assert response.status == status, name
            assert (await here.get("/v1/cache", headers={"Host": name}))[0] == status
            assert (await here.get("/v1/models", headers={"Host": name}))[0] == 200
