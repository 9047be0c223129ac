"""A scripted model that calls tools, which small models do not do by themselves: for real agents on the application.

It speaks Hermes' format: a call is `<tool_call>`, the JSON of name and arguments, `</tool_call>`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from luce.models.spec import Dialect
from luce.text.chat import ChatFormat
from luce.text.template import ChatTemplate
from tests.support.scripted_backend import Script
from tests.support.scripted_model import DIALECT, END, START, OffLoopChat, saying, tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_RESPONSE = b"</tool_response>"


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the model's format."""
    return f"{OPEN}\n" + json.dumps({"name": name, "arguments": arguments}) + f"\n{CLOSE}"


@functools.cache
def agent_chat(dialect: Dialect = Dialect(), tool_format: str = "auto") -> ChatFormat:  # noqa: B008  # frozen
    """One for all tests, as each has a child process. `tool_format`: of replies; that of the template is Hermes'."""
    return OffLoopChat(ChatTemplate(TEMPLATE, bos="", eos="<|im_end|>"), tokenizer(), dialect, tool_format)


def thinking_chat() -> ChatFormat:
    """The same for replies with reasoning."""
    return agent_chat(DIALECT)


def playing(*replies: str) -> Script:
    """A script that says the first reply to a conversation without results of tools, the second to one with one
    result, and so on; the last one to all further ones."""
    scripts = [saying(reply) for reply in replies]
    results: dict[int, int] = {}

    def script(history: Sequence[int]) -> int | None:
        opened = len(history)
        while opened and history[opened - 1] not in (START, END):
            opened -= 1
        if opened not in results:
            text = bytes(token for token in history[:opened] if token < 256)
            results[opened] = text.count(_RESPONSE)
        return scripts[min(results[opened], len(scripts) - 1)](history)

    return script
