"""Codex on the application: the program, its runs, and its requests as fixtures.

`python -m tests.support.codex` runs a tool loop of two turns, and writes its requests to
tests/clients/recorded/codex.json.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.claude_code import AGENT, LARGE, redacted
from tests.support.client_programs import Program, find, recorded
from tests.support.http_server import Running, running
from tests.support.scripted_agent import call, playing

Json = dict[str, Any]

RECORDED = Path(__file__).parents[1] / "clients" / "recorded" / "codex.json"
#: for a run without questions that prints one JSON object per event; its own sandbox needs rights that tests lack
FLAGS = ("exec", "--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
#: a server of the Model Context Protocol with one tool, which says a word backwards
MCP_SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, params = asked["method"], asked.get("params", {})
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "words", "version": "1"}}
    elif method == "tools/list":
        schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
        result = {"tools": [{"name": "reverse", "description": "Says a word backwards.", "inputSchema": schema}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": params["arguments"]["word"][::-1]}]}
    else:
        result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def codex(program: str, here: Running, directory: Path, more: str = "") -> Program:
    """Codex in a directory of its own, with a provider for a server; `more`: further lines of its configuration."""
    home = directory / "home" / ".codex"
    made = Program(program, directory, CODEX_HOME=str(home))
    home.mkdir(exist_ok=True)
    provider = f'name = "Luce"\nbase_url = "{here.url}/v1"\nwire_api = "responses"\nrequest_max_retries = 1\n'
    head = 'model = "scripted"\nmodel_provider = "luce"\n'
    (home / "config.toml").write_text(f"{head}\n{more}\n[model_providers.luce]\n{provider}stream_max_retries = 1\n")
    return made


def words(directory: Path) -> str:
    """The lines of a configuration with the MCP server."""
    script = directory / "words.py"
    script.write_text(MCP_SERVER)
    return f"[mcp_servers.words]\ncommand = {json.dumps(sys.executable)}\nargs = [{json.dumps(str(script))}]\n"


def events(output: str) -> list[Json]:
    """The items that a run has completed, and its last event."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [event["item"] if event["type"] == "item.completed" else event for event in found]


def shell(command: str) -> str:
    """A call of Codex's shell."""
    return call("exec_command", {"cmd": command})


async def _record(program: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        async with running(**LARGE, model={**AGENT, "script": playing(shell("printf 42 > out.txt"), "Done.")}) as here:
            with recorded() as bodies:
                ended = await codex(program, here, work, words(work)).run(*FLAGS, "Write 42 to out.txt.")
        assert ended.status == 0, ended
        assert (work / "work/out.txt").read_text() == "42", ended
    labels: dict[str, str] = {}
    requests = [redacted(json.loads(body), labels) for body in bodies]
    RECORDED.write_text(json.dumps(requests, indent=1) + "\n")


if __name__ == "__main__":
    found = find("codex")
    assert found is not None, "codex is not installed"
    asyncio.run(_record(found))
