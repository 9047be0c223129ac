"""The checks of settings of the layers, their devices and their memory: see option_checks."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import threadpoolctl

from luce.errors import ContextError, DeviceError, ShardLostError
from luce.kvcache.paging import PagingStats
from luce.remote.shard_groups import RemoteRanking
from luce.runtime.device import Array, Event
from luce.runtime.host import HostCopyStream, HostDevice
from luce.runtime.transfer import Link, Transfer
from tests.support.daemons import children, interpreter
from tests.support.option_checks import (
    DAEMON,
    GREEDY,
    HERE_ALL,
    LONG,
    PLAIN,
    PROMPT,
    RECURRENT,
    Log,
    Patch,
    Table,
    load,
    reply,
    steps,
)
from tests.support.reference import Reference

CHECKS = checks = Table()


@functools.cache
def states(**settings: Any) -> list[int]:
    """Bytes of the context on each shard; those of the daemon are what it has allocated."""
    with load(**{**DAEMON, **settings}) as model:
        assert reply(model, n=2, temperature=0)
        return [part["state"] for part in model.placement]


@functools.cache
def hot() -> list[int]:
    with load(**HERE_ALL, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0) as model:
        return reply(model, seed=1)


@checks("temperature", "top_k", "top_p", "min_p")
def _sampling(name: str, patch: Patch, path: Path, log: Log) -> None:
    greedy = {"temperature": 0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0}
    assert hot() != GREEDY
    with load(**DAEMON, **{"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, name: greedy[name]}) as model:
        assert reply(model, seed=1) == GREEDY


@checks("repetition_penalty", "presence_penalty")
def _penalty(name: str, patch: Patch, path: Path, log: Log) -> None:
    value, off = {"repetition_penalty": (5.0, 1.0), "presence_penalty": (2.0, 0.0)}[name]
    with load(**DAEMON, **{name: value}) as model:
        changed = reply(model, n=24, temperature=0)
        assert changed == reply(model, n=24, temperature=0, **{name: value})
        assert changed != reply(model, n=24, temperature=0, **{name: off})


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
    # Between devices that reach each other as GPUs do, copies without peer access take two steps.
    copies: list[int] = []
    in_a_send: list[int] = []
    copy, send, made = HostCopyStream.copy, Link.send, Link.__init__

    def copied(self: HostCopyStream, target: Array, source: Array) -> None:
        copies.append(1)
        copy(self, target, source)

    def sent(self: Link, arrays: Sequence[Array], ready: Event) -> Transfer:
        before = len(copies)
        transfer = send(self, arrays, ready)
        in_a_send.append((len(copies) - before) // len(arrays))
        return transfer

    def between_gpus(self: Link, *arguments: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as gpus:
            gpus.setattr(HostDevice, "host", False)
            gpus.setattr(HostDevice, "reaches", lambda self, other: True)
            made(self, *arguments, **options)

    patch.setattr(Link, "__init__", between_gpus)
    patch.setattr(Link, "send", sent)
    patch.setattr(HostCopyStream, "copy", copied)
    for allowed, steps_of_a_copy in ((True, 1), (False, 2)):
        in_a_send.clear()
        with load(**HERE_ALL, peer_access=allowed) as model:
            assert reply(model, temperature=0) == GREEDY
        assert set(in_a_send) == {steps_of_a_copy}


@functools.cache
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
    "{0}.{1} = lambda *_: time.sleep(20)\nsys.exit(main(['shard', *sys.argv[5:]]))\n"
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
    with steps() as seen, load(**DAEMON, parallel=3) as model:
        threads = [threading.Thread(target=reply, args=(model, PROMPT[i:], 32)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(len({span.slot for span in step.spans}) for step in seen) == 3
    assert all(a < b for a, b in zip(states(), states(parallel=3), strict=True))


@checks("chunk")
def _chunk(patch: Patch, path: Path, log: Log) -> None:
    with steps() as seen, load(**DAEMON, chunk=5) as model:
        reply(model, temperature=0)
    assert max(span.rows for step in seen for span in step.spans) == 5


@checks("cache_type_k", "cache_type_v")
def _cache_type(name: str, patch: Patch, path: Path, log: Log) -> None:
    # Each of the two is half of the pages, which are all the state of this model.
    plain, halved = (states(reference=PLAIN, **given) for given in ({}, {name: "f16"}))
    assert [round(after / before, 2) for before, after in zip(plain, halved, strict=True)] == [0.75] * 3


@functools.cache
def paged(**settings: Any) -> tuple[list[int], int, PagingStats]:
    """For a prompt that does not fit the pool: the reply, how often a daemon ranked pages, what became of them."""
    ranked: list[int] = []
    rank = RemoteRanking.rank

    def counted(self: RemoteRanking, *arguments: Any) -> Any:
        ranked.append(1)
        return rank(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteRanking, "rank", counted)
        given = {**DAEMON, "max_ctx": 1024, "kvflash": "512", "chunk": 64, **settings}
        with load(PLAIN, **given) as model:
            found = reply(model, LONG, n=50, temperature=0)
            stats = model.engine.stats().paging
    assert stats is not None
    return found, len(ranked), stats


@checks("kvflash")
def _pool(patch: Patch, path: Path, log: Log) -> None:
    whole, pool = (states(reference=PLAIN, max_ctx=1024, chunk=64, kvflash=size) for size in ("off", "512"))
    assert all(a > b for a, b in zip(whole, pool, strict=True))
    _, _, stats = paged()
    assert stats.max_resident_pages == 8 and stats.swapped_out > 0


@checks("kvflash_policy", "kvflash_tau", "kvflash_host_mb", "kvflash_drafter")
def _policy(name: str, patch: Patch, path: Path, log: Log) -> None:
    _, often, by_queries = paged(kvflash_tau=20)
    assert often > 0
    if name == "kvflash_policy":
        # By queries, pages of both kinds are ranked; by age, resident ones alone, and none is swapped in.
        _, _, by_age = paged(kvflash_tau=20, kvflash_policy="lru")
        assert by_queries.swapped_in > 0 == by_age.swapped_in
    elif name == "kvflash_tau":
        assert often > paged(kvflash_tau=1000)[1]
    elif name == "kvflash_drafter":
        # The small model scores, not the layers.
        _, ranked, stats = paged(kvflash_tau=20, kvflash_policy="drafter", kvflash_drafter=str(PLAIN.path))
        assert ranked == 0 < stats.rescores
    else:
        # Pages that do not fit the host's memory are lost.
        _, _, stats = paged(kvflash_tau=20, kvflash_host_mb=1)
        assert by_queries.lost_pages == 0 < stats.lost_pages


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
        "daemon.Session.open = open_\nsys.exit(main(['shard', *sys.argv[5:]]))\n",
    )
    # The setting holds here too, and results of OpenBLAS depend on the number of threads: put back what was.
    with threadpoolctl.threadpool_limits(None, user_api="blas"):
        for count in (1, 2):
            with load(**HERE_ALL, target_shard_ipc_bin=str(program), threads=count):
                assert told.read_text() == str(count)


@checks("experts_on")
def _experts_on(patch: Patch, path: Path, log: Log) -> None:
    reference = Reference("qwen35moe-a-F32")
    prompt, greedy = reference.expected["prompt_17"].tolist(), reference.expected["greedy_17"][:8].tolist()
    layers = len(reference.spec.layers)
    for asked, away in (("cpu", range(layers)), ("2", range(layers - 2, layers)), ("0-0", range(1))):
        with load(reference, **DAEMON, experts_on=asked, cpu_weights="float32") as model:
            parts = model.placement
            assert [layer for part in parts for layer in part["experts_on_cpu"]] == list(away)
            assert all((part["experts_on_cpu_bytes"] > 0) == bool(part["experts_on_cpu"]) for part in parts)
            assert reply(model, prompt, temperature=0) == greedy


@checks("cpu_weights")
def _cpu_weights(patch: Patch, path: Path, log: Log) -> None:
    reference = Reference("qwen35-a-Q8_0")
    weights, replies = [], []
    for devices, kind in ((DAEMON, "packed"), (DAEMON, "float32"), ({}, "packed")):
        with load(reference, **devices, cpu_weights=kind) as model:
            weights.append([part["weights"] for part in model.placement])
            replies.append(reply(model, reference.expected["prompt_17"].tolist(), temperature=0))
    # The daemon's layers too: a block of 32 weights takes 34 bytes, not 128.
    assert all(2 * packed < floats for packed, floats in zip(*weights[:2], strict=True))
    assert replies[1] == reference.expected["greedy_17"][:8].tolist()
    assert replies[0] == replies[2]


@checks("log_level")
def _log_level(patch: Patch, path: Path, log: Log) -> None:
    log.set_level(logging.DEBUG, logger="luce")
    for level, logged in (("info", True), ("error", False)):
        log.clear()
        with load(**DAEMON, log_level=level):
            said = [r.getMessage() for r in log.records if r.name == "luce.ipc.child"]
            assert any("loading" in line for line in said) == logged
