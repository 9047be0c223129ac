"""/metrics over HTTP: requests, tokens, shards and daemons."""

from __future__ import annotations

from luce.runtime.device import Memory
from luce.shard.shard import DaemonState
from luce.shard.timing import BOUNDS, Durations, ShardTimes
from tests.support.http_server import running
from tests.support.scripted_model import REPLY


async def test_metrics_may_be_public() -> None:
    async with running(api_key=("k",), metrics_public=True) as here:
        assert (await here.get("/metrics"))[0] == 200


async def test_metrics_count_requests_and_tokens() -> None:
    async with running() as here:
        await here.chat()
        await here.post("/v1/chat/completions", {})
        await here.get("/secret-path")
        _, text, headers = await here.get("/metrics")
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'luce_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
        assert 'luce_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0' in text
        assert 'luce_requests_total{endpoint="other",status="404"} 1.0' in text
        assert "secret-path" not in text
        tokens = len(REPLY.encode()) + 1
        assert await here.metric("luce_generated_tokens_total") == tokens
        assert await here.metric("luce_time_to_first_token_seconds_count") == 1
        assert await here.metric("luce_inter_token_latency_seconds_count") == tokens - 1
        assert await here.metric("luce_queue_seconds_count") == 1
        assert await here.metric("luce_slots") == 1 and await here.metric("luce_queued_sequences") == 0
        assert await here.metric("luce_prompt_tokens_total") > 0 and await here.metric("luce_kv_pages") > 0
        assert "# HELP luce_time_to_first_token_seconds " in text


async def test_metrics_hold_the_times_of_each_shard() -> None:
    async with running() as here:
        work = Durations((0, 2, 0, 1, *(0,) * (len(BOUNDS) - 4), 5), 42.5)
        here.model.shard_times = (ShardTimes("cuda:0", work, work), ShardTimes("cpu:0", work, None))
        _, text, _ = await here.get("/metrics")
        for shard in ('{device="cuda:0",shard="0"}', '{device="cpu:0",shard="1"}'):
            assert f"luce_shard_seconds_count{shard} 8.0" in text
            assert f"luce_shard_seconds_sum{shard} 42.5" in text
        assert 'luce_shard_seconds_bucket{device="cpu:0",le="3e-05",shard="1"} 2.0' in text
        assert 'luce_shard_seconds_bucket{device="cpu:0",le="10.0",shard="1"} 3.0' in text
        assert 'luce_shard_seconds_bucket{device="cpu:0",le="+Inf",shard="1"} 8.0' in text
        assert 'luce_transfer_seconds_count{device="cuda:0",shard="0"} 8.0' in text
        assert 'luce_transfer_seconds_count{device="cpu:0"' not in text
        assert "luce_device_memory_bytes{" not in text
        here.model.left = {"cuda:0": Memory(1 << 30, 3 << 30)}
        _, text, _ = await here.get("/metrics")
        assert 'luce_device_memory_bytes{device="cuda:0",kind="free"} 1.073741824e+09' in text
        assert 'luce_device_memory_bytes{device="cuda:0",kind="total"} 3.221225472e+09' in text
        assert text.count("luce_device_memory_bytes{") == 2


async def test_metrics_hold_what_is_predicted_of_each_shard() -> None:
    async with running() as here:
        assert here.model.plan is not None
        _, text, _ = await here.get("/metrics")
        shards = here.model.plan.prediction.shards
        assert shards
        for number, stage in enumerate(shards):
            for phase, seconds in (("decode", stage.decode), ("piece", stage.piece)):
                labels = f'device="{stage.shard.device}",phase="{phase}",shard="{number}"'
                assert f"luce_predicted_seconds{{{labels}}} {seconds.total!r}\n" in text
        here.model.plan = None
        _, text, _ = await here.get("/metrics")
        assert "luce_predicted_seconds" not in text


async def test_metrics_hold_the_state_of_each_daemon() -> None:
    async with running() as here:
        draft = DaemonState("draft", "cpu:3", True, 1, "stream", False, {("stream", "sent"): 5}, None)
        moved = {("stream", "sent"): 10, ("stream", "received"): 20, ("shared", "sent"): 30, ("shared", "received"): 40}
        here.model.shard_daemons = (
            DaemonState(1, "hip:0", True, 3, "shared", True, moved, 1.5),
            DaemonState(2, "cpu:0,cpu:1", False, 0, "stream", False, {}, 0.0),
            draft,
        )
        _, text, _ = await here.get("/metrics")
        for labels, up, restarts in (
            ('{device="hip:0",shard="1"}', "1.0", "3.0"),
            ('{device="cpu:0,cpu:1",shard="2"}', "0.0", "0.0"),
        ):
            assert f"luce_shard_up{labels} {up}" in text
            assert f"luce_shard_restarts_total{labels} {restarts}" in text
        for (transport, direction), count in moved.items():
            labels = f'device="hip:0",direction="{direction}",shard="1",transport="{transport}"'
            assert f"luce_ipc_bytes_total{{{labels}}} {count:.1f}" in text
        assert 'luce_ipc_wait_seconds_total{device="hip:0",shard="1"} 1.5' in text
        assert 'luce_shard_up{device="cpu:3",shard="draft"} 1.0' in text
        assert 'luce_ipc_wait_seconds_total{device="cpu:3"' not in text


async def test_metrics_without_a_model_have_no_shards() -> None:
    async with running(loaded=False) as here:
        _, text, _ = await here.get("/metrics")
        assert "luce_requests_total" in text and "luce_shard" not in text and "luce_device" not in text
