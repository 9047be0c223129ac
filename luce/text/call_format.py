"""Which calls of tools a reply may hold, or must."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from luce.models.calls import Calls
from luce.text.reply_format import ReplyFormat


@dataclass(frozen=True)
class CallableTool:
    """A tool that a reply may call."""

    name: str
    #: the JSON schema of the arguments; None: any object
    parameters: Any
    #: every keyword of the schema is enforced, or the request refused
    strict: bool = False
    #: the field of the request that has the schema, which errors name
    param: str = "parameters"
    #: of a tool that is called with a text: what that text is, which is its one parameter; None: any
    input: ReplyFormat | None = None


@dataclass(frozen=True)
class CallFormat:
    """The calls of a reply: of these tools, in this dialect."""

    calls: Calls
    tools: tuple[CallableTool, ...]
    #: the reply consists of calls, at least one; else calls stand in free text
    required: bool = False
    #: the reply may have several calls
    parallel: bool = True

    @functools.cached_property
    def text(self) -> bytes:
        """What tells call formats apart."""
        tools = [(tool.name, tool.parameters, tool.strict, tool.param, _text(tool.input)) for tool in self.tools]
        return msgspec.json.encode((self.calls.format, tools, self.required, self.parallel))


def _text(form: ReplyFormat | None) -> tuple[bytes, str] | None:
    """What tells the texts of tools apart, with the field that errors name."""
    return None if form is None else (form.text, form.param)
