"""Claude Code on the application: the program, its runs, and its requests as fixtures.

The program is `claude` on the PATH, or in the npm prefix that LUCE_TEST_CLIENTS names.

`python -m tests.support.claude_code` runs a tool loop of two turns, and writes its requests to
tests/clients/recorded/claude-code.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from luce.server import answer
from luce.server.state import Server
from tests.support.http_server import Running, running
from tests.support.scripted_agent import agent_chat, call, playing

Json = dict[str, Any]

RECORDED = Path(__file__).parents[1] / "clients" / "recorded" / "claude-code.json"
#: settings of a server for a byte tokenizer's 77,000 tokens of a first request
LARGE: Json = {"parallel": 4, "chunk": 4096}
AGENT: Json = {"context": 262144, "chat": agent_chat}
_LONGEST_NAME = 28
#: texts of JSON schemas that say what is valid
_SCHEMA = ("$schema", "pattern")


def find() -> str | None:
    """The path of the program, None if it is not installed."""
    prefix = os.environ.get("LUCE_TEST_CLIENTS")
    places = [] if prefix is None else [f"{prefix}/node_modules/.bin"]
    return shutil.which("claude", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


class Ended(NamedTuple):
    """What a run has left."""

    status: int
    #: its standard output, a JSON object
    result: Json
    errors: str


class ClaudeCode:
    """Runs in a directory of its own, without a terminal and without files of the user."""

    def __init__(self, program: str, here: Running, directory: Path) -> None:
        self._program = program
        self.work = directory / "work"
        self._home = directory / "home"
        for path in (self.work, self._home):
            path.mkdir(parents=True)
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._home),
            "ANTHROPIC_BASE_URL": here.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
        }

    async def start(self, prompt: str, *flags: str) -> asyncio.subprocess.Process:
        """A run that goes on."""
        return await asyncio.create_subprocess_exec(
            self._program,
            *("--print", "--output-format", "json", "--permission-mode", "acceptEdits", "--model", "scripted"),
            *flags,
            prompt,
            cwd=self.work,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, prompt: str, *flags: str) -> Ended:
        """A whole run."""
        process = await self.start(prompt, *flags)
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ended(process.returncode, json.loads(output) if output else {}, errors.decode())


@contextlib.contextmanager
def recorded() -> Iterator[list[bytes]]:
    """The bodies of requests that the application reads in this time."""
    bodies: list[bytes] = []
    read_body = answer.read_body

    async def recording(request: web.Request, server: Server) -> bytes:
        body = await read_body(request, server)
        bodies.append(body)
        return body

    answer.read_body = recording
    try:
        yield bodies
    finally:
        answer.read_body = read_body


def redacted(value: Any, labels: dict[str, str]) -> Any:
    """A JSON value with a label for each text: the same one for the same text. Keys, names and numbers stay."""
    if isinstance(value, dict):
        return {key: item if key in _SCHEMA else redacted(item, labels) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, labels) for item in value]
    if not isinstance(value, str) or (len(value) <= _LONGEST_NAME and " " not in value and "/" not in value):
        return value
    head, mark, _ = value.partition(":")
    label = labels.setdefault(value, f"text {len(labels)} of {len(value)} characters")
    return f"{head}: {label};" if mark and head == "x-anthropic-billing-header" else label


async def _record(program: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        script = playing(call("Write", {"file_path": str(work / "work/out.txt"), "content": "42\n"}), "Done.")
        async with running(**LARGE, model={**AGENT, "script": script}) as here:
            with recorded() as bodies:
                ended = await ClaudeCode(program, here, work).run("Write 42 to out.txt.")
        assert ended.status == 0, ended
    labels: dict[str, str] = {}
    requests = [redacted(json.loads(body), labels) for body in bodies]
    RECORDED.write_text(json.dumps(requests, indent=1) + "\n")


if __name__ == "__main__":
    found = find()
    assert found is not None, "claude is not installed"
    asyncio.run(_record(found))
