"""Thirty turns of an agent with a real model over shards here and in a daemon, and over a restart in the middle: from
the second turn on, only new tokens are read."""

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
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_conversations import ClaudeConversation

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
#: has recurrent state, which cannot be rewound, and a template that shows a reply again as it was
MODEL = ROOT / "models" / "tiny" / "target.gguf"
TURNS = 30
#: the first layers are here, the others in a daemon that runs this interpreter
SPLIT = ("--devices", "cpu:0,cpu:1", "--shard-python", sys.executable)


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
        str(cache),
        "--kv-cache-min-tokens",
        "64",
        *flags,
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(cache), "OPENBLAS_NUM_THREADS": "1"}
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


@pytest.mark.parametrize("flags", [("--devices", "cpu:0"), SPLIT], ids=["one device", "a split with a daemon"])
def test_only_what_is_new_is_read(tmp_path: Path, flags: tuple[str, ...]) -> None:
    conversation = ClaudeConversation(
        stream=False, max_tokens=24, tools=1, temperature=0, thinking={"type": "disabled"}
    )
    known = 0
    for turns in (range(TURNS // 2), range(TURNS // 2, TURNS)):
        with serving(tmp_path, *flags) as url:
            for i in turns:
                reply = post(url + conversation.path, conversation.body())
                usage = reply["usage"]
                cached = usage["cache_read_input_tokens"]
                total = cached + usage["input_tokens"] + usage["cache_creation_input_tokens"]
                # All of the last prompt and its reply, but for the reply's last token, which no step has read.
                assert cached >= known - 1, i
                assert total > known
                known = total + usage["output_tokens"]
                conversation.take(reply, f"result {i}")
