"""Conversations of agents over thirty turns: from the second turn on, only new tokens are read."""

from __future__ import annotations

from typing import Any

from tests.support.agent_conversations import ClaudeConversation
from tests.support.claude_code import AGENT, LARGE
from tests.support.http_server import running
from tests.support.messages_stream import joined, streamed
from tests.support.scripted_agent import call, playing

Json = dict[str, Any]

TURNS = 30


def prompt(usage: Json) -> int:
    """Tokens of a prompt."""
    return sum(usage[key] for key in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))


async def test_claude_code_reads_only_what_is_new() -> None:
    conversation = ClaudeConversation(max_tokens=400)
    replies = [call("Write", {"file_path": f"/tmp/{i}.txt", "content": f"line {i}\n" * (i % 5)}) for i in range(TURNS)]
    async with running(**LARGE, model={**AGENT, "script": playing(*replies)}) as here:
        known = 0
        for i in range(TURNS):
            message = joined(await streamed(here, conversation.body()))
            usage = message["usage"]
            # All of the last prompt and its reply is there, but for the reply's last token, which no step has read.
            assert usage["cache_read_input_tokens"] >= known - 1, i
            assert prompt(usage) > known and message["stop_reason"] == "tool_use"
            known = prompt(usage) + usage["output_tokens"]
            conversation.take(message, f"wrote file {i}")
        assert known > 10_000
