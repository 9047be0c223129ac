"""Clients that stream while a cluster is disturbed, and compare each reply with an undisturbed one; and a cluster that
comes to rest."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable
from typing import Any

from luce.cluster import wire
from luce.errors import ServerError
from tests.support.cluster_processes import PROMPTS, Start, ask, command, stream
from tests.support.daemons import within

#: tokens of the longest replies, and how they are chosen: greedily, or drawn
TOKENS = 200
FIELDS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "top_k": 40, "seed": 7})
#: tokens by prompt and fields
Expected = dict[tuple[int, int], list[int]]


def replies(port: int) -> Expected:
    """What is generated without a disturbance."""
    found: Expected = {}
    for number, prompt in enumerate(PROMPTS):
        for kind, fields in enumerate(FIELDS):
            ids = found[number, kind] = []
            assert stream(port, TOKENS, ids, prompt, **fields) == "" and len(ids) == TOKENS
    return found


class Timed(list[int]):
    """Tokens, the longest time between two of them, and when that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.ended = time.monotonic()
        self.pause = 0.0

    def extend(self, more: Iterable[int], /) -> None:
        """As of a list."""
        now = time.monotonic()
        if now - self.last > self.pause:
            self.pause, self.ended = now - self.last, now
        self.last = now
        super().extend(more)


class Client:
    """Streams one reply after the other on a thread, and compares each with `expected`, until `ending`."""

    def __init__(
        self, port: int, seed: int, expected: dict[tuple[int, int], list[int]], ending: threading.Event
    ) -> None:
        self.random, self.port, self.expected, self.ending = random.Random(seed), port, expected, ending
        self.done, self.tokens, self.pause = 0, 0, 0.0
        #: replies that failed, and those with other tokens
        self.failed, self.wrong = list[str](), list[str]()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.ending.is_set():
            which = self.random.randrange(len(PROMPTS)), self.random.randrange(len(FIELDS))
            tokens, ids = self.random.randint(1, TOKENS), Timed()
            try:
                error = stream(self.port, tokens, ids, PROMPTS[which[0]], **FIELDS[which[1]])
            except Exception as problem:
                error = repr(problem)
            expected = self.expected[which][: len(ids) if error else tokens]
            if ids != expected:
                at = next((n for n, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(expected))
                self.wrong.append(f"{which} of {tokens}: {len(ids)} tokens, wrong from {at}; error {error!r}")
            self.done, self.tokens, self.pause = self.done + 1, self.tokens + len(ids), max(self.pause, ids.pause)
            if error:
                self.failed.append(error)
                time.sleep(0.2)


def replan(start: Start) -> None:
    """Let the model be placed anew, unless it cannot be at present."""
    with contextlib.suppress(ServerError):
        command(start, wire.AskReplan())


def states(start: Start) -> list[str]:
    """The states of the members."""
    status = command(start, wire.AskStatus())
    assert isinstance(status, wire.Status)
    return sorted(member.state for member in status.members)


def settle(start: Start, port: int, count: int) -> bool:
    """Whether the model comes to be on so many members."""

    def serving() -> bool:
        found = states(start)
        if found == ["serving"] * count:
            return bool(ask(port, "/health")[0] == 200)
        if set(found) <= {"idle", "serving"}:
            replan(start)
            time.sleep(1)
        return False

    return within(240, serving)
