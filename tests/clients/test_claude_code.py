"""Claude Code without a terminal, against the application over a scripted model; and its recorded requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.claude_code import AGENT, LARGE, RECORDED, ClaudeCode, find, recorded
from tests.support.http_server import Running, running
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import saying

Json = dict[str, Any]

USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@pytest.fixture
def program() -> str:
    found = find()
    if found is None:
        pytest.skip("Claude Code is not installed")
    return found


def tokens(usage: Json) -> int:
    return sum(int(usage[key]) for key in USAGE)


# --- the program


async def test_an_answer(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "script": saying("It is 42.")}) as here:
        ended = await ClaudeCode(program, here, tmp_path).run("What is it?")
        assert (ended.status, ended.result["result"]) == (0, "It is 42."), ended


async def test_a_tool_loop_writes_the_file(program: str, tmp_path: Path) -> None:
    path = tmp_path / "work" / "out.txt"
    script = playing(call("Write", {"file_path": str(path), "content": "forty-two\n"}), "It is written.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        with recorded() as bodies:
            ended = await ClaudeCode(program, here, tmp_path).run("Write forty-two to out.txt.")
        assert (ended.status, ended.result["result"]) == (0, "It is written."), ended
        assert path.read_text() == "forty-two\n"
        first, second = map(json.loads, bodies)
        assert first["max_tokens"] == 32000 and len(second["messages"]) > len(first["messages"])
        # Its cache marks moved, and still only the new messages were read.
        usage = ended.result["usage"]
        prompt = here.model.engine.stats().prompt_tokens
        assert usage["cache_read_input_tokens"] > 0.95 * prompt / 1.05 > 50_000


async def test_a_file_is_read_and_quoted(program: str, tmp_path: Path) -> None:
    path = tmp_path / "work" / "note.txt"
    script = playing(call("Read", {"file_path": str(path)}), "The note says: swordfish.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        claude = ClaudeCode(program, here, tmp_path)
        path.write_text("swordfish\n")
        with recorded() as bodies:
            ended = await claude.run("What does note.txt say?")
        assert (ended.status, ended.result["result"]) == (0, "The note says: swordfish."), ended
        results = json.loads(bodies[1])["messages"][-1]["content"]
        assert results[0]["type"] == "tool_result" and "swordfish" in json.dumps(results[0]["content"])


async def test_a_limit_above_the_context_is_reduced(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "context": 100_000, "script": saying("Short.")}) as here:
        with recorded() as bodies:
            ended = await ClaudeCode(program, here, tmp_path).run("Speak.")
        assert ended.status == 0 and ended.result["result"] == "Short.", ended
        assert json.loads(bodies[0])["max_tokens"] + tokens(ended.result["usage"]) > 100_000


async def test_it_understands_that_a_prompt_is_too_long(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "context": 60_000}) as here:
        with recorded() as bodies:
            ended = await ClaudeCode(program, here, tmp_path).run("Speak.")
        assert ended.status != 0 and ended.result["is_error"]
        assert ended.result["result"].startswith("Prompt is too long"), ended
        assert len(bodies) == 1


async def test_killed_in_the_middle_it_frees_its_slot(program: str, tmp_path: Path) -> None:
    endless = {**AGENT, "script": saying("on and ", end=False), "delay": 0.01}
    async with running(**LARGE, model=endless) as here:
        process = await ClaudeCode(program, here, tmp_path).start("Speak.")
        try:
            await here.until(lambda: here.model.engine.stats().predicted_tokens > 20)
        finally:
            process.kill()
            await process.communicate()
        await here.quiet()
        assert here.model.engine.stats().cancelled == 1


async def test_two_sessions_advance_together(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "script": saying("Both.")}) as here:
        sessions = [ClaudeCode(program, here, tmp_path / name) for name in ("a", "b")]
        ends = await asyncio.gather(*(session.run("Speak.") for session in sessions))
        assert [(end.status, end.result["result"]) for end in ends] == [(0, "Both.")] * 2, ends


# --- its requests


def requests() -> list[Json]:
    """The bodies of a tool loop, without their texts."""
    return list(json.loads(RECORDED.read_text()))


async def replay(here: Running) -> list[Json]:
    return [joined(await streamed(here, {**body, "max_tokens": 400})) for body in requests()]


async def test_recorded_requests_are_answered() -> None:
    _, second = requests()
    call_made = next(b for m in second["messages"] if m["role"] == "assistant" for b in m["content"])
    script = playing(call(call_made["name"], call_made["input"]), "Done.")
    async with running(**LARGE, model={**AGENT, "context": 65536, "script": script}) as here:
        first, last = await replay(here)
        assert [block["type"] for block in first["content"]] == ["tool_use"] and first["stop_reason"] == "tool_use"
        assert first["content"][0]["input"] == call_made["input"]
        assert last["content"] == [{"type": "text", "text": "Done."}] and last["stop_reason"] == "end_turn"
        # The second prompt continues the first, although cache marks and the billing line differ.
        assert last["usage"]["cache_read_input_tokens"] >= tokens(first["usage"]) > 10_000
        for body, reply in zip(requests(), (first, last), strict=True):
            status, count, _ = await here.post("/v1/messages/count_tokens?beta=true", body)
            assert status == 200 and count["input_tokens"] == tokens(reply["usage"])


async def test_the_billing_line_is_no_part_of_the_prompt() -> None:
    body, _ = requests()
    async with running(**LARGE, model={**AGENT, "context": 65536}) as here:
        await streamed(here, {**body, "max_tokens": 1})
        assert body["system"][0]["text"].startswith("x-anthropic-billing-header:")
        body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=9; cch=other;"
        usage = joined(await streamed(here, {**body, "max_tokens": 1}))["usage"]
        assert usage["cache_read_input_tokens"] == tokens(usage)
