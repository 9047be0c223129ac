"""`luce top` against the real application over scripted models, and against what is no server of Luce."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pexpect
import pytest
from rich.console import Console

from luce.api import Model
from luce.cli.main import main
from luce.cli.repl.server_client import ServerClient
from luce.cli.server_status import Reading, read, summary
from luce.cli.top import page
from luce.config.settings import Config
from luce.errors import ServerError
from luce.server.model_pool import ModelEntry, ModelPool
from tests.support.http_server import running
from tests.support.other_server import OtherServer
from tests.support.scripted_model import ScriptedModel
from tools.terminal import interruptible

ROOT = Path(__file__).parents[2]


def reading(url: str, model: str | None = None) -> Reading:
    with contextlib.closing(ServerClient(url, "")) as client:
        return read(client, model)


def drawn(shown: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(page(shown))
    return cast(io.StringIO, console.file).getvalue()


async def test_a_server_at_work() -> None:
    async with running(parallel=2) as here:
        before = await asyncio.to_thread(reading, here.url)
        for _ in range(3):
            await here.chat(max_tokens=5)
        now = await asyncio.to_thread(reading, here.url)
        shown = summary(now, before)
        seconds = now.at - before.at
        assert shown["per_second"]["generated"] == pytest.approx(15 / seconds)
        # The three chats, and what the readings asked for.
        assert shown["per_second"]["requests"] >= 3 / seconds
        assert 0 < shown["time_to_first_token"] < 60
        assert (shown["model"], shown["busy"], len(shown["slots"]), shown["queued"]) == ("scripted", 0, 2, 0)
        assert [device["device"] for device in shown["devices"]] == ["cpu:0", "cpu:1"]
        assert (shown["draft"], shown["daemons"]) == (None, [])
        text = drawn(shown)
        assert "0 of 2 busy, 0 queued" in text and "cpu:1   3..3    100 B" in text
        # Without an earlier reading there are no rates yet.
        assert summary(now, None)["per_second"]["generated"] is None
        assert "- generated" in drawn(summary(now, None))


async def test_a_server_that_was_started_anew_counts_from_zero() -> None:
    async with running() as here:
        await here.chat(max_tokens=5)
        before = await asyncio.to_thread(reading, here.url)
        async with running() as again:
            now = await asyncio.to_thread(reading, again.url)
    assert summary(now, before)["per_second"]["generated"] == 0
    assert summary(now, before)["time_to_first_token"] is None


def pool(*names: str) -> ModelPool:
    entries = [ModelEntry(name, name, Config(alias=(name,)), pinned=name == "b") for name in names]
    return ModelPool(entries, lambda entry, progress: cast(Model, ScriptedModel(entry.config)))


async def test_one_of_several_models() -> None:
    async with running(pool=pool("a", "b", "c")) as here:
        await here.chat(model="a", max_tokens=2)
        await here.chat(model="b", max_tokens=3)
        shown = {name: summary(await asyncio.to_thread(reading, here.url, name), None) for name in "ab"}
        assert [shown[name]["model"] for name in "ab"] == ["a", "b"]
        now = await asyncio.to_thread(reading, here.url, "b")
        assert now.total("luce_generated_tokens_total") == 3
        lines = [line.split() for line in drawn(shown["b"]).splitlines()]
        assert ["b*", "loaded,", "pinned"] in lines and ["c", "unloaded"] in lines
        with pytest.raises(ServerError, match="404"):
            await asyncio.to_thread(reading, here.url, "x")


def test_slots_daemons_drafts_and_memory_are_drawn() -> None:
    props = {
        "model_alias": "m\x1b[31m",
        "runtime": {
            "target_sharding": [
                {"device": "cuda:0", "layers": [0, 9], "weights": 5, "memory": {"free": 10**9, "total": 4 * 10**9}}
            ],
            "daemons": [{"device": "hip:0", "up": False, "restarts": 2}],
        },
    }
    busy = {"id": 0, "is_processing": True, "n_prompt_tokens": 1000, "n_prompt_tokens_processed": 250}
    slots = [{**busy, "next_token": {"n_decoded": 7}}, {"id": 1, "is_processing": False}]
    samples: dict[str, Any] = {
        "luce_draft_enabled": [({}, 1.0)],
        "luce_draft_tokens_total": [({}, 8.0)],
        "luce_draft_accepted_tokens_total": [({}, 6.0)],
        "luce_prefix_cache_hits_total": [({"tier": "ram"}, 3.0), ({"tier": "disk"}, 0.0)],
        "luce_prefix_cache_misses_total": [({}, 1.0)],
    }
    text = drawn(summary(Reading(1.0, [{"id": "m"}], props, slots, samples), None))
    assert "\x1b" not in text
    for part in (
        "1 of 2 busy",
        "on, 75 % accepted",
        "75 % hits",
        "#####............... 250 of 1,000  7",
        "DOWN  2 restarts",
        "###############..... 3.0 GB of 4.0 GB",
    ):
        assert part in text, text


@pytest.fixture
def other() -> Iterator[OtherServer]:
    server = OtherServer()
    yield server
    server.close()


def test_a_server_of_another_maker(other: OtherServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--server", other.url]) == 7
    assert capsys.readouterr().err.startswith(f"luce: {other.url}/v1: ")


def test_no_server_and_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--server", "http://127.0.0.1:9"]) == 7
    assert capsys.readouterr().err == "luce: http://127.0.0.1:9/v1: Connection refused\n"
    assert main(["top", "--interval", "0"]) == 2
    assert capsys.readouterr().err == "luce: --interval 0: expected 0.1..3600 seconds\n"


async def test_once_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    async with running() as here:
        assert await asyncio.to_thread(main, ["top", "--once", "--json", "--server", here.url]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "scripted"
        assert await asyncio.to_thread(main, ["top", "--once", "--server", here.url]) == 0
        assert "tokens per second" in capsys.readouterr().out


async def test_a_terminal_until_ctrl_c() -> None:
    async with running() as here:

        def watch() -> tuple[int | None, int | None]:
            command = ["-m", "luce", "top", "--interval", "0.1", "--server", here.url]
            env = os.environ | {"TERM": "xterm-256color"}
            child = pexpect.spawn(
                sys.executable,
                command,
                dimensions=(24, 100),
                cwd=str(ROOT),
                env=env,
                preexec_fn=interruptible,
                timeout=60,
            )
            for text in ("tokens per second", r"0\.0 generated", "cpu:1"):
                child.expect(text)
            child.sendintr()
            child.expect(pexpect.EOF)
            child.close()
            return child.exitstatus, child.signalstatus

        assert await asyncio.to_thread(watch) == (130, None)


async def test_a_server_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    naps = 0

    async with running() as here:
        loop = asyncio.get_running_loop()

        def nap(seconds: float) -> None:
            nonlocal naps
            naps += 1
            if naps == 4:
                raise KeyboardInterrupt
            # While the server starts and drains it refuses all but /health.
            loop.call_soon_threadsafe(setattr, here.server, "draining", naps == 1)
            loop.call_soon_threadsafe(lambda: None)

        monkeypatch.setattr("luce.cli.top.time.sleep", nap)
        assert await asyncio.to_thread(main, ["top", "--json", "--server", here.url]) == 130
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in line for line in shown] == [False, True, False, False]
    assert "shutting down" in shown[1]["error"] and shown[2]["per_second"]["generated"] is None
