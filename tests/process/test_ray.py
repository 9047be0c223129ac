"""Copies of a model under Ray: replies, routing, clients that leave, losses, updates, and what stays behind."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import luce
from tests.support.daemons import within
from tests.support.ray_cluster import MODEL, RayCluster, gone, ray_cluster

pytestmark = pytest.mark.ray

LONG = {"prompt": "Once upon a time", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), replicas=2, devices=3) as found:
        yield found


class Conversation:
    """A conversation with prompts that begin like no other's."""

    def __init__(self, cluster: RayCluster, number: int) -> None:
        draw = random.Random(number)
        self._cluster, self._words = cluster, [f"{draw.choice('abcdefgh')}{draw.randrange(100)}" for _ in range(600)]
        self._messages = [{"role": "system", "content": " ".join(self._words[:120])}]
        self._turn = self._before = 0
        #: prompt tokens of earlier turns that are sent again, and how many of them were cached
        self.repeated = self.cached = 0

    def turn(self) -> None:
        begin = 120 + 60 * self._turn
        self._messages.append({"role": "user", "content": " ".join(self._words[begin : begin + 60])})
        body = {"messages": self._messages, "max_tokens": 8 + self._turn, "temperature": 0}
        status, reply = self._cluster.post("/v1/chat/completions", body)
        assert status == 200, reply
        usage = reply["usage"]
        self.repeated += self._before
        self.cached += min(usage["prompt_tokens_details"]["cached_tokens"], self._before)
        self._turn, self._before = self._turn + 1, usage["prompt_tokens"]
        self._messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


def cached_share(cluster: RayCluster, seed: int) -> float:
    """Of 16 conversations of 4 turns, four requests at a time in random order."""
    conversations, draw = [Conversation(cluster, 1000 * seed + number) for number in range(16)], random.Random(seed)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            draw.shuffle(conversations)
            list(threads.map(Conversation.turn, conversations))
    return sum(each.cached for each in conversations) / sum(each.repeated for each in conversations)


def events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def text_of(cluster: RayCluster, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The text of a streamed completion, and its errors."""
    text, errors = "", []
    with cluster.open("/v1/completions", body) as response:
        for event in events(response):
            if "error" in event:
                errors.append(event["error"]["code"])
            else:
                text += event["choices"][0]["text"]
    return text, errors


def test_replies_are_those_of_a_model_without_ray(cluster: RayCluster) -> None:
    with luce.load(MODEL, target_device="cpu:0", threads=1, kv_cache_dir="off") as model:
        expected = "".join(token.text for token in model.generate("Once upon a time", max_tokens=40, temperature=0.0))
    assert text_of(cluster, {**LONG, "max_tokens": 40, "ignore_eos": False}) == (expected, [])
    body = {**LONG, "stream": False, "max_tokens": 40, "ignore_eos": False}
    assert cluster.post("/v1/completions", body)[1]["choices"][0]["text"] == expected
    status, error = cluster.post("/v1/completions", {"prompt": 3})
    assert status == 400 and error["error"]["param"] == "prompt"
    assert cluster.post("/v1/cache/keys?path=/v1/completions", {"prompt": "a"})[0] == 403
    assert cluster.post("/nothing", {})[0] == 404


def test_conversations_stay_with_the_replica_that_has_them_cached(cluster: RayCluster) -> None:
    assert cached_share(cluster, 1) >= 0.9
    # Both replicas have worked.
    assert all(each["blocks"] > 50 for each in cluster.status()["replicas"])


def test_a_client_that_leaves_ends_the_work_of_the_child(cluster: RayCluster) -> None:
    with cluster.open("/v1/completions", {**LONG, "n": 8}) as response:
        assert next(events(response))
        assert not left(cluster)
    assert within(60, lambda: left(cluster))


def left(cluster: RayCluster) -> bool:
    """Whether a child has noted a client that left its completion; requests without prompts go to each in turn."""
    found = []
    for _ in range(4):
        with cluster.open("/metrics", None) as response:
            found += [line for line in response.read().decode().splitlines() if "/v1/completions" in line]
    return any('"499"' in line for line in found)


def test_what_no_node_can_hold_is_said_and_changes_nothing(cluster: RayCluster) -> None:
    before = cluster.children()
    cluster.write(replica='devices = ["cuda"]')
    done = cluster.luce("up")
    cluster.write()
    assert done.returncode == 3 and "no node has 1 CPU, 1 luce_cuda" in done.stderr
    assert cluster.children() == before and cluster.healthy()


def test_a_child_that_ends_ends_its_replica_and_another_one_comes(cluster: RayCluster) -> None:
    before = cluster.children()
    with cluster.open("/v1/completions", LONG) as response:
        stream = events(response)
        assert next(stream)
        for child in before:
            os.kill(child.pid, signal.SIGKILL)
        assert [event["error"]["code"] for event in stream if "error" in event] == ["replica_lost"]
    assert within(60, lambda: gone(before))
    # A request in between waits for a replica, or is refused with a time to come again.
    cluster.until_healthy()
    assert len(cluster.children()) == 2 and cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_an_update_fails_and_cuts_no_request(cluster: RayCluster) -> None:
    before, ended = cluster.children(), threading.Event()
    body = {**LONG, "max_tokens": 60}
    expected, results = text_of(cluster, body), list[tuple[str, list[str]]]()

    def load() -> None:
        while not ended.is_set():
            results.append(text_of(cluster, body))

    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load) for _ in range(2)]
        try:
            cluster.write("--max-n", "7")
            cluster.up(3)
        finally:
            ended.set()
        for each in loads:
            each.result()
    assert gone(before) and len(cluster.children()) == 2
    assert len(results) > 4 and set(map(str, results)) == {str(expected)}


def test_nothing_of_a_node_outlives_its_raylet(cluster: RayCluster) -> None:
    # The last test of this cluster.
    children = cluster.children()
    workers = [each for each in cluster.processes() if each not in children]
    (raylet,) = [each for each in workers if raylet_of(each)]
    os.kill(raylet.pid, signal.SIGKILL)
    assert within(60, lambda: gone(children))


def raylet_of(process: Any) -> bool:
    with open(f"/proc/{process.pid}/comm") as name:
        return name.read().strip() == "raylet"
