"""Long conversations of agents in the shape of their recorded requests, with a call and its result in each turn."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

RECORDED = Path(__file__).parents[1] / "clients" / "recorded"


class ClaudeConversation:
    """Claude Code's: the same tools and instructions in each request, a cache mark that moves to the last block, a
    billing line that changes, and a system message that is a list of blocks once and a text from then on."""

    path = "/v1/messages"

    def __init__(self, tools: int | None = None, **fields: Any) -> None:
        """`tools`: only the first so many; `fields` replace those of the recording."""
        first, second = json.loads((RECORDED / "claude-code.json").read_text())
        self._first = {**first, **fields, "tools": first["tools"][:tools]}
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

    def take(self, message: Json, result: str) -> None:
        """The reply. Its calls get a result; to one without calls the user says it."""
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        results = [{"tool_use_id": call["id"], "type": "tool_result", "content": result} for call in calls]
        self._messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": results or [{"type": "text", "text": result}]},
        ]
        self._turn += 1


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

    def take(self, response: Json, result: str) -> None:
        """The reply. Its calls get a result; to one without calls the user says it."""
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        outputs = [
            {"type": "function_call_output", "id": f"{self._turn}", "call_id": call["call_id"], "output": result}
            for call in calls
        ]
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": result}]}
        self._first["input"] += [*response["output"], *(outputs or [said])]
        self._turn += 1
