"""OpenCode without a terminal, set up by `luce connect`, against the application over a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.claude_code import AGENT, LARGE
from tests.support.client_programs import Ended, Program, need, recorded
from tests.support.http_server import Running, running
from tests.support.scripted_agent import call, playing
from tests.support.scripted_model import saying

Json = dict[str, Any]


@pytest.fixture
def opencode(tmp_path: Path) -> Program:
    variables = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    return Program(need("opencode"), tmp_path, **{f"OPENCODE_DISABLE_{name}": "1" for name in variables})


async def run(opencode: Program, here: Running, prompt: str, *flags: str) -> Ended:
    await opencode.connect("opencode", here, *flags)
    return await opencode.run("run", "--model", "luce/scripted", "--format", "json", prompt)


def text(ended: Ended) -> str:
    """What the model said, of the events of a run."""
    assert ended.status == 0, ended
    events = [json.loads(line) for line in ended.output.splitlines()]
    return "".join(event["part"]["text"] for event in events if event["type"] == "text")


async def test_an_answer(opencode: Program) -> None:
    # The user's own file, in the form with comments, counts beside the one that is written.
    mine = opencode.home / ".config/opencode/opencode.jsonc"
    mine.parent.mkdir(parents=True)
    mine.write_text('{\n  // mine\n  "instructions": ["mine.md"]\n}\n')
    (opencode.work / "mine.md").write_text("Answer in rhymes.\n")
    async with running(**LARGE, model={**AGENT, "script": saying("It is 42.")}) as here:
        with recorded() as bodies:
            ended = await run(opencode, here, "What is it?")
        assert text(ended) == "It is 42.", ended
        # It asks for a title beside the answer.
        asked = [json.loads(body) for body in bodies]
        assert sorted("tools" in body for body in asked) == [False, True]
        main = next(body for body in asked if "tools" in body)
        assert main["stream_options"] == {"include_usage": True} and "Answer in rhymes." in json.dumps(main)
        assert main["model"] == "scripted" and main["max_tokens"] == 32_000


async def test_killed_in_the_middle_it_frees_its_slots(opencode: Program) -> None:
    endless = {**AGENT, "script": saying("on and ", end=False), "delay": 0.01}
    async with running(**LARGE, model=endless) as here:
        await opencode.connect("opencode", here)
        process = await opencode.start("run", "--model", "luce/scripted", "Speak.")
        try:
            await here.until(lambda: here.model.engine.stats().predicted_tokens > 20)
        finally:
            process.kill()
            await process.communicate()
        await here.quiet()
        assert here.model.engine.stats().cancelled >= 1


async def test_a_tool_loop_writes_the_file(opencode: Program) -> None:
    path = opencode.work / "out.txt"
    script = playing(call("write", {"filePath": str(path), "content": "forty-two\n"}), "It is written.")
    async with running(**LARGE, model={**AGENT, "script": script}) as here:
        ended = await run(opencode, here, "Write forty-two to out.txt.")
        assert path.read_text() == "forty-two\n", ended
        assert text(ended) == "It is written."
