"""GET /props: settings, placement, and the clients that get paths."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest

from luce import __version__
from luce.draft.drafter import Draftable, PendingProposals
from luce.draft.ngram import NgramDrafter
from luce.engine.speculate import DraftStats
from luce.errors import OutOfMemoryError
from luce.runtime.device import Memory
from luce.server import props
from luce.shard.shard import DaemonState
from tests.support.http_server import running
from tests.support.scripted_model import REPLY, TEMPLATE, plan, saying


async def test_the_model_and_its_settings() -> None:
    settings = {"alias": ("a", "b"), "parallel": 3, "chunk": 64, "top_k": 7, "min_p": 0.5, "cache_type_k": "q8_0"}
    async with running(**settings) as here:
        status, body, _ = await here.get("/props")
        assert status == 200
        assert body["server"] == {"name": "luce", "version": __version__, "props_schema": 1001}
        assert body["model"] == {"arch": "scripted", "tokenizer_id": "default"}
        assert (body["model_alias"], body["total_slots"]) == ("a", 3)
        assert body["default_generation_settings"] == {
            "n_ctx": 512,
            "temperature": 0.7,
            "top_p": 0.95,
            "top_k": 7,
            "min_p": 0.5,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
        }
        # Numbers below 1000 are those of Lucebox's shapes, whose keys this one does not have.
        lucebox = {"daemon", "full_cache", "model_card", "pflash", "prefix_cache", "tool_replay"}
        assert body["server"]["props_schema"] > 1000 and not lucebox & set(body)
        assert body["capabilities"] == ["completion", "chat", "structured_outputs"]
        efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
        assert body["reasoning"] == {
            "supported": True,
            "supported_efforts": efforts,
            "think_max_tokens": None,
            "hard_limit_reply_budget": 4096,
            "effort_tiers": dict.fromkeys(efforts[1:], 256),
            "default": "auto",
            "default_max_tokens": None,
        }
        assert body["budget_envelope"] == {"model_card_source": "family", "default_max_tokens": None}
        assert body["chat_template"] == TEMPLATE
        assert body["chat_template_caps"] == {
            "supports_tools": True,
            "supports_tool_calls": False,
            "supports_enable_thinking": True,
        }
        assert {"temperature", "top_k", "logit_bias", "seed"} <= set(body["sampling"]["capabilities"])
        assert not {"max_tokens", "prompt_logprobs", "stream"} & set(body["sampling"]["capabilities"])


async def test_placement() -> None:
    async with running(chunk=64, cache_type_v="bf16") as here:
        assert (await here.get("/props"))[1]["runtime"] == {
            "backend": "cpu",
            "target_device": "cpu:0",
            "target_sharding": [{**shard, "memory": None} for shard in here.model.placement],
            "plan": plan().facts,
            "daemons": [],
            "kv_cache_k": "auto",
            "kv_cache_v": "bf16",
            "chunk": 64,
        }
        here.model.left = {"cpu:0": Memory(1, 3)}
        shards = (await here.get("/props"))[1]["runtime"]["target_sharding"]
        assert [shard["memory"] for shard in shards] == [{"free": 1, "total": 3}, None]
        here.model.shard_daemons = (DaemonState(1, "cpu:1", True, 3, "shared", False, {}, 0.0),)
        assert (await here.get("/props"))[1]["runtime"]["daemons"] == [
            {"shard": 1, "device": "cpu:1", "up": True, "restarts": 3, "transport": "shared", "gpu_waits": False}
        ]
        here.model.plan = None
        assert (await here.get("/props"))[1]["runtime"]["plan"] is None
        here.model.placement[0]["device"] = "tcp://far:9/cuda:0"
        runtime = (await here.get("/props"))[1]["runtime"]
        assert (runtime["backend"], runtime["target_device"]) == ("cuda", "tcp://far:9/cuda:0")


class Broken(NgramDrafter):
    def propose(self, asked: Sequence[Draftable]) -> PendingProposals:
        raise OutOfMemoryError("cpu:0: 9 bytes asked")


async def test_usage_counts_the_draft_tokens() -> None:
    async with running(verify_width=8, model={"drafter": NgramDrafter(block=7)}) as here:
        reply = await here.chat("to and fro " * 8, max_tokens=60, ignore_eos=True)
        events = await here.events(
            "/v1/completions",
            {"prompt": "to and fro " * 8, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}},
        )
    for last in (reply, events[-1]):
        details, timings = last["usage"]["completion_tokens_details"], last["timings"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted == timings["draft_n_accepted"]
        assert accepted + rejected == timings["draft_n"]
        drafted = timings["draft_n"]
        assert last["usage"].get("accept_rate") == (round(accepted / drafted, 4) if drafted else None)
        assert timings["draft_state"] in ("drafting", "measuring")
    assert reply["timings"]["draft_n_accepted"] > 0


async def test_what_a_grammar_forces_is_no_prediction() -> None:
    schema = {"const": {"a": "forty characters that nobody else may say."}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    # A backend that verifies drafts what a grammar forces, with a drafter and without.
    async with running(verify_width=8, model={"drafter": NgramDrafter(block=7)}) as here:
        reply = await here.chat("hi", response_format=form)
        assert json.loads(reply["choices"][0]["message"]["content"]) == schema["const"]
        forced = reply["choices"][0]["finish_details"]["grammar"]["forced"]
        timings, details = reply["timings"], reply["usage"]["completion_tokens_details"]
        assert 30 < forced <= timings["draft_n_accepted"] <= timings["draft_n"]
        assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"] - forced
        assert forced == await here.metric("luce_grammar_forced_tokens_total")
    # What ends a reasoning is drafted as well, and is neither.
    async with running(
        verify_width=8, model={"drafter": NgramDrafter(block=7), "script": saying("0123 " * 99)}
    ) as here:
        on = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 4}
        reply = await here.chat("hi", max_tokens=9, **on)
        assert reply["choices"][0]["finish_details"]["close_kind"] == "hard"
        details = reply["usage"]["completion_tokens_details"]
        assert reply["timings"]["draft_n_accepted"] > details["accepted_prediction_tokens"]


async def test_the_drafter() -> None:
    turn = "<|im_start|>assistant\n"
    body = {"prompt": turn + REPLY + turn, "max_tokens": 60, "temperature": 0}
    async with running(verify_width=8, model={"drafter": NgramDrafter(block=7)}) as here:
        assert (await here.post("/v1/completions", body))[0] == 200
        shown = (await here.get("/props"))[1]["speculative"]
        steps, drafted, accepted = (shown.pop(name) for name in ("steps", "draft_n", "draft_n_accepted"))
        assert 0 < accepted <= drafted <= 7 * steps
        assert shown.pop("acceptance_rate") == pytest.approx(accepted / drafted, abs=1e-4)
        assert shown.pop("tokens_per_step") == pytest.approx(1 + accepted / steps, abs=1e-3)
        facts = {"kind": "ngram", "block": 7, "longest": 12, "shortest": 2}
        # Prompt lookup as a drafter proposes nothing else, and no sequence runs now.
        assert shown.pop("draft_n_copied") == accepted and shown.pop("sequences") == {}
        assert shown == {**facts, "enabled": True, "state": "on"}
    for model, state in (
        ({"drafter": Broken(block=7)}, "disabled: cpu:0: 9 bytes asked"),
        ({"no_drafter_reason": "draft.gguf: No such file"}, "refused: draft.gguf: No such file"),
    ):
        async with running(verify_width=8, model=model) as here:
            for _ in range(4):
                assert (await here.post("/v1/completions", body))[0] == 200
            shown = (await here.get("/props"))[1]["speculative"]
            assert (shown["enabled"], shown["state"]) == (False, state)
            assert await here.metric("luce_draft_enabled") == 0
    async with running() as here:
        assert (await here.get("/props"))[1]["speculative"] == {"enabled": False}


async def test_where_pages_are() -> None:
    settings = {"kvflash": "512", "kvflash_host_mb": 3, "kvflash_tau": 7, "chunk": 128}
    async with running(model={"context": 2048}, **settings) as here:
        assert (await here.post("/v1/completions", {"prompt": "x" * 900, "max_tokens": 200}))[0] == 200
        shown = (await here.get("/props"))[1]["kvflash"]
        size = shown.pop("swapped_bytes")
        assert shown.pop("rescore_seconds") >= 0
        assert shown == {
            "policy": "lru",
            "max_resident_tokens": 512,
            "tau": 7,
            "resident_pages": 0,
            "host_pages": 0,
            "host_bytes": 0,
            "host_bytes_limit": 3 << 20,
            "pages_swapped_out": shown["pages_swapped_out"],
            "pages_swapped_in": 0,
            "resident_hits": 0,
            "lost_pages": 0,
            "rescores": 0,
        }
        # The next page to be swapped out was copied in advance.
        assert shown["pages_swapped_out"] > 5 and size == (shown["pages_swapped_out"] + 1) * 64 * 16
        assert await here.metric("luce_kvflash_swapped_pages_total") == shown["pages_swapped_out"]
        assert await here.metric("luce_kvflash_swapped_bytes_total") == size
        assert await here.metric("luce_kvflash_host_bytes") == 3 << 20
        for name in ("pages", "resident_hits_total", "lost_pages_total", "rescores_total"):
            assert await here.metric(f"luce_kvflash_{name}") == 0
    async with running() as here:
        assert "kvflash" not in (await here.get("/props"))[1]
        assert "luce_kvflash" not in (await here.get("/metrics"))[1]


async def test_every_endpoint_that_is_listed_is_served() -> None:
    async with running() as here:
        _, body, _ = await here.get("/props")
        endpoints = body["api"]["endpoints"]
        assert {"GET /props", "GET /metrics", "POST /v1/chat/completions", "GET /v1/models/{id}"} <= set(endpoints)
        assert endpoints == sorted(set(endpoints))
        for endpoint in endpoints:
            method, path = endpoint.split(" ")
            path = re.sub(r"\{.*\}", "scripted", path.replace("{path}", "app.js"))
            sent = {"data": b"{", "headers": {"Content-Type": "application/json"}} if method == "POST" else {}
            async with here.client.request(method, here.url + path, **sent) as reply:
                # Responses are not stored, so none has an id; and this server has no cluster.
                without = 404 if path.endswith(("/responses/scripted", "/cluster")) else 200
                assert reply.status == (400 if method == "POST" else without), endpoint


async def test_paths_are_for_callers_with_a_key_or_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        assert (await here.get("/props"))[1]["model_path"] == "scripted.gguf"
        # The test's connection comes from this machine; a check that returns False stands for other clients.
        monkeypatch.setattr(props, "is_loopback", lambda host: False)
        _, body, _ = await here.get("/props")
        assert "model_path" not in body and "scripted.gguf" not in str(body)
    async with running(model={"no_drafter_reason": "scripted.gguf: No such file"}) as here:
        shown = (await here.get("/props"))[1]["speculative"]
        assert shown["state"] == "refused" and "scripted.gguf" not in str(shown)
        assert "file" not in props.speculative_props(DraftStats({"file": "scripted.gguf"}, "on"), paths=False)
    monkeypatch.undo()
    async with running(api_key=("k",)) as here:
        assert (await here.get("/props"))[0] == 401
        assert (await here.get("/props", headers={"x-api-key": "k"}))[1]["model_path"] == "scripted.gguf"


async def test_before_the_model_is_loaded() -> None:
    async with running(loaded=False) as here:
        status, body, _ = await here.get("/props")
        assert (status, body["error"]["code"]) == (503, "loading")
