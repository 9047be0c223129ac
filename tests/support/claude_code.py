"""Claude Code on the application: the program, its runs, and its requests as fixtures.

`python -m tests.support.claude_code` runs a tool loop of two turns, and writes its requests to
tests/clients/recorded/claude-code.json.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.client_programs import Program, find, recorded
from tests.support.http_server import Running, running
from tests.support.scripted_agent import agent_chat, call, playing

Json = dict[str, Any]

RECORDED = Path(__file__).parents[1] / "clients" / "recorded" / "claude-code.json"
#: settings of a server for a byte tokenizer's 77,000 tokens of a first request
LARGE: Json = {"parallel": 4, "chunk": 4096}
AGENT: Json = {"context": 262144, "chat": agent_chat}
#: for a run without questions that prints JSON
FLAGS = ("--print", "--output-format", "json", "--permission-mode", "acceptEdits", "--model", "scripted")
_LONGEST_NAME = 28
#: texts of JSON schemas that say what is valid
_SCHEMA = ("$schema", "pattern")


def claude_code(program: str, here: Running, directory: Path) -> Program:
    """Claude Code in a directory of its own, set up for a server by variables."""
    return Program(
        program,
        directory,
        ANTHROPIC_BASE_URL=here.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_TELEMETRY="1",
    )


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
                ended = await claude_code(program, here, work).run(*FLAGS, "Write 42 to out.txt.")
        assert ended.status == 0, ended
    labels: dict[str, str] = {}
    requests = [redacted(json.loads(body), labels) for body in bodies]
    RECORDED.write_text(json.dumps(requests, indent=1) + "\n")


if __name__ == "__main__":
    found = find("claude")
    assert found is not None, "claude is not installed"
    asyncio.run(_record(found))
