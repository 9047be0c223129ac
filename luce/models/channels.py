"""Replies that are messages of several channels, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Channels:
    """How a model writes a reply as messages, with `()` around what may be missing:

        start role ( `to=`RECIPIENT) channel NAME ( `to=`RECIPIENT) (FORMAT) message BODY end

    The prompt ends with the first `start role`. The messages of channel `reasoning` are the reasoning, all others the
    content. A message to a recipient is a call of a tool.
    """

    #: special tokens: in front of the role, of the channel's name, and of the body
    start: str
    channel: str
    message: str
    #: special tokens behind a body; the first one is that between two messages
    ends: tuple[str, ...]
    #: who writes a reply; a message to this recipient has none
    role: str
    #: names of channels: the reasoning, the answer, and what the model says before it calls tools
    reasoning: str
    final: str
    preamble: str
