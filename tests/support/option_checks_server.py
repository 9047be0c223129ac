"""The checks of settings of the engine, the cache and the server: see option_checks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from luce.api import Generation, Model
from luce.config.sampling import SamplingParams
from luce.engine.admission import SequenceHandle
from luce.engine.events import EventSink
from luce.errors import GrammarLimitError, LuceError
from luce.server.app import start
from luce.server.state import Server
from tests.support.constraints import Few
from tests.support.daemons import HERE, within
from tests.support.option_checks import DAEMON, HERE_ALL, LONG, PLAIN, PROMPT, RECURRENT, Log, Patch, Table, load, reply

CHECKS = checks = Table()


def tier(model: Model, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """Where the prefix of a prompt came from, and how long it was."""
    generation = model.generate(prompt, max_tokens=2, temperature=0, ignore_eos=True)
    list(generation)
    assert generation.finish is not None
    return generation.finish.timings.cache_tier, generation.finish.timings.cached_tokens


class Ask:
    """A client of a server with a model."""

    def __init__(self, client: aiohttp.ClientSession, port: int, model: Model) -> None:
        self.port, self.model = port, model
        self._client, self._url = client, f"http://127.0.0.1:{port}"

    async def __call__(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, str, Any]:
        """Status, text and headers of the answer."""
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        kind = {"Content-Type": "application/json", **(headers or {})}
        sent = self._client.request("GET" if data is None else "POST", self._url + path, data=data, headers=kind)
        async with sent as response:
            return response.status, await response.text(), response.headers


def served(use: Callable[[Ask], Awaitable[None]], **settings: Any) -> None:
    """Let `use` send requests to a server with these settings."""

    async def run(model: Model) -> None:
        server = await asyncio.to_thread(Server, model.config)
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        runner = await start(server, [sock])
        server.model = model
        try:
            async with aiohttp.ClientSession() as client:
                await use(Ask(client, sock.getsockname()[1], model))
        finally:
            await runner.cleanup()
            server.close()

    with load(**{**DAEMON, **settings}) as model:
        asyncio.run(run(model))


BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


@checks("max_queue")
def _queue(patch: Patch, path: Path, log: Log) -> None:
    with load(**DAEMON, max_queue=0) as model, closing(model.generate(PROMPT, ignore_eos=True, max_tokens=200)) as busy:
        next(busy)
        with pytest.raises(LuceError) as caught:
            reply(model)
        assert caught.value.status == 503


def constrained(model: Model, hook: Callable[[], None] = lambda: None) -> Generation:
    """A reply of the tokens 3 and 4; `hook` runs for each of its masks."""

    def submit(sink: EventSink) -> SequenceHandle:
        own = Few(model.spec.vocab, 3, 4, hook=hook)
        params, output = SamplingParams(max_tokens=40), model.reply_text()
        return model.engine.submit(PROMPT, params, output=output, on_event=sink, constraint=own)

    return Generation(submit, None)


@checks("grammar_threads")
def _grammar_threads(patch: Patch, path: Path, log: Log) -> None:
    sizes: list[int] = []

    def pool(size: int, prefix: str) -> ThreadPoolExecutor:
        sizes.append(size)
        return ThreadPoolExecutor(size, prefix)

    patch.setattr("luce.engine.masks.ThreadPoolExecutor", pool)
    with load(**DAEMON, grammar_threads=3, parallel=2) as model:
        # The masks of one sequence need no thread.
        both = [constrained(model) for _ in range(2)]
        assert all({token.id for token in one} <= {3, 4} for one in both) and sizes == [3]


@checks("grammar_mask_ms")
def _grammar_mask_ms(patch: Patch, path: Path, log: Log) -> None:
    def slow() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.005:
            pass

    refused = pytest.raises(GrammarLimitError, match=r"^masks take more than 1 ms \(--grammar-mask-ms\)$")
    with load(**DAEMON, grammar_mask_ms=1) as model, refused:
        list(constrained(model, slow))


@checks("tool_format")
def _tool_format(patch: Patch, path: Path, log: Log) -> None:
    for name in ("hermes", "qwen_xml"):
        with load(**DAEMON, tool_format=name) as model:
            assert model.chat.calls.format == name


@checks("max_queue_seconds", "timeout")
def _limits(name: str, patch: Patch, path: Path, log: Log) -> None:
    with load(**DAEMON, **{name: 0.05}, max_ctx=4096) as model:
        busy = model.generate(PROMPT, ignore_eos=True, max_tokens=3000)
        try:
            if name == "timeout":
                assert len(list(busy)) < 3000
                outcome = str(busy.finish and busy.finish.reason)
            else:
                next(busy)
                reply(model)
                outcome = "served"
        except LuceError as error:
            outcome = str(error)
        finally:
            busy.close()
        assert outcome.endswith("DEADLINE") or "wait" in outcome.lower() or "queue" in outcome.lower(), outcome


@checks("cache_ram", "cache_interval")
def _cache(name: str, patch: Patch, path: Path, log: Log) -> None:
    settings = {"cache_ram": 0} if name == "cache_ram" else {"cache_interval": 64, "chunk": 64}
    other = [*LONG[:180], *PROMPT]
    for given, expected in (
        ({}, 0 if name == "cache_interval" else 180),
        (settings, 0 if name == "cache_ram" else 128),
    ):
        with load(**DAEMON, **given) as model:
            tier(model, LONG[:200])
            _, cached = tier(model, LONG[:200] if name == "cache_ram" else other)
            assert cached >= expected if expected else cached == 0


@checks("kv_cache_dir", "kv_cache_min_tokens", "kv_cache_placement")
def _disk(name: str, patch: Patch, path: Path, log: Log) -> None:
    kept = {"kv_cache_dir": str(path), "kv_cache_min_tokens": 1}
    with load(**DAEMON, **kept) as model:
        tier(model, LONG[:200])
    assert any(path.rglob("manifest.json"))
    moved = {**DAEMON, "target_layer_split": "1,5,2"}
    with load(**moved, **kept) as model:
        assert tier(model, LONG[:200])[0] == "disk"
    if name == "kv_cache_placement":
        with load(**{**DAEMON, "target_layer_split": "5,1,2"}, **kept, kv_cache_placement="exact") as model:
            assert tier(model, LONG[:200])[0] == "none"
    if name == "kv_cache_min_tokens":
        again = path / "again"
        with load(**DAEMON, kv_cache_dir=str(again), kv_cache_min_tokens=300) as model:
            tier(model, LONG[:200])
        assert not any(again.rglob("manifest.json"))


@checks("kv_cache_flush_timeout")
def _flush(patch: Patch, path: Path, log: Log) -> None:
    released = threading.Event()
    fsync = os.fsync

    def held(descriptor: int) -> None:
        released.wait(60)
        fsync(descriptor)

    patch.setattr(os, "fsync", held)
    timer = threading.Timer(30, released.set)
    with load(**DAEMON, kv_cache_dir=str(path), kv_cache_min_tokens=1, kv_cache_flush_timeout=0) as model:
        tier(model, LONG[:200])
        timer.start()
    # Closing has not waited for the disk.
    assert not released.is_set()
    timer.cancel()
    released.set()


#: settings that no request to the model of the others notices, and what a server with all of them answers
LIMITS: dict[str, Any] = {
    "max_n": 1,
    "max_batch_prompts": 1,
    "max_body_mib": 1,
    "strict_model": True,
    "alias": "mine",
    "allowed_host": "mine",
    "cors_origin": "http://mine",
}
REQUESTS: dict[str, tuple[str, Any, dict[str, str]]] = {
    "max_n": ("/v1/completions", {**BODY, "n": 2}, {}),
    "max_batch_prompts": ("/v1/completions", {**BODY, "prompt": [PROMPT, PROMPT]}, {}),
    "max_body_mib": ("/v1/completions", {**BODY, "user": "x" * (1 << 20)}, {}),
    "strict_model": ("/v1/completions", {**BODY, "model": "another"}, {}),
    "alias": ("/v1/completions", {**BODY, "model": "mine"}, {}),
    "allowed_host": ("/v1/models", None, {"Host": "mine"}),
    "cors_origin": ("/v1/models", None, {"Origin": "http://mine"}),
}
Answers = dict[str, tuple[int, str, Any]]


@functools.cache
def answers(limited: bool) -> Answers:
    """What a server without or with the limits answers to each request."""
    found: Answers = {}

    async def use(ask: Ask) -> None:
        for name, (path, body, headers) in REQUESTS.items():
            found[name] = await ask(path, body, headers=headers)

    served(use, **(LIMITS if limited else {}))
    return found


@checks("max_n", "max_batch_prompts", "max_body_mib", "strict_model", "alias", "allowed_host", "cors_origin")
def _limited(name: str, patch: Patch, path: Path, log: Log) -> None:
    (before, old, _), (after, new, headers) = answers(False)[name], answers(True)[name]
    expected = {
        "max_body_mib": (200, 413),
        "strict_model": (200, 404),
        "max_n": (200, 400),
        "max_batch_prompts": (200, 400),
    }
    if name in expected:
        assert (before, after) == expected[name]
    elif name == "alias":
        assert after == 200 and json.loads(new)["model"] == "mine" != json.loads(old)["model"]
    else:
        assert before >= 400 and after == 200
    if name == "cors_origin":
        assert headers["Access-Control-Allow-Origin"] == "http://mine"


@checks("api_key", "api_key_file", "metrics_public")
def _keys(name: str, patch: Patch, path: Path, log: Log) -> None:
    file = path / "keys"
    file.write_text("secret\n")
    file.chmod(0o600)

    async def use(ask: Ask) -> None:
        assert (await ask("/v1/completions", BODY))[0] == 401
        assert (await ask("/v1/completions", BODY, headers={"Authorization": "Bearer secret"}))[0] == 200
        assert (await ask("/metrics"))[0] == (200 if name == "metrics_public" else 401)

    key = {"api_key": "secret"} if name == "api_key" else {"api_key_file": str(file)}
    served(use, **key, **({"metrics_public": True} if name == "metrics_public" else {}))


@checks("webui")
def _webui(patch: Patch, path: Path, log: Log) -> None:
    for webui, kind in ((True, "text/html"), (False, "application/json")):

        async def use(ask: Ask, kind: str = kind) -> None:
            assert (await ask("/", headers={"Accept": "text/html"}))[2]["Content-Type"].startswith(kind)

        served(use, webui=webui)


@checks("sse_ping")
def _ping(patch: Patch, path: Path, log: Log) -> None:
    async def use(ask: Ask) -> None:
        # The second one waits for the only slot.
        busy = asyncio.create_task(ask("/v1/completions", {**BODY, "max_tokens": 200, "ignore_eos": True}))
        await asyncio.sleep(0.1)
        _, text, _ = await ask("/v1/completions", {**BODY, "stream": True})
        await busy
        assert any(line.startswith(":") for line in text.splitlines())

    served(use, sse_ping=0.1)


@checks("write_timeout")
def _write(patch: Patch, path: Path, log: Log) -> None:
    body = json.dumps({**BODY, "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 5}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"

    async def use(ask: Ask) -> None:
        # Small buffers in the kernel: the server is left with what the client does not read.
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", ask.port))
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            assert await asyncio.to_thread(within, 60, lambda: ask.model.engine.stats().cancelled == 1)

    served(use, write_timeout=0.3, max_ctx=4096)


@checks("chat_template")
def _template(patch: Patch, path: Path, log: Log) -> None:
    (path / "template").write_text("a" * 100 + "{{ messages[0].content }}")

    async def use(ask: Ask) -> None:
        body = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2, "echo": False}
        status, text, _ = await ask("/v1/chat/completions", {k: v for k, v in body.items() if k != "echo"})
        assert status == 200 and json.loads(text)["usage"]["prompt_tokens"] == expected

    with load(**HERE_ALL) as model:
        expected = len(model.tokenizer.with_bos(model.tokenize("a" * 100 + "b")))
    served(use, chat_template=str(path / "template"))


@checks("kv_cache_budget")
def _budget(patch: Patch, path: Path, log: Log) -> None:
    sizes = []
    for budget in (0, 1):
        directory = path / str(budget)
        kept = {"kv_cache_dir": str(directory), "kv_cache_min_tokens": 1, "kv_cache_budget": budget}
        with load(PLAIN, **DAEMON, **kept, max_ctx=1024) as model:
            for first in range(3):
                tier(model, [first + 1, *LONG])
        sizes.append(sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()))
    assert sizes[1] <= 1 << 20 < sizes[0]


@functools.cache
def _process() -> tuple[bool, bool]:
    """Whether `luce serve` is found at its address, and whether its log lines are JSON."""
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "luce", "serve", str(RECURRENT.path), "--target-devices", "cpu:0,cpu:1,cpu:2"]
    command += ["--target-shard-ipc-bin", str(HERE), "--host", "127.0.0.2", "--port", str(port), "--log-json"]
    with subprocess.Popen([*command, "--max-ctx", "256"], stderr=subprocess.PIPE, text=True) as process:

        def healthy() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.2:{port}/health") as response:
                return bool(response.status == 200)
            return False

        found = within(60, healthy)
        process.terminate()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    return found, any("loading" in line for line in lines) and all(isinstance(json.loads(x), dict) for x in lines)


@checks("host", "port", "log_json")
def _serve(name: str, patch: Patch, path: Path, log: Log) -> None:
    # Lines of the daemon are among those of the log.
    assert _process()[name == "log_json"]
