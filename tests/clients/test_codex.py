"""Codex without a terminal, against the application over a scripted model; and its recorded requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.claude_code import AGENT, LARGE
from tests.support.client_programs import Program, need, recorded
from tests.support.codex import FLAGS, RECORDED, codex, events, shell, words
from tests.support.http_server import running
from tests.support.responses_stream import joined, streamed
from tests.support.scripted_agent import call, playing, thinking_chat
from tests.support.scripted_model import saying

Json = dict[str, Any]

PATCH = "*** Begin Patch\n*** Add File: new.txt\n+forty-two\n*** End Patch\n"


@pytest.fixture
def program() -> str:
    return need("codex")


def answer(found: list[Json]) -> str:
    """The last message of a run."""
    return str([item for item in found if item.get("type") == "agent_message"][-1]["text"])


# --- the program


async def test_an_answer(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "script": saying("It is 42.")}) as here:
        ended = await codex(program, here, tmp_path).run(*FLAGS, "What is it?")
        assert ended.status == 0 and answer(events(ended.output)) == "It is 42.", ended


async def test_a_shell_loop_writes_the_file_and_reads_only_what_is_new(program: str, tmp_path: Path) -> None:
    script = playing(shell("printf forty-two > out.txt"), "It is written.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        with recorded() as bodies:
            ended = await codex(program, here, tmp_path).run(*FLAGS, "Write forty-two to out.txt.")
        found = events(ended.output)
        assert ended.status == 0 and answer(found) == "It is written.", ended
        assert (tmp_path / "work/out.txt").read_text() == "forty-two"
        assert len(bodies) == 2
        usage = found[-1]["usage"]
        # It adds up both turns, of which the second begins with all of the first.
        assert usage["cached_input_tokens"] > 0.9 * (usage["input_tokens"] - usage["cached_input_tokens"]) > 10_000


async def test_a_tool_of_an_mcp_server_is_called_by_its_namespace(program: str, tmp_path: Path) -> None:
    script = playing(call("mcp__words__reverse", {"word": "drawer"}), "The word is reward.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        with recorded() as bodies:
            ended = await codex(program, here, tmp_path, words(tmp_path)).run(*FLAGS, "Reverse drawer.")
        (used,) = [item for item in events(ended.output) if item.get("type") == "mcp_tool_call"]
        assert (used["server"], used["tool"], used["status"]) == ("words", "reverse", "completed"), ended
        assert answer(events(ended.output)) == "The word is reward."
        made, output = json.loads(bodies[1])["input"][-2:]
        assert (made["namespace"], made["name"]) == ("mcp__words", "reverse")
        assert "reward" in json.dumps(output["output"])


async def test_the_catalogue_offers_a_custom_tool_that_is_called(program: str, tmp_path: Path) -> None:
    script = playing(call("apply_patch", {"input": PATCH}), "Patched.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        _, catalogue, _ = await here.get("/v1/models?client_version=0.169.0")
        # Luce's own entry leaves edits to the shell.
        catalogue["models"][0]["apply_patch_tool_type"] = "freeform"
        path = tmp_path / "catalogue.json"
        path.write_text(json.dumps(catalogue))
        with recorded() as bodies:
            more = f"model_catalog_json = {json.dumps(str(path))}\n"
            ended = await codex(program, here, tmp_path, more).run(*FLAGS, "Patch it.")
        assert ended.status == 0 and answer(events(ended.output)) == "Patched.", ended
        assert (tmp_path / "work/new.txt").read_text() == "forty-two\n"
        # The catalogue was read: there is no warning about a model that Codex does not know.
        assert "metadata" not in ended.output
        made, output = json.loads(bodies[1])["input"][-2:]
        assert (made["type"], made["name"], made["input"]) == ("custom_tool_call", "apply_patch", PATCH)
        assert output["type"] == "custom_tool_call_output"


async def test_it_shows_the_summary_of_a_reasoning_and_sends_it_back(program: str, tmp_path: Path) -> None:
    script = playing(f"<think>\nI write it.\n</think>\n\n{shell('printf 42 > out.txt')}", "Done.")
    async with running(**LARGE, model={**AGENT, "script": script, "chat": thinking_chat}) as here:
        with recorded() as bodies:
            more = 'model_reasoning_summary = "detailed"\nmodel_supports_reasoning_summaries = true\n'
            ended = await codex(program, here, tmp_path, more).run(*FLAGS, "Write it.")
        assert any(item.get("type") == "reasoning" and "I write it." in item["text"] for item in events(ended.output))
        (item,) = [item for item in json.loads(bodies[1])["input"] if item["type"] == "reasoning"]
        assert item["encrypted_content"]


async def test_it_understands_that_a_prompt_is_too_long(program: str, tmp_path: Path) -> None:
    async with running(**LARGE, model={**AGENT, "context": 10_000}) as here:
        with recorded() as bodies:
            ended = await codex(program, here, tmp_path).run(*FLAGS, "Speak.")
        assert ended.status == 1 and "ran out of room" in ended.output and len(bodies) == 1, ended


async def test_a_cut_reply_is_reported(program: str, tmp_path: Path) -> None:
    endless = {**AGENT, "script": saying("on and ", end=False), "delay": 0.02}
    async with running(**LARGE, timeout=8, model=endless) as here:
        ended = await codex(program, here, tmp_path).run(*FLAGS, "Speak.")
        assert ended.status == 1 and "max_output_tokens" in ended.output, ended


async def test_an_error_of_the_engine_is_reported_once(program: str, tmp_path: Path) -> None:
    def broken(history: Any) -> int:
        raise RuntimeError("broken on purpose")

    async with running(**LARGE, model={**AGENT, "script": broken}) as here:
        with recorded() as bodies:
            ended = await codex(program, here, tmp_path).run(*FLAGS, "Speak.")
        failed = [event for event in events(ended.output) if event.get("type") == "turn.failed"]
        assert ended.status == 1 and len(failed) == 1, ended
        assert len(bodies) <= 4


async def test_a_long_wait_does_not_end_its_stream(program: str, tmp_path: Path) -> None:
    slow = {**AGENT, "script": saying("Late."), "delay": 0.4}
    async with running(**LARGE, sse_ping=1, model=slow) as here:
        made = codex(program, here, tmp_path)
        config = tmp_path / "home/.codex/config.toml"
        config.write_text(config.read_text() + "stream_idle_timeout_ms = 2000\n")
        with recorded() as bodies:
            ended = await made.run(*FLAGS, "Speak.")
        assert ended.status == 0 and answer(events(ended.output)) == "Late." and len(bodies) == 1, ended


async def test_it_is_set_up_by_luce_connect(program: str, tmp_path: Path) -> None:
    script = saying("Connected.")
    async with running(**LARGE, strict_model=True, api_key=("sesame",), model={**AGENT, "script": script}) as here:
        made = Program(program, tmp_path)
        await made.connect("codex", here, "--api-key", "sesame")
        ended = await made.run(*FLAGS, "--profile", "luce", "Speak.")
        assert ended.status == 0 and answer(events(ended.output)) == "Connected.", ended


# --- its requests


async def test_recorded_requests_are_answered() -> None:
    first, second = json.loads(RECORDED.read_text())
    made = next(item for item in second["input"] if item["type"] == "function_call")
    script = playing(call(made["name"], {"cmd": "true"}), "Done.")
    async with running(**LARGE, model={**AGENT, "context": 65536, "script": script}) as here:
        begun, ended = [joined(await streamed(here, body)) for body in (first, second)]
        assert [item["type"] for item in begun["output"]] == ["function_call"]
        assert begun["output"][0]["name"] == made["name"] and begun["tools"] == first["tools"]
        assert ended["output"][0]["content"][0]["text"] == "Done." and ended["status"] == "completed"
        cached = ended["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached > 0.95 * begun["usage"]["input_tokens"] > 5_000
        assert await here.metric("luce_skipped_tools_total") == 2
