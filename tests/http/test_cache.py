"""What clients and people see of the prefix cache: /v1/cache, metrics, usage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_server import running
from tests.support.key_files import write_keys

LONG = "Tell me more. " * 10


async def test_the_listing_shows_lengths_and_counters_but_no_text() -> None:
    async with running() as here:
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
