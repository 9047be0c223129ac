"""Traffic for tools.simulate_router: requests that follow from drawn conversations, or that were recorded.

A recording is a file with one JSON object a line, as Mooncake and others publish it: `timestamp` (ms), `input_length`
and `output_length` (tokens), `hash_ids` (of the prompt's blocks of 512 tokens; equal ids: equal text up to there). It
says neither which requests are one conversation nor what a reply's blocks are. A block that more than one request of
200 has counts as instructions; the first other one names the conversation. Only prompts are taken to be cached.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from luce.kvcache.block_keys import TOKENS

KINDS, SYSTEM_TOKENS = 4, 12_000
TURNS, TURN_MEDIAN, REPLY_MEDIAN = 20, 900, 220
#: one of so many requests has a block of instructions
COMMON = 200


@dataclass
class Request:
    """One turn: the blocks of its prompt, and the tokens of its reply."""

    session: int
    keys: list[bytes]
    #: keys that the replica has cached behind it: of the prompt, with its reply where that is known
    after: list[bytes]
    reply: int
    #: blocks that some replica has computed before
    repeated: int
    #: the requests of the conversation behind this one, each to be sent behind the reply of the one before
    turns: Iterator[Request]
    arrived: float = 0.0
    cached: int = 0


#: when the first request of some arrives, and these
Arrival = tuple[float, Iterator[Request]]


class Session:
    """One agent's conversation, as requests."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.number, self._draw, self._turns = number, draw, max(1, round(draw.expovariate(1 / TURNS)))
        self._system = draw.randrange(KINDS)
        self._length = SYSTEM_TOKENS
        self._known = SYSTEM_TOKENS // TOKENS

    def turns(self) -> Iterator[Request]:
        """The requests, each to be sent behind the reply of the one before."""
        requests = self._requests(lambda: requests)
        return requests

    def _requests(self, rest: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        for _ in range(self._turns):
            self._length += round(self._draw.lognormvariate(0, 0.9) * TURN_MEDIAN)
            keys, reply = self._keys(), max(1, round(self._draw.lognormvariate(0, 0.8) * REPLY_MEDIAN))
            self._length += reply
            yield Request(self.number, keys, self._keys(), reply, self._known, rest())
            self._known = self._length // TOKENS

    def _keys(self) -> list[bytes]:
        shared = SYSTEM_TOKENS // TOKENS
        own = range(shared, self._length // TOKENS)
        return [b"%d-%d" % (self._system, n) for n in range(shared)] + [b"s%d-%d" % (self.number, n) for n in own]


def drawn(rate: float, seconds: float, draw: random.Random) -> Iterator[Arrival]:
    """`rate` new conversations a second, for so many seconds."""
    begin, number = 0.0, 0
    while (begin := begin + draw.expovariate(rate)) < seconds:
        yield begin, Session(number, random.Random(draw.random())).turns()
        number += 1


class Recorded(NamedTuple):
    """A line of a recording: seconds, tokens of prompt and reply, ids of the prompt's blocks, and its conversation."""

    seconds: float
    prompt: int
    reply: int
    blocks: tuple[int, ...]
    conversation: int


class Recording:
    """A file of recorded requests. Raises ValueError that names the line."""

    def __init__(self, path: Path, block_tokens: int = 512) -> None:
        self._spread = block_tokens // TOKENS
        lines = []
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    found = json.loads(line)
                    blocks = tuple(map(int, found["hash_ids"]))
                    lines.append((found["timestamp"] / 1000, found["input_length"], found["output_length"], blocks))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: no recorded request: {error!r}") from None
        often = Counter(block for *_, blocks in lines for block in set(blocks))
        #: blocks that conversations share
        self.common = {block for block, count in often.items() if count > max(2, len(lines) // COMMON)}
        self.requests = [
            Recorded(*fields, next((block for block in fields[3] if block not in self.common), -1)) for fields in lines
        ]

    def arrivals(self, share: float, seconds: float) -> Iterator[Arrival]:
        """The requests of the first `seconds`. `share`: how much of the traffic, by conversations: below 1 some are
        left out, above 1 all come again with ids of their own, where only the instructions are the same."""
        whole, part = divmod(share, 1.0)
        seen: set[bytes] = set()
        for line in self.requests:
            if line.seconds >= seconds:
                return
            for copy in range(int(whole) + (_fraction(line.conversation) < part)):
                keys = self._keys(line, copy)
                repeated = next((n for n, key in enumerate(keys) if key not in seen), len(keys))
                seen.update(keys)
                session = hash((line.conversation, copy))
                yield line.seconds, iter([Request(session, keys, keys, max(1, line.reply), repeated, iter(()))])

    def _keys(self, line: Recorded, copy: int) -> list[bytes]:
        found = []
        for block in line.blocks:
            name = b"%d" % block if block in self.common else b"%d+%d" % (copy, block)
            found += [b"%s-%d" % (name, n) for n in range(self._spread)]
        return found[: line.prompt // TOKENS]


def _fraction(conversation: int) -> float:
    """A number from 0 to 1 that is always the same for a conversation."""
    return int.from_bytes(hashlib.sha256(b"%d" % conversation).digest()[:4]) / 2**32
