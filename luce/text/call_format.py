"""Which calls of tools a reply may hold, or must."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from luce.models.calls import Calls


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
        tools = [(tool.name, tool.parameters, tool.strict, tool.param) for tool in self.tools]
        return msgspec.json.encode((self.calls.format, tools, self.required, self.parallel))
