"""Conversations with copies of a model under Ray, and how much of them comes from the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.ray_cluster import RayCluster


class Conversation:
    """A conversation with prompts that begin like no other's."""

    def __init__(self, cluster: RayCluster, number: int) -> None:
        draw = random.Random(number)
        self._cluster, self._words = cluster, [f"{draw.choice('abcdefgh')}{draw.randrange(100)}" for _ in range(600)]
        self.beginning = " ".join(self._words[:120])
        self._messages = [{"role": "system", "content": self.beginning}]
        self._turn = 0
        #: tokens of the turns' prompts
        self.prompts: list[int] = []
        #: prompt tokens of earlier turns that are sent again, and how many of them were cached
        self.repeated = self.cached = 0

    def turn(self) -> None:
        begin = 120 + 60 * self._turn
        self._messages.append({"role": "user", "content": " ".join(self._words[begin : begin + 60])})
        body = {"messages": self._messages, "max_tokens": 8 + self._turn, "temperature": 0}
        status, reply = self._cluster.post("/v1/chat/completions", body)
        assert status == 200, reply
        usage = reply["usage"]
        before = self.prompts[-1] if self.prompts else 0
        self.repeated += before
        self.cached += min(usage["prompt_tokens_details"]["cached_tokens"], before)
        self.prompts.append(usage["prompt_tokens"])
        self._turn += 1
        self._messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


def held(cluster: RayCluster, seed: int) -> list[Conversation]:
    """16 conversations of 4 turns, four requests at a time in random order."""
    conversations, draw = [Conversation(cluster, 1000 * seed + number) for number in range(16)], random.Random(seed)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            draw.shuffle(conversations)
            list(threads.map(Conversation.turn, conversations))
    return conversations


def cached_share(conversations: Sequence[Conversation]) -> float:
    """How much of what was sent again came from a prefix cache."""
    return sum(each.cached for each in conversations) / sum(each.repeated for each in conversations)


def share_by_chance(conversations: Sequence[Conversation], replicas: int) -> float:
    """The share to expect where each turn goes to any replica, and none forgets anything: the longest that turn k finds
    is the prompt of turn k - i, the last one that its replica had, with probability 1/R (1 - 1/R)^(i - 1)."""
    found = sum(
        sum(before / replicas * (1 - 1 / replicas) ** ago for ago, before in enumerate(reversed(each.prompts[:turn])))
        for each in conversations
        for turn in range(1, len(each.prompts))
    )
    return found / sum(each.repeated for each in conversations)
