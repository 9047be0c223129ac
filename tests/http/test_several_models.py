"""A server of several models: which one answers, which are listed, and what an admin may do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from luce.api import Model
from luce.config.settings import Config
from luce.errors import ModelError
from luce.server.model_pool import ModelEntry, ModelPool
from tests.support.http_server import Running, running
from tests.support.scripted_model import ScriptedModel, saying

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class Models:
    """Scripted models that say their names. `gate` holds loads until it is set."""

    def __init__(self, *names: str, pinned: tuple[str, ...] = (), **options: Any) -> None:
        self.loads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = ""
        entries = [ModelEntry(n, n, Config(alias=(n, f"{n}-too")), pinned=n in pinned) for n in names]
        self.pool = ModelPool(entries, self._open, **options)

    def _open(self, entry: ModelEntry, progress: Callable[[float], None]) -> Model:
        progress(0.5)
        assert self.gate.wait(30)
        if entry.name == self.broken:
            raise ModelError(f"{entry.name}.gguf: is damaged")
        self.loads.append(entry.name)
        return cast(Model, ScriptedModel(entry.config, script=saying(entry.name)))


def said(reply: Any) -> tuple[str, str]:
    return reply["model"], reply["choices"][0]["message"]["content"]


async def test_the_model_of_a_request_answers() -> None:
    models = Models("a", "b", "c", max_loaded=2)
    async with running(pool=models.pool) as here:
        assert said(await here.chat(model="b")) == ("b", "b")
        assert said(await here.chat(model="c-too")) == ("c-too", "c")
        assert said(await here.chat()) == ("a", "a")
        assert models.loads == ["b", "c", "a"]
        status, reply, _ = await here.post(CHAT, {"messages": HI, "model": "d"})
        assert (status, reply["error"]["code"], reply["error"]["param"]) == (404, "model_not_found", "model")
        assert len(models.loads) == 3


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/v1/completions", {"prompt": "<|im_start|>assistant\n"}, lambda r: r["choices"][0]["text"]),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}, lambda r: r["content"][0]["text"]),
        ("/v1/responses", {"input": "hi"}, lambda r: r["output"][-1]["content"][0]["text"]),
        ("/completion", {"prompt": "<|im_start|>assistant\n"}, lambda r: r["content"]),
    ],
)
async def test_every_api_picks(path: str, body: dict[str, Any], found: Callable[[Any], str]) -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        status, reply, _ = await here.post(path, {**body, "model": "b"})
        assert (status, found(reply)) == (200, "b")
        assert models.loads == ["b"]


async def test_requests_that_need_no_device_pick_too() -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        for path, body in (
            ("/tokenize", {"content": "hi"}),
            ("/detokenize", {"tokens": [1]}),
            ("/apply-template", {"messages": HI}),
            ("/v1/messages/count_tokens", {"messages": HI}),
        ):
            status, _, _ = await here.post(path, {**body, "model": "b"})
            assert status == 200
            status, _, _ = await here.post(path, {**body, "model": "x"})
            assert status == 404
        assert models.loads == ["b"]


async def test_a_stream_of_a_model_that_is_loaded_for_it() -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        events = await here.events(CHAT, {"messages": HI, "model": "b"})
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == "b"


async def test_the_list_says_what_is_loaded() -> None:
    models = Models("a", "b", pinned=("b",))
    async with running(pool=models.pool) as here:
        await here.chat(model="b")
        _, listed, _ = await here.get("/v1/models")
        assert (listed["first_id"], listed["last_id"]) == ("a", "b")
        first, second = listed["data"]
        assert (first["id"], first["aliases"], first["loaded"], first["state"]) == ("a", ["a-too"], False, "unloaded")
        assert (first["context_length"], first["capabilities"], first["pinned"]) == (None, None, False)
        assert (second["loaded"], second["state"], second["pinned"]) == (True, "loaded", True)
        assert second["context_length"] == 512
        models.pool.entries[0].config = Config(alias=("a", "a-too"), max_ctx=256)
        assert (await here.get("/v1/models/a-too"))[1] == {
            **first,
            **dict.fromkeys(("context_length", "max_model_len", "max_output_tokens"), 256),
        }
        assert (await here.get("/v1/models/c"))[0] == 404
        catalogue = (await here.get("/v1/models", params={"client_version": "1"}))[1]["models"]
        assert [model["slug"] for model in catalogue] == ["b"]


async def test_pages_about_one_model() -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        status, reply, _ = await here.get("/props")
        assert (status, reply["error"]["code"]) == (503, "not_loaded")
        await here.chat(model="b")
        # Without a name the default one, or the one that is there.
        assert (await here.get("/props"))[1]["model_alias"] == "b"
        await here.chat(model="a")
        for path in ("/props", "/slots", "/v1/cache"):
            assert (await here.get(path, params={"model": "b"}))[0] == 200
            assert (await here.get(path, params={"model": "x"}))[0] == 404
        assert (await here.get("/props"))[1]["model_alias"] == "a"
        assert (await here.get("/props", params={"model": "b"}))[1]["model_alias"] == "b"


async def test_metrics_have_the_model() -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        assert "luce_generated_tokens" not in (await here.get("/metrics"))[1]
        await here.chat(model="a")
        await here.chat(model="b", max_tokens=1)
        text = (await here.get("/metrics"))[1]
        assert text.count("# TYPE luce_generated_tokens_total counter") == 1
        assert 'luce_generated_tokens_total{model="a"} 2.0' in text
        assert 'luce_generated_tokens_total{model="b"} 1.0' in text
        assert 'luce_slots{model="a",state="busy"} 0.0' in text


async def test_load_and_unload() -> None:
    models = Models("a", "b", pinned=("a",))
    async with running(pool=models.pool) as here:
        status, reply, _ = await here.post("/v1/models/load", {"model": "b-too"})
        assert (status, reply["id"], reply["loaded"]) == (200, "b", True)
        status, reply, _ = await here.post("/v1/models/unload", {"model": "b"})
        assert (status, reply["loaded"], reply["state"]) == (200, False, "unloaded")
        await here.chat(model="a")
        status, reply, _ = await here.post("/v1/models/unload", {"model": "a"})
        assert (status, reply["error"]["code"]) == (400, "pinned")
        assert (await here.post("/v1/models/load", {}))[0] == 400
        assert (await here.post("/v1/models/load", {"model": "x"}))[0] == 404
        models.broken = "b"
        status, reply, _ = await here.post("/v1/models/load", {"model": "b"})
        assert (status, reply["error"]["message"]) == (500, "b.gguf: is damaged")


async def test_load_and_unload_are_an_admins(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user:one\nroot:two:admin\n")
    keys.chmod(0o600)
    models = Models("a", "b")
    async with running(pool=models.pool, api_key_file=keys) as here:
        for what in ("load", "unload"):
            for key, status in (("one", 403), ("two", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await here.post(f"/v1/models/{what}", {"model": "b"}, headers=headers))[0] == status


async def test_a_server_of_one_model_keeps_it() -> None:
    async with running() as here:
        status, reply, _ = await here.post("/v1/models/unload", {"model": "scripted"})
        assert (status, reply["error"]["code"]) == (400, "pinned")
        _, listed, _ = await here.get("/v1/models")
        assert (listed["data"][0]["loaded"], listed["data"][0]["state"]) == (True, "loaded")


async def test_a_load_takes_too_long() -> None:
    models = Models("a", "b", wait=0.05)
    models.gate.clear()
    async with running(pool=models.pool) as here:
        status, reply, headers = await here.post(CHAT, {"messages": HI, "model": "b"})
        assert (status, reply["error"]["code"], headers["Retry-After"]) == (503, "loading", "5")
        status, reply, _ = await here.post("/v1/messages", {"messages": HI, "model": "b", "max_tokens": 1})
        assert (status, reply["error"]["type"]) == (529, "overloaded_error")
        assert (await here.get("/v1/models/b"))[1]["state"] == "loading"
        # The others are served, and the server is healthy.
        assert (await here.get("/health"))[0] == 200
        models.gate.set()
        assert said(await here.chat(model="b")) == ("b", "b")


def openai_error(event: Any) -> tuple[str, str]:
    return event["error"]["code"] or event["error"]["type"], event["error"]["message"]


#: by path of an API that streams: a body, and what the events of an error look like
STREAMS: dict[str, tuple[dict[str, Any], Callable[[Any], tuple[str, str]]]] = {
    CHAT: ({"messages": HI}, openai_error),
    "/v1/completions": ({"prompt": "<|im_start|>assistant\n"}, openai_error),
    "/v1/messages": ({"messages": HI, "max_tokens": 9}, lambda e: (e["error"]["type"], e["error"]["message"])),
    "/v1/responses": ({"input": "hi"}, lambda e: (e["code"], e["message"])),
    "/completion": ({"prompt": "<|im_start|>assistant\n"}, openai_error),
}


async def streamed(here: Running, models: Models, path: str, body: dict[str, Any]) -> list[str]:
    """The events of a stream whose model is loaded behind its first comment."""
    async with here.client.post(here.url + path, json={**body, "model": "b", "stream": True}) as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
        models.gate.set()
        text = (await response.read()).decode()
    return [event for event in text.split("\n\n") if event and event != ": ping"]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_is_kept_alive_while_its_model_is_loaded(path: str) -> None:
    body = {**STREAMS[path][0], "temperature": 0}
    first, second = Models("a", "b", wait=0.05), Models("a", "b")
    first.gate.clear()
    async with running(pool=first.pool, sse_ping=0.1) as here:
        late = await streamed(here, first, path, body)
    asked = {**body, "model": "b", "stream": True}
    async with running(pool=second.pool) as here, here.client.post(here.url + path, json=asked) as response:
        plain = [event for event in (await response.read()).decode().split("\n\n") if event]

    def kinds(events: list[str]) -> list[str]:
        return [event.partition("data: ")[0] for event in events]

    assert kinds(late) == kinds(plain) and len(late) > 1


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_behind_the_headers_of_a_stream_is_an_event(path: str) -> None:
    body, error_of = STREAMS[path]
    for broken, wrong, message in (("b", {}, "b.gguf: is damaged"), ("", {"temperature": 99}, "temperature")):
        models = Models("a", "b", wait=0.05)
        models.broken = broken
        models.gate.clear()
        async with running(pool=models.pool, sse_ping=0.1) as here:
            event, *end = await streamed(here, models, path, {**body, **wrong})
            name, _, data = event.rpartition("data: ")
            code, said_why = error_of(json.loads(data))
            assert code and message in said_why
            assert name == ("event: error\n" if path in ("/v1/messages", "/v1/responses") else "")
            assert end == (["data: [DONE]"] if path in (CHAT, "/v1/completions") else [])


async def test_who_leaves_while_a_model_is_loaded_uses_it_no_more() -> None:
    models = Models("a", "b", wait=0.05)
    models.gate.clear()
    async with running(pool=models.pool, sse_ping=0.1) as here:
        body = {"messages": HI, "model": "b", "stream": True}
        async with here.client.post(here.url + CHAT, json=body) as response:
            await response.content.readuntil(b"\n\n")
        await here.until(lambda: models.pool.entry("b").users == 0)
        models.gate.set()
        assert said(await here.chat(model="b")) == ("b", "b")


async def test_a_bad_body_loads_nothing() -> None:
    models = Models("a", "b")
    async with running(pool=models.pool) as here:
        for body in (b"{", b'{"model": 5, "messages": []}', b"[]"):
            assert (await here.post(CHAT, body))[0] == 400
        assert models.loads == []


async def test_clients_of_three_models_with_room_for_one() -> None:
    models = Models("a", "b", "c", max_loaded=1)

    async def client(here: Running, number: int) -> None:
        for turn in range(6):
            name = "abc"[(number + turn) % 3]
            assert said(await here.chat(f"{number} {turn}", model=name)) == (name, name)

    async with running(pool=models.pool) as here:
        await asyncio.gather(*(client(here, number) for number in range(8)))
        assert len(models.loads) >= 3 and len(models.pool.loaded()) == 1
