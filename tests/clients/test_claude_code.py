"""Claude Code without a terminal, against the application over a scripted model; and its recorded requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.claude_code import AGENT, FLAGS, LARGE, RECORDED, claude_code
from tests.support.client_programs import Ended, Program, need, recorded
from tests.support.http_server import Running, running
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import saying

Json = dict[str, Any]

USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@pytest.fixture
def program() -> str:
    return need("claude")


async def run(claude: Program, prompt: str) -> tuple[int, Json, Ended]:
    """The exit status of a run, the object that it prints, and all of it."""
    ended = await claude.run(*FLAGS, prompt)
    return ended.status, json.loads(ended.output), ended


def tokens(usage: Json) -> int:
    return sum(int(usage[key]) for key in USAGE)


# --- the program


async def test_an_answer(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "script": saying("It is 42.")}) as here:
        status, result, ended = await run(claude_code(program, here, tmp_path), "What is it?")
        assert (status, result["result"]) == (0, "It is 42."), ended


async def test_a_tool_loop_writes_the_file(program: str, tmp_path: Path) -> None:
    path = tmp_path / "work" / "out.txt"
    script = playing(call("Write", {"file_path": str(path), "content": "forty-two\n"}), "It is written.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        with recorded() as bodies:
            status, result, ended = await run(claude_code(program, here, tmp_path), "Write forty-two to out.txt.")
        assert (status, result["result"]) == (0, "It is written."), ended
        assert path.read_text() == "forty-two\n"
        first, second = map(json.loads, bodies)
        assert first["max_tokens"] == 32000 and len(second["messages"]) > len(first["messages"])
        # Its cache marks moved, and still only the new messages were read.
        usage = result["usage"]
        prompt = here.model.engine.stats().prompt_tokens
        assert usage["cache_read_input_tokens"] > 0.95 * prompt / 1.05 > 40_000


async def test_a_file_is_read_and_quoted(program: str, tmp_path: Path) -> None:
    path = tmp_path / "work" / "note.txt"
    script = playing(call("Read", {"file_path": str(path)}), "The note says: swordfish.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        claude = claude_code(program, here, tmp_path)
        path.write_text("swordfish\n")
        with recorded() as bodies:
            status, result, ended = await run(claude, "What does note.txt say?")
        assert (status, result["result"]) == (0, "The note says: swordfish."), ended
        results = json.loads(bodies[1])["messages"][-1]["content"]
        assert results[0]["type"] == "tool_result" and "swordfish" in json.dumps(results[0]["content"])


async def test_a_limit_above_the_context_is_reduced(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "context": 70_000, "script": saying("Short.")}) as here:
        with recorded() as bodies:
            status, result, ended = await run(claude_code(program, here, tmp_path), "Speak.")
        assert status == 0 and result["result"] == "Short.", ended
        assert json.loads(bodies[0])["max_tokens"] + tokens(result["usage"]) > 70_000


async def test_it_understands_that_a_prompt_is_too_long(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "context": 40_000}) as here:
        with recorded() as bodies:
            status, result, ended = await run(claude_code(program, here, tmp_path), "Speak.")
        assert status != 0 and result["is_error"]
        assert result["result"].startswith("Prompt is too long"), ended
        assert len(bodies) == 1


async def test_killed_in_the_middle_it_frees_its_slot(program: str, tmp_path: Path) -> None:
    endless = {**AGENT, "script": saying("on and ", end=False), "delay": 0.01}
    async with running(**LARGE, model=endless) as here:
        process = await claude_code(program, here, tmp_path).start(*FLAGS, "Speak.")
        try:
            await here.until(lambda: here.model.engine.stats().predicted_tokens > 20)
        finally:
            process.kill()
            await process.communicate()
        await here.quiet()
        assert here.model.engine.stats().cancelled == 1


async def test_two_sessions_advance_together(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "script": saying("Both.")}) as here:
        sessions = [claude_code(program, here, tmp_path / name) for name in ("a", "b")]
        ends = await asyncio.gather(*(run(session, "Speak.") for session in sessions))
        assert [(status, result["result"]) for status, result, _ in ends] == [(0, "Both.")] * 2, ends


async def test_it_is_set_up_by_luce_connect(program: str, tmp_path: Path) -> None:
    script = saying("Connected.")
    async with running(**LARGE, strict_model=True, api_key=("sesame",), model={**AGENT, "script": script}) as here:
        claude = Program(program, tmp_path)
        await claude.connect("claude", here, "--api-key", "sesame")
        with recorded() as bodies:
            ended = await claude.run("--settings", str(claude.home / ".claude/luce.json"), *FLAGS[:5], "Speak.")
        assert ended.json["result"] == "Connected."
        (body,) = map(json.loads, bodies)
        assert body["model"] == "scripted" and body["max_tokens"] == 32000


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
        assert last["usage"]["cache_read_input_tokens"] >= tokens(first["usage"]) > 5_000
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
