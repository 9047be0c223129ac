"""The program llm, set up by `luce connect`, against the application over a scripted model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.claude_code import AGENT
from tests.support.client_programs import Ended, Program, need
from tests.support.http_server import Running, running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import REPLY


@pytest.fixture
def llm(tmp_path: Path) -> Program:
    return Program(need("llm", "openai3/bin"), tmp_path)


async def ask(llm: Program, here: Running, *flags: str) -> Ended:
    """A prompt that must be answered."""
    await llm.connect("llm", here, "--api-key", "sesame")
    ended = await llm.run("-m", "luce", "-o", "temperature", "0", *flags, "hi")
    assert ended.status == 0, ended
    return ended


async def test_a_prompt_and_its_log(llm: Program) -> None:
    async with running(api_key=("sesame",)) as here:
        ended = await ask(llm, here, "--usage", "-s", "Be brief.")
        assert ended.output == REPLY + "\n" and "Token usage:" in ended.errors
        (logged,) = (await llm.run("logs", "list", "--json")).json
        assert (logged["response"], logged["system"]) == (REPLY, "Be brief.")
        # The second time, the prompt is cached, and the usage says so.
        assert "cached" in (await ask(llm, here, "--usage", "-s", "Be brief.")).errors


async def test_options_and_a_conversation(llm: Program) -> None:
    async with running(api_key=("sesame",)) as here:
        assert (await ask(llm, here, "-o", "max_tokens", "4")).output == REPLY.encode()[:4].decode() + "\n"
        assert (await ask(llm, here, "-o", "stop", "wö")).output == "Héllo, \n"
        assert (await ask(llm, here, "--no-stream")).output == REPLY + "\n"
        assert (await ask(llm, here, "-c")).output == REPLY + "\n"


async def test_an_error_is_told(llm: Program) -> None:
    async with running(api_key=("sesame",)) as here:
        await llm.connect("llm", here, "--api-key", "sesame")
        ended = await llm.run("-m", "luce", "x" * 600)
        assert ended.status == 1 and "maximum context length is 512 tokens" in ended.errors
        (llm.home / ".config/io.datasette.llm/keys.json").write_text(json.dumps({"luce": "wrong"}))
        ended = await llm.run("-m", "luce", "hi")
        assert ended.status == 1 and "key" in ended.errors


async def test_a_schema(llm: Program) -> None:
    async with running(api_key=("sesame",)) as here:
        ended = await ask(
            llm,
            here,
            "--schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": {"port": {"type": "boolean"}},
                    "required": ["port"],
                    "additionalProperties": False,
                }
            ),
        )
        assert isinstance(ended.json["port"], bool)


async def test_a_tool_loop(llm: Program) -> None:
    functions = "def add(a: int, b: int) -> int:\n    return a + b\n"
    script = playing(call("add", {"a": 19, "b": 23}), "It is 42.")
    async with running(api_key=("sesame",), model={**AGENT, "context": 8192, "script": script}) as here:
        ended = await ask(llm, here, "--functions", functions, "--td")
        assert ended.output == "It is 42.\n" and "add" in ended.errors and "42" in ended.errors
