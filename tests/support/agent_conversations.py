"""Long conversations of agents in the shape of their recorded requests, with a call and its result in each turn."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]

RECORDED = Path(__file__).parents[1] / "clients" / "recorded"


class Usage(NamedTuple):
    """Tokens of a turn."""

    #: of the prompt, from the cache
    cached: int
    prompt: int
    reply: int


class ChatConversation:
    """An agent's over chat completions, as OpenCode's: each message of the model comes back as it came."""

    path = "/v1/chat/completions"

    def __init__(self, **fields: Any) -> None:
        """`fields` of each request."""
        self._fields = fields
        system = {"role": "system", "content": "You are an agent that edits files."}
        self._messages: list[Json] = [system, {"role": "user", "content": "Write 42 to out.txt."}]

    def body(self) -> Json:
        """The next request."""
        return {**self._fields, "messages": self._messages}

    def take(self, completion: Json, result: str) -> int:
        """The reply. Its calls get a result; to one without calls the user says it. Returns the number of calls."""
        message = completion["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
        self._messages += [message, *(results or [{"role": "user", "content": result}])]
        return len(calls)

    @staticmethod
    def usage(completion: Json) -> Usage:
        """What a reply took."""
        usage = completion["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Usage(cached, usage["prompt_tokens"], usage["completion_tokens"])


class ClaudeConversation:
    """Claude Code's: the same tools and instructions in each request, a cache mark that moves to the last block, a
    billing line that changes, and a system message that is a list of blocks once and a text from then on."""

    path = "/v1/messages"

    def __init__(self, tools: int | None = None, own: list[Json] | None = None, **fields: Any) -> None:
        """`tools`: only the first so many; `own`: others in their place; `fields` replace those of the recording."""
        first, second = json.loads((RECORDED / "claude-code.json").read_text())
        self._first = {**first, **fields, "tools": own or first["tools"][:tools]}
        self._messages: list[Json] = copy.deepcopy(second["messages"][:2])
        self._turn = 0

    def body(self) -> Json:
        """The next request."""
        body = copy.deepcopy(self._first)
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version={self._turn};"
        if self._turn:
            body["messages"] = copy.deepcopy(self._messages)
            body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return body

    def take(self, message: Json, result: str) -> int:
        """The reply. Its calls get a result; to one without calls the user says it. Returns the number of calls."""
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        results = [{"tool_use_id": call["id"], "type": "tool_result", "content": result} for call in calls]
        self._messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": results or [{"type": "text", "text": result}]},
        ]
        self._turn += 1
        return len(calls)

    @staticmethod
    def usage(message: Json) -> Usage:
        """What a reply took."""
        usage = message["usage"]
        cached, new = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"] + usage["input_tokens"]
        return Usage(cached, cached + new, usage["output_tokens"])


class CodexConversation:
    """Codex's: the same tools and instructions in each request, and the items of each reply as they came, with an id of
    the client's own at each output."""

    path = "/v1/responses"

    def __init__(self, **fields: Any) -> None:
        """`fields` replace those of the recording."""
        first, _ = json.loads((RECORDED / "codex.json").read_text())
        self._first = {**first, **fields}
        self._turn = 0

    def body(self) -> Json:
        """The next request."""
        return copy.deepcopy(self._first)

    def take(self, response: Json, result: str) -> int:
        """The reply. Its calls get a result; to one without calls the user says it. Returns the number of calls."""
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "id": f"{self._turn}", "call_id": call["call_id"], "output": result}
            for call in calls
        ]
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": result}]}
        self._first["input"] += [*response["output"], *(outputs or [said])]
        self._turn += 1
        return len(calls)

    @staticmethod
    def usage(response: Json) -> Usage:
        """What a reply took."""
        usage = response["usage"]
        return Usage(usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"], usage["output_tokens"])
