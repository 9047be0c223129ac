"""Conversations of agents over thirty turns: from the second turn on, only new tokens are read."""

from __future__ import annotations

from tests.support import messages_stream, responses_stream
from tests.support.agent_conversations import ClaudeConversation, CodexConversation
from tests.support.claude_code import AGENT, LARGE
from tests.support.codex import shell
from tests.support.http_server import running
from tests.support.scripted_agent import call, playing

TURNS = 30


async def test_claude_code_reads_only_what_is_new() -> None:
    conversation = ClaudeConversation(max_tokens=400)
    replies = [call("Write", {"file_path": f"/tmp/{i}.txt", "content": f"line {i}\n" * (i % 5)}) for i in range(TURNS)]
    async with running(**LARGE, model={**AGENT, "script": playing(*replies)}) as here:
        known = 0
        for i in range(TURNS):
            message = messages_stream.joined(await messages_stream.streamed(here, conversation.body()))
            usage = conversation.usage(message)
            # All of the last prompt and its reply is there, but for the reply's last token, which no step has read.
            assert usage.cached >= known - 1, i
            assert usage.prompt > known and message["stop_reason"] == "tool_use"
            known = usage.prompt + usage.reply
            conversation.take(message, f"wrote file {i}")
        assert known > 10_000


async def test_codex_reads_only_what_is_new() -> None:
    conversation = CodexConversation()
    replies = [shell(f"printf {'x' * (i % 5)} > {i}.txt") for i in range(TURNS)]
    async with running(**LARGE, model={**AGENT, "script": playing(*replies)}) as here:
        known = 0
        for i in range(TURNS):
            response = responses_stream.joined(await responses_stream.streamed(here, conversation.body()))
            usage = conversation.usage(response)
            assert usage.cached >= known - 1, i
            assert usage.prompt > known
            assert [item["type"] for item in response["output"]] == ["function_call"]
            known = usage.prompt + usage.reply
            conversation.take(response, f"wrote file {i}")
        assert known > 10_000
