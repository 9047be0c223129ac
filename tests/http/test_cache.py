"""What clients and people see of the prefix cache: /v1/cache, metrics, usage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luce.kvcache import block_log
from tests.support.http_server import running
from tests.support.key_files import write_keys

LONG = "Tell me more. " * 10


async def test_the_listing_shows_lengths_and_counters_but_no_text() -> None:
    async with running(model={"asynchronous": False}) as here:
        assert (await here.get("/v1/cache"))[1]["data"] == []
        reply = await here.chat(LONG)
        total = reply["usage"]["total_tokens"]
        assert reply["choices"][0]["finish_details"]["cache"] == {"tier": "none"}
        status, listing, _ = await here.get("/v1/cache")
        assert status == 200
        tokens = {entry["tokens"] for entry in listing["data"]}
        assert tokens == {reply["usage"]["prompt_tokens"], total - 1}
        assert all(entry["tier"] == "ram" and entry["bytes"] > 0 for entry in listing["data"])
        assert listing["tiers"]["ram"]["misses"] == 1 and "disk" not in listing["tiers"]
        reply = await here.chat(LONG)
        assert reply["choices"][0]["finish_details"]["cache"] == {"tier": "ram"}
        assert (await here.get("/cache"))[1]["tiers"]["ram"]["hits"] == 1


async def test_a_purge_forgets_everything() -> None:
    async with running() as here:
        said = f"assistant\n{(await here.chat(LONG))['choices'][0]['message']['content']}"
        assert here.model.chat.memory.recall(said) is not None
        async with here.client.delete(here.url + "/v1/cache") as response:
            assert response.status == 200
            assert await response.json() == {"object": "cache.deleted", "deleted": True, "removed": 2}
        assert (await here.get("/v1/cache"))[1]["data"] == []
        assert here.model.chat.memory.recall(said) is None
        assert (await here.chat(LONG))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert here.model.engine.stats().pages_used == 0


@pytest.mark.parametrize("off", [{"prefix_cache": {"scope": "off"}}, {"cache_prompt": False}])
async def test_private_requests_share_nothing(monkeypatch: pytest.MonkeyPatch, off: dict[str, Any]) -> None:
    remembered: list[Sequence[int]] = []
    async with running() as here:
        monkeypatch.setattr(here.model.chat, "remember", lambda prompt, reply, tools: remembered.append(reply) or ())
        for _ in range(2):
            reply = await here.chat(LONG, **off)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert (await here.get("/v1/cache"))[1]["data"] == []
        assert not remembered
        assert (await here.chat(LONG))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        reply = await here.chat(LONG, prefix_cache={"scope": 70})
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        body = {"messages": [{"role": "user", "content": "hi"}], "prefix_cache": {"scope": "mine"}}
        status, error, _ = await here.post("/v1/chat/completions", body)
        assert status == 400 and error["error"]["param"] == "prefix_cache.scope"
        assert len(remembered) == 1


async def test_without_a_cache_there_is_nothing_to_list() -> None:
    async with running(cache_ram=0) as here:
        assert (await here.get("/v1/cache/blocks"))[1]["added"] == []
        await here.chat(LONG)
        assert (await here.chat(LONG))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        _, listing, _ = await here.get("/v1/cache")
        assert listing["data"] == [] and listing["tiers"]["ram"]["checkpoints"] == 0


async def test_only_admins_may_look_where_there_are_keys(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "alice:one\nbob:two:admin\n")
    async with running(api_key=("owner",), api_key_file=keys) as here:
        found = {}
        for key in ("one", "two", "owner", "wrong"):
            headers = {"Authorization": f"Bearer {key}"}
            found[key] = [(await here.get("/v1/cache", headers=headers))[0]]
            async with here.client.delete(here.url + "/v1/cache", headers=headers) as response:
                found[key].append(response.status)
        assert found == {"one": [403, 403], "two": [200, 200], "owner": [200, 200], "wrong": [401, 401]}


async def test_metrics_of_both_tiers() -> None:
    async with running() as here:
        await here.chat(LONG)
        await here.chat(LONG)
        _, text, _ = await here.get("/metrics")
        assert 'luce_prefix_cache_hits_total{tier="ram"} 1.0' in text
        assert 'luce_prefix_cache_hits_total{tier="disk"} 0.0' in text
        for name in (
            "prefix_cache_bytes",
            "prefix_cache_entries",
            "prefix_cache_evictions_total",
            "prefix_cache_pages",
            "prefix_cache_seconds_saved_total",
        ):
            assert f"luce_{name}" in text
        for name in ("saves", "save_failures", "quarantines", "written_bytes", "load_seconds"):
            assert f"luce_snapshot_{name}_total 0.0" in text
        assert "luce_snapshot_queue 0.0" in text
        for reason in ("damaged", "unreadable", "slow", "refused"):
            assert f'luce_snapshot_misses_total{{reason="{reason}"}} 0.0' in text


async def test_a_router_follows_what_comes_and_goes() -> None:
    async with running() as here:
        _, empty, _ = await here.get("/v1/cache/blocks")
        assert (empty["since"], empty["sequence"], empty["added"]) == (-1, 0, [])
        assert (empty["running"], empty["waiting"], empty["parallel"]) == (0, 0, here.model.engine.stats().slots)
        body = {"messages": [{"role": "user", "content": LONG}], "temperature": 0}
        _, asked, _ = await here.post("/v1/cache/keys?path=/v1/chat/completions", body)
        assert (await here.get("/v1/cache"))[1]["data"] == []
        reply = await here.chat(LONG)
        assert asked["tokens"] == reply["usage"]["prompt_tokens"] and len(asked["keys"]) == asked["tokens"] // 64 > 1
        where = f"/v1/cache/blocks?life={empty['life']}&after="
        _, changed, _ = await here.get(where + "0")
        assert changed["since"] == 0 and set(asked["keys"]) <= set(changed["added"]) and changed["removed"] == []
        assert changed["prefill_seconds"] > 0
        # Nothing new; then another life, a number that is not there yet, and none: the whole list.
        _, same, _ = await here.get(f"{where}{changed['sequence']}")
        assert (same["since"], same["added"]) == (changed["sequence"], [])
        for query in ("?life=other&after=0", f"?life={empty['life']}&after=999", ""):
            _, whole, _ = await here.get(f"/v1/cache/blocks{query}")
            assert whole["since"] == -1 and set(whole["added"]) == set(changed["added"])
        async with here.client.delete(here.url + "/v1/cache"):
            pass
        _, gone, _ = await here.get(f"{where}{changed['sequence']}")
        assert set(gone["removed"]) == set(changed["added"]) and gone["added"] == []
        _, net, _ = await here.get(where + "0")
        assert net["added"] == [] and set(net["removed"]) == set(changed["added"])
        status, error, _ = await here.get("/v1/cache/blocks?after=x")
        assert status == 400 and error["error"]["param"] == "after"


async def test_keys_of_a_stretched_prompt() -> None:
    body = {"prompt": LONG}
    found = []
    for original in (None, 100):
        async with running(model={"original_context": original}) as here:
            _, asked, _ = await here.post("/v1/cache/keys?path=/v1/completions", body)
            await here.post("/v1/completions", body)
            assert asked["keys"] and set(asked["keys"]) <= set((await here.get("/v1/cache/blocks"))[1]["added"])
            found.append(asked["keys"])
    assert not set(found[0]) & set(found[1])


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/completion", {"prompt": LONG}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
        ("/v1/responses", {"input": LONG}),
    ],
)
async def test_keys_are_those_of_the_prompt_that_an_endpoint_reads(path: str, body: dict[str, Any]) -> None:
    async with running() as here:
        status, asked, _ = await here.post(f"/v1/cache/keys?path={path}", body)
        assert status == 200 and asked["keys"]
        assert (await here.post(path, body))[0] == 200
        assert set(asked["keys"]) <= set((await here.get("/v1/cache/blocks"))[1]["added"])
        status, error, _ = await here.post(f"/v1/cache/keys?path={path}x", body)
        assert status == 400 and error["error"]["param"] == "path"
        assert (await here.post(f"/v1/cache/keys?path={path}", {"prompt": 3, "messages": 3, "input": 3}))[0] == 400


async def test_only_admins_may_know_what_is_cached(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "alice:one\nbob:two:admin\n")
    async with running(api_key_file=keys) as here:
        for key, allowed in (("one", False), ("two", True)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await here.get("/v1/cache/blocks", headers=headers))[0] == (200 if allowed else 403)
            status, _, _ = await here.post("/v1/cache/keys?path=/v1/completions", {"prompt": "a"}, headers=headers)
            assert status == (200 if allowed else 403)


def test_who_is_too_far_behind_gets_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_log, "MOST_CHANGES", 3)
    log = block_log.BlockLog()
    life = log.changes("", -1).life
    for key in (b"a", b"b", b"c", b"d"):
        log.note(key, held=True)
    log.note(b"c", held=False)
    assert log.changes(life, 2) == block_log.BlockChanges(life, 2, 5, (b"d",), (b"c",))
    assert log.changes(life, 1) == block_log.BlockChanges(life, -1, 5, (b"a", b"b", b"d"), ())
