"""Every field of a step and of an output survives the messages, also fields that are added later."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest

from luce.ipc.channel import Channel
from luce.remote.messages import Announce, Done, Request, Response
from luce.runtime.step import Output, Step
from tests.support.values import made, same


@pytest.mark.parametrize("kind", [Step, Output])
def test_every_field_crosses(kind: type[Any]) -> None:
    sent = made(kind)
    message: Any = Announce(sent, 0, 0) if kind is Step else Done((1.0,), sent)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel[Any](ours, Response).send(1, message, timeout=5)
        _, received = Channel[Any](theirs, Request | Response).receive(timeout=5)
    came = received.step if kind is Step else received.output
    for field in dataclasses.fields(kind):
        assert same(getattr(sent, field.name), getattr(came, field.name)), field.name
