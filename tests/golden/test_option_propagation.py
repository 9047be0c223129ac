"""Each setting does what it says where the layers are split: over devices of this process, or with some in a daemon."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import luce
from luce.api import Model
from luce.backend.layersplit import LayerSplitBackend
from luce.config.settings import FIELDS
from luce.errors import ContextError, DeviceError, LuceError, ShardLostError
from luce.remote.shard_groups import RemoteRanking
from luce.runtime.step import Output, Span, Step
from luce.runtime.transfer import Link
from luce.server.app import start
from luce.server.state import Server
from tests.support.daemons import HERE, children, interpreter, within
from tests.support.drafts import DraftReference
from tests.support.reference import Reference

ROOT = Path(__file__).parents[2]
FIT = DraftReference("qwen35-a-draft-fit-F32")
#: a recurrent model with its drafts, and one that pages
RECURRENT, PLAIN = FIT.target, Reference("qwen3-a-F32")
PROMPT = RECURRENT.expected["prompt_17"].tolist()
GREEDY = RECURRENT.expected["greedy_17"][:8].tolist()
LONG = (PROMPT * 50)[:800]
#: where the layers are: in this process, and with those of two devices in a daemon
HERE_ALL: dict[str, Any] = {"target_devices": "cpu:0,cpu:1,cpu:2"}
DAEMON: dict[str, Any] = {**HERE_ALL, "target_shard_ipc_bin": str(HERE)}

#: settings whose behaviour another file tests: on a split, or where a split cannot be seen (GPUs, the end of a server)
ELSEWHERE = {
    "shard_env": "tests/process/test_shard_crash.py::test_variables_of_a_daemon",
    "prompt_weights": "tests/golden/test_split_gpu.py::test_unpacked_weights_change_no_bits",
    "draft_residency": "tests/golden/test_draft_engine.py::test_what_is_released_is_free_at_once",
    "drain_seconds": "tests/process/test_serve.py::test_requests_beyond_the_drain_time_end_with_their_text",
    "write_timeout": "tests/http/test_cancel.py::test_a_client_that_does_not_read_is_dropped",
    "shard_key_file": "tests/process/test_shard_network.py::test_another_key",
}


def load(reference: Reference = RECURRENT, **settings: Any) -> Model:
    return luce.load(reference.path, **{"max_ctx": 256, "kv_cache_dir": "off", **settings})


def reply(model: Model, prompt: list[int] = PROMPT, n: int = 8, **sampling: Any) -> list[int]:
    generation = model.generate(prompt, max_tokens=n, ignore_eos=True, **sampling)
    return [token.id for token in generation]


def tier(model: Model, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """Where the prefix of a prompt came from, and how long it was."""
    generation = model.generate(prompt, max_tokens=2, temperature=0, ignore_eos=True)
    list(generation)
    assert generation.finish is not None
    return generation.finish.timings.cache_tier, generation.finish.timings.cached_tokens


def states(**settings: Any) -> list[int]:
    """Bytes of the context on each shard; those of the daemon are what it has allocated."""
    with load(**{**DAEMON, **settings}) as model:
        assert reply(model, n=2, temperature=0)
        return [part["state"] for part in model.placement]


@contextmanager
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Span, ...]]]:
    """The spans of all steps."""
    seen: list[tuple[Span, ...]] = []
    forward = LayerSplitBackend.forward

    def recorded(self: LayerSplitBackend, step: Step, queued: Callable[[], None]) -> Output:
        seen.append(step.spans)
        return forward(self, step, queued)

    with monkeypatch.context() as patch:
        patch.setattr(LayerSplitBackend, "forward", recorded)
        yield seen


def drafted(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[Span, ...]]:
    """The steps in which draft rows were verified."""
    with steps(monkeypatch) as seen, load(**{**DAEMON, "draft": str(FIT.path), **settings}) as model:
        expected = RECURRENT.expected["greedy_17"][:24].tolist()
        assert reply(model, n=24, temperature=0) == expected
    return [spans for spans in seen if any(span.speculative for span in spans)]


Ask = Callable[..., Awaitable[tuple[int, str, Any]]]


def served(use: Callable[[Ask], Awaitable[None]], **settings: Any) -> None:
    """Let `use` send requests to a server with these settings."""

    async def run(model: Model) -> None:
        server = await asyncio.to_thread(Server, model.config)
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        runner = await start(server, [sock])
        server.model = model
        try:
            async with aiohttp.ClientSession() as client:

                async def ask(path: str, body: Any = None, **options: Any) -> tuple[int, str, Any]:
                    data = None if body is None else io.BytesIO(json.dumps(body).encode())
                    kind = {"Content-Type": "application/json", **options.pop("headers", {})}
                    sent = client.request("GET" if data is None else "POST", url + path, data=data, headers=kind)
                    async with sent as response:
                        return response.status, await response.text(), response.headers

                await use(ask)
        finally:
            await runner.cleanup()
            server.close()

    with load(**{**DAEMON, **settings}) as model:
        asyncio.run(run(model))


BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}


def statuses(path: str, body: Any, **settings: Any) -> list[int]:
    """The status of one request without and with the settings."""
    found: list[int] = []

    async def use(ask: Ask) -> None:
        found.append((await ask(path, body))[0])

    served(use)
    served(use, **settings)
    return found


Check = Callable[[pytest.MonkeyPatch, Path, pytest.LogCaptureFixture], None]
CHECKS: dict[str, Check] = {}


def checks(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers the check of settings; a check with several gets the name."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            assert name not in CHECKS
            CHECKS[name] = functools.partial(function, name) if len(names) > 1 else function
        return function

    return register


Patch, Log = pytest.MonkeyPatch, pytest.LogCaptureFixture


@checks("temperature", "top_k", "top_p", "min_p")
def _sampling(name: str, patch: Patch, path: Path, log: Log) -> None:
    greedy = {"temperature": 0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}
    hot = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    with load(**HERE_ALL, **hot) as model:
        assert reply(model, seed=1) != GREEDY
    with load(**DAEMON, **{**hot, name: greedy[name]}) as model:
        assert reply(model, seed=1) == GREEDY


@checks("repetition_penalty")
def _penalty(patch: Patch, path: Path, log: Log) -> None:
    with load(**DAEMON, repetition_penalty=5.0) as model:
        changed = reply(model, n=24, temperature=0)
        assert changed == reply(model, n=24, temperature=0, repetition_penalty=5.0)
        assert changed != reply(model, n=24, temperature=0, repetition_penalty=1.0)


@checks("target_device", "target_devices", "target_layer_split", "target_shard_ipc_bin", "isolate_shards")
def _placement(name: str, patch: Patch, path: Path, log: Log) -> None:
    given: dict[str, tuple[dict[str, Any], list[str], list[int] | None, int]] = {
        "target_device": ({"target_device": "cpu:3"}, ["cpu:3"], None, 0),
        "target_devices": ({"target_devices": "cpu:2,cpu:0"}, ["cpu:2", "cpu:0"], None, 0),
        "target_layer_split": ({**DAEMON, "target_layer_split": "1,5,2"}, ["cpu:0", "cpu:1", "cpu:2"], [1, 5, 2], 1),
        "target_shard_ipc_bin": (DAEMON, ["cpu:0", "cpu:1", "cpu:2"], None, 1),
        "isolate_shards": ({**DAEMON, "isolate_shards": True}, ["cpu:0", "cpu:1", "cpu:2"], None, 2),
    }
    settings, devices, counts, daemons = given[name]
    before = children()
    with load(**settings) as model:
        assert [part["device"] for part in model.placement] == devices and len(children() - before) == daemons
        if counts is not None:
            assert [last - first + 1 for first, last in (part["layers"] for part in model.placement)] == counts
        assert reply(model, temperature=0) == GREEDY


@checks("peer_access")
def _peer(patch: Patch, path: Path, log: Log) -> None:
    # CPUs have no peers: what the links between shards are told is the last place that can be seen here.
    told: list[bool] = []
    made = Link.__init__

    def recorded(self: Link, *arguments: Any, **options: Any) -> None:
        told.append(options["peer"])
        made(self, *arguments, **options)

    patch.setattr(Link, "__init__", recorded)
    for allowed in (True, False):
        told.clear()
        with load(**HERE_ALL, peer_access=allowed):
            assert told == [allowed, allowed]


def moved(**settings: Any) -> tuple[dict[tuple[str, str], int], str]:
    with load(**DAEMON, **settings) as model:
        reply(model, LONG[:200], temperature=0)
        (daemon,) = model.daemons()
        return dict(daemon.moved), daemon.transport


@checks("shard_transport", "shard_activations")
def _transport(name: str, patch: Patch, path: Path, log: Log) -> None:
    through, transport = moved(shard_transport="shared")
    assert transport == "shared" and through["shared", "sent"] > 0
    messages, transport = moved(shard_transport="stream")
    # 200 rows of float32.
    size = 4 * 200 * RECURRENT.spec.hidden
    assert transport == "stream" and messages["stream", "sent"] > through["stream", "sent"] + size
    if name == "shard_activations":
        halved, _ = moved(shard_transport="stream", shard_activations="f16")
        assert messages["stream", "sent"] - halved["stream", "sent"] >= size // 2


SLOW = (
    "from luce.cli.main import main\nfrom luce.remote import {0}\n"
    "{0}.{1} = lambda *_: time.sleep(20)\nsys.exit(main(sys.argv[4:]))\n"
)


@checks("shard_timeout", "shard_start_timeout")
def _timeouts(name: str, patch: Patch, path: Path, log: Log) -> None:
    slow = ("daemon_shard", "ServedModel.run") if name == "shard_timeout" else ("daemon", "Session.open")
    program = interpreter(path / "python", SLOW.format(*slow))
    settings = {**HERE_ALL, "target_shard_ipc_bin": str(program)}
    if name == "shard_timeout":
        with load(**settings, shard_timeout=0.2) as model, pytest.raises(ShardLostError) as lost:
            reply(model)
        # 0.1 s for each of 17 rows more.
        assert "within 1.9 s (--shard-timeout)" in str(lost.value)
    else:
        with pytest.raises(DeviceError, match=r"within 1 s \(--shard-start-timeout\)"):
            load(**settings, shard_start_timeout=1)


@checks("max_ctx")
def _context(patch: Patch, path: Path, log: Log) -> None:
    with load(**DAEMON, max_ctx=64) as model:
        assert reply(model, LONG[:60], n=2)
        with pytest.raises(ContextError):
            reply(model, LONG[:70])
    small, large = states(max_ctx=64, reference=PLAIN), states(max_ctx=1024, reference=PLAIN)
    assert all(a < b for a, b in zip(small, large, strict=True))


@checks("parallel")
def _parallel(patch: Patch, path: Path, log: Log) -> None:
    with steps(patch) as seen, load(**DAEMON, parallel=3) as model:
        threads = [threading.Thread(target=reply, args=(model, PROMPT[i:], 100)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(len({span.slot for span in spans}) for spans in seen) == 3
    assert all(a < b for a, b in zip(states(), states(parallel=3), strict=True))


@checks("chunk")
def _chunk(patch: Patch, path: Path, log: Log) -> None:
    with steps(patch) as seen, load(**DAEMON, chunk=5) as model:
        reply(model, temperature=0)
    assert max(span.rows for spans in seen for span in spans) == 5


@checks("cache_type_k", "cache_type_v")
def _cache_type(name: str, patch: Patch, path: Path, log: Log) -> None:
    # Each of the two is half of the pages, which are all the state of this model.
    plain, halved = (states(reference=PLAIN, **given) for given in ({}, {name: "f16"}))
    assert [round(after / before, 2) for before, after in zip(plain, halved, strict=True)] == [0.75] * 3


def paging(**settings: Any) -> Model:
    return load(PLAIN, **{**DAEMON, "max_ctx": 1024, "kvflash": "512", "chunk": 64, **settings})


@checks("kvflash")
def _pool(patch: Patch, path: Path, log: Log) -> None:
    whole, pool = (states(reference=PLAIN, max_ctx=1024, chunk=64, kvflash=size) for size in ("off", "512"))
    assert all(a > b for a, b in zip(whole, pool, strict=True))
    with paging() as model:
        reply(model, LONG)
        stats = model.engine.stats().paging
    assert stats is not None and stats.max_resident_pages == 8 and stats.swapped_out > 0


@checks("kvflash_policy", "kvflash_tau", "kvflash_host_mb", "kvflash_drafter")
def _policy(name: str, patch: Patch, path: Path, log: Log) -> None:
    ranked: list[int] = []
    rank = RemoteRanking.rank

    def counted(self: RemoteRanking, *arguments: Any) -> Any:
        ranked.append(1)
        return rank(self, *arguments)

    def rounds(**settings: Any) -> int:
        ranked.clear()
        with paging(**settings) as model:
            reply(model, LONG, n=100, temperature=0)
        return len(ranked)

    patch.setattr(RemoteRanking, "rank", counted)
    if name == "kvflash_policy":
        # By queries, pages of both kinds are ranked; by age, resident ones alone, and none is swapped in.
        found = []
        for policy in ("qk", "lru"):
            with paging(kvflash_tau=20, kvflash_policy=policy) as model:
                reply(model, LONG, n=100, temperature=0)
                stats = model.engine.stats().paging
                assert stats is not None
                found.append((stats.policy, stats.swapped_in > 0))
        assert ranked and found == [("qk", True), ("lru", False)]
    elif name == "kvflash_tau":
        assert rounds(kvflash_tau=20) > rounds(kvflash_tau=1000)
    elif name == "kvflash_drafter":
        # The small model scores, not the layers.
        assert rounds(kvflash_policy="drafter", kvflash_drafter=str(PLAIN.path)) == 0
        with paging(kvflash_policy="drafter", kvflash_drafter=str(PLAIN.path)) as model:
            stats = model.engine.stats().paging
            assert stats is not None and stats.policy == "drafter"
    else:
        with paging(kvflash_host_mb=1) as model:
            stats = model.engine.stats().paging
            assert stats is not None and stats.host_budget == 1 << 20


@checks("draft", "verify_width", "ddtree", "ddtree_budget")
def _draft(name: str, patch: Patch, path: Path, log: Log) -> None:
    chains = drafted(patch)
    assert chains and not any(span.ancestors for spans in chains for span in spans)
    if name == "draft":
        assert not drafted(patch, draft="")
    if name == "verify_width":
        rows = {span.rows for spans in drafted(patch, verify_width=3) for span in spans if span.speculative}
        assert max(rows) == 3 < max(span.rows for spans in drafted(patch, verify_width=8) for span in spans[:1])
    if name == "ddtree":
        assert any(span.ancestors for spans in drafted(patch, ddtree=True, verify_width=16) for span in spans)
    if name == "ddtree_budget":
        trees = drafted(patch, ddtree=True, ddtree_budget=2, verify_width=16)
        assert max(sum(span.rows for span in spans if span.speculative) for spans in trees) == 3


def proposals(monkeypatch: pytest.MonkeyPatch, times: int = 1, **settings: Any) -> list[list[int]]:
    """The verified rows of the last reply to the same prompt."""
    seen: list[list[int]] = []
    forward = LayerSplitBackend.forward

    def recorded(self: LayerSplitBackend, step: Step, queued: Callable[[], None]) -> Output:
        if any(span.speculative for span in step.spans):
            seen.append(step.tokens.tolist())
        return forward(self, step, queued)

    given = {
        **DAEMON,
        "draft": str(FIT.path),
        "draft_ipc_bin": str(HERE),
        "verify_width": 8,
        "max_ctx": 512,
        **settings,
    }
    with monkeypatch.context() as patch, load(**given) as model:
        patch.setattr(LayerSplitBackend, "forward", recorded)
        for _ in range(times):
            seen.clear()
            reply(model, LONG[:130], n=16, temperature=0)
    return seen


@checks("draft_swa", "draft_ctx_max", "draft_feature_tail")
def _draft_context(name: str, patch: Patch, path: Path, log: Log) -> None:
    # A draft that reads less proposes other tokens; that it reads the same again proposes the same.
    times = 2 if name == "draft_feature_tail" else 1
    changed = {"draft_swa": 2, "draft_ctx_max": 64, "draft_feature_tail": 0}[name]
    whole = proposals(patch, times)
    assert whole and whole == proposals(patch, times) != proposals(patch, times, **{name: changed})


@checks("kv_cache_flush_timeout")
def _flush(patch: Patch, path: Path, log: Log) -> None:
    released = threading.Event()
    fsync = os.fsync

    def held(descriptor: int) -> None:
        released.wait(60)
        fsync(descriptor)

    patch.setattr(os, "fsync", held)
    timer = threading.Timer(15, released.set)
    with load(**DAEMON, kv_cache_dir=str(path), kv_cache_min_tokens=1, kv_cache_flush_timeout=0) as model:
        tier(model, LONG[:200])
        timer.start()
    # Closing has not waited for the disk.
    assert not released.is_set()
    timer.cancel()
    released.set()


@checks("draft_device", "draft_ipc_bin")
def _draft_device(name: str, patch: Patch, path: Path, log: Log) -> None:
    settings = {"draft": str(FIT.path), "draft_device": "cpu:5"}
    if name == "draft_ipc_bin":
        settings["draft_ipc_bin"] = str(HERE)
    before = children()
    with load(**DAEMON, **settings) as model:
        drafts = [daemon.device for daemon in model.daemons() if daemon.shard == "draft"]
        assert (drafts, len(children() - before)) == ((["cpu:5"], 2) if name == "draft_ipc_bin" else ([], 1))
        assert reply(model, temperature=0) == GREEDY
    if name == "draft_device":
        with pytest.raises(LuceError, match="hip:7"):
            load(**DAEMON, draft=str(FIT.path), draft_device="hip:7", cache_ram=0).close()
            raise DeviceError("; ".join(record.getMessage() for record in log.records))


@checks("threads")
def _threads(patch: Patch, path: Path, log: Log) -> None:
    told = path / "told"
    program = interpreter(
        path / "python",
        "import threadpoolctl\nfrom pathlib import Path\n"
        "from luce.cli.main import main\nfrom luce.remote import daemon\n"
        "opened = daemon.Session.open\ndef open_(*a):\n    hello = opened(*a)\n"
        "    info = [p['num_threads'] for p in threadpoolctl.threadpool_info() if p['user_api'] == 'blas']\n"
        f"    Path({str(told)!r}).write_text(str(max(info)))\n    return hello\n"
        "daemon.Session.open = open_\nsys.exit(main(sys.argv[4:]))\n",
    )
    for count in (1, 2):
        with load(**HERE_ALL, target_shard_ipc_bin=str(program), threads=count):
            assert told.read_text() == str(count)


@checks("log_level")
def _log_level(patch: Patch, path: Path, log: Log) -> None:
    log.set_level(logging.DEBUG, logger="luce")
    for level, logged in (("info", True), ("error", False)):
        log.clear()
        with load(**DAEMON, log_level=level):
            said = [r.getMessage() for r in log.records if r.name == "luce.ipc.child"]
            assert any("loading" in line for line in said) == logged


@checks("max_queue")
def _queue(patch: Patch, path: Path, log: Log) -> None:
    with load(**DAEMON, max_queue=0) as model, closing(model.generate(PROMPT, ignore_eos=True, max_tokens=200)) as busy:
        next(busy)
        with pytest.raises(LuceError) as caught:
            reply(model)
        assert caught.value.status == 503


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


@checks("max_n", "max_batch_prompts", "max_body_mib", "strict_model", "api_key")
def _refused(name: str, patch: Patch, path: Path, log: Log) -> None:
    body, value, status = {
        "max_n": ({**BODY, "n": 2}, 1, 400),
        "max_batch_prompts": ({**BODY, "prompt": [PROMPT, PROMPT]}, 1, 400),
        "max_body_mib": ({**BODY, "user": "x" * (1 << 20)}, 1, 413),
        "strict_model": ({**BODY, "model": "another"}, True, 404),
        "api_key": (BODY, "secret", 401),
    }[name]
    assert statuses("/v1/completions", body, **{name: value}) == [200, status]


@checks("api_key_file", "metrics_public")
def _keys(name: str, patch: Patch, path: Path, log: Log) -> None:
    file = path / "keys"
    file.write_text("secret\n")
    file.chmod(0o600)

    async def use(ask: Ask) -> None:
        assert (await ask("/v1/completions", BODY))[0] == 401
        assert (await ask("/v1/completions", BODY, headers={"Authorization": "Bearer secret"}))[0] == 200
        assert (await ask("/metrics"))[0] == (200 if name == "metrics_public" else 401)

    served(use, api_key_file=str(file), metrics_public=name == "metrics_public")


@checks("alias", "allowed_host", "cors_origin")
def _names(name: str, patch: Patch, path: Path, log: Log) -> None:
    async def use(ask: Ask) -> None:
        if name == "alias":
            assert '"mine"' in (await ask("/v1/models"))[1] and '"mine"' in (await ask("/v1/completions", BODY))[1]
        elif name == "allowed_host":
            assert (await ask("/v1/models", headers={"Host": "mine"}))[0] == 200
            assert (await ask("/v1/models", headers={"Host": "other"}))[0] >= 400
        else:
            _, _, headers = await ask("/v1/models", headers={"Origin": "http://mine"})
            assert headers["Access-Control-Allow-Origin"] == "http://mine"

    served(use, **{name: "http://mine" if name == "cors_origin" else "mine"})


@checks("sse_ping")
def _ping(patch: Patch, path: Path, log: Log) -> None:
    async def use(ask: Ask) -> None:
        # The second one waits for the only slot.
        busy = asyncio.create_task(ask("/v1/completions", {**BODY, "max_tokens": 400, "ignore_eos": True}))
        await asyncio.sleep(0.1)
        _, text, _ = await ask("/v1/completions", {**BODY, "stream": True})
        await busy
        assert any(line.startswith(":") for line in text.splitlines())

    served(use, sse_ping=0.1, max_ctx=1024)


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
            for first in range(8):
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


def test_every_setting_has_a_check() -> None:
    assert not CHECKS.keys() & ELSEWHERE.keys()
    assert CHECKS.keys() | ELSEWHERE.keys() == FIELDS.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_check_of_another_file_exists(name: str) -> None:
    file, _, function = ELSEWHERE[name].partition("::")
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
    assert function in names


@pytest.mark.parametrize("name", CHECKS)
def test_option_propagation(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("luce")
    level = logger.level
    try:
        CHECKS[name](monkeypatch, tmp_path, caplog)
    finally:
        logger.setLevel(level)
