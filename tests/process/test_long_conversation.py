"""Turns of agents with a real model over shards here and in a daemon, and over a restart in the middle: from the
second turn on, only new tokens are read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from luce.config.directories import user_cache_directory
from tests.support.agent_conversations import ChatConversation, ClaudeConversation, CodexConversation

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
#: has recurrent state, which cannot be rewound, and a template that shows a reply again as it was
MODEL = ROOT / "models" / "tiny" / "target.gguf"
#: twelve, of which the restart is in the middle, and in the nightly check thirty
TURNS = (12, 30)
#: three shards: the first is here, the others are in a daemon that runs this interpreter
SPLIT = ("--devices", "cpu:0,cpu:1,cpu:2", "--shard-python", sys.executable)
#: tools whose calls are short, so that none is cut, and have many spellings; in a conversation some come several times
FUNCTIONS: list[Json] = [
    {"name": "ls", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"name": "cat", "parameters": {"type": "object", "properties": {"f": {"enum": ["a", 1, True]}}, "required": ["f"]}},
]


def home(top: Path) -> Path:
    """A new home, in which only the CPU's kernels are those of this user: to compile them takes a minute."""
    compiled, linked = user_cache_directory() / "cpu", top / "home" / ".cache" / "luce" / "cpu"
    compiled.mkdir(parents=True, exist_ok=True)
    linked.parent.mkdir(parents=True, exist_ok=True)
    if not linked.is_symlink():
        linked.symlink_to(compiled)
    return top / "home"


@contextlib.contextmanager
def serving(cache: Path, *flags: str) -> Iterator[str]:
    """The address of a server whose prefix cache is on the disk; it is stopped in order at the end."""
    command = [
        sys.executable,
        "-m",
        "luce",
        "serve",
        str(MODEL),
        "--port",
        "0",
        "--kv-cache-dir",
        str(cache / "prefixes"),
        "--kv-cache-min-tokens",
        "64",
        *flags,
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home(cache)), "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " ready model=" in line:
                    break
            found = re.search(r"listening url=(\S+)", "".join(lines))
            assert found is not None, lines
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, process.stderr.read()
        finally:
            process.kill()


def post(url: str, body: Json) -> Json:
    """The reply to a request that must succeed."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return dict(json.load(response))


def conversations() -> list[ChatConversation | CodexConversation | ClaudeConversation]:
    """Of each API one whose model must call a tool, and one in which it may."""
    drawn: Json = {"stream": False, "temperature": 1, "seed": 3}
    openai = {**drawn, "tool_choice": "required", "parallel_tool_calls": False}
    anthropic = {**drawn, "max_tokens": 400, "thinking": {"type": "disabled"}}
    one = {"type": "any", "disable_parallel_tool_use": True}
    flat = [{"type": "function", **function} for function in FUNCTIONS]
    schemas = [{"name": function["name"], "input_schema": function["parameters"]} for function in FUNCTIONS]
    return [
        ChatConversation(**openai, tools=[{"type": "function", "function": function} for function in FUNCTIONS]),
        CodexConversation(**openai, tools=flat),
        ClaudeConversation(**anthropic, own=schemas, tool_choice=one),
        ClaudeConversation(1, **{**anthropic, "max_tokens": 8}),
    ]


@pytest.mark.parametrize("count", [TURNS[0], pytest.param(TURNS[1], marks=pytest.mark.slow)])
def test_only_what_is_new_is_read(count: int, tmp_path: Path) -> None:
    known: dict[object, int] = {}

    def talk(url: str, turns: range, conversation: ChatConversation | CodexConversation | ClaudeConversation) -> int:
        """The calls in these turns."""
        calls = 0
        for i in turns:
            reply = post(url + conversation.path, conversation.body())
            usage = conversation.usage(reply)
            # All of the last prompt and its reply, but for the reply's last token, which no step has read.
            assert usage.cached >= known.get(conversation, 0) - 1, (conversation, i, reply)
            assert usage.prompt > known.get(conversation, 0)
            known[conversation] = usage.prompt + usage.reply
            calls += conversation.take(reply, f"result {i}")
        return calls

    talks = conversations()
    half = count // 2
    for turns in (range(half), range(half, count)):
        with serving(tmp_path, *SPLIT) as url, ThreadPoolExecutor(len(talks)) as threads:
            *forced, _ = threads.map(partial(talk, url, turns), talks)
            assert forced == [half, half, half]
