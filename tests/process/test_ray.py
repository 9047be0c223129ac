"""Copies of a model under Ray: replies, shards, routing, losses, updates, scaling, and what stays behind.

One cluster on one machine, whose application changes from test to test: they run in their order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import luce
from tests.support.daemons import within
from tests.support.key_files import write_keys
from tests.support.ray_cluster import (
    MODEL,
    PYTHON,
    SECONDS,
    RayCluster,
    command_of,
    events,
    gone,
    ray_cluster,
    streamed,
)
from tests.support.ray_conversations import Conversation, cached_share, held

pytestmark = pytest.mark.ray

SHORT = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
LONG = {"prompt": "Once upon a time", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three devices, and at first a replica with a shard."""
    folder = tmp_path_factory.mktemp("ray")
    disk = ("--kv-cache-dir", str(folder / "prefixes"), "--max-body-mib", "1")
    with ray_cluster(folder, replicas=1, devices=3, replica='shards = ["cpu"]', flags=disk) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    """The reply of a model without Ray."""
    with luce.load(MODEL, target_device="cpu:0", threads=1, kv_cache_dir="off") as model:
        return "".join(token.text for token in model.generate("Once upon a time", max_tokens=40, temperature=0.0))


@pytest.fixture(scope="module")
def copies(cluster: RayCluster) -> RayCluster:
    """The same cluster with two copies, and an API key for clients."""
    cluster.api_key = "the clients' kéy"
    cluster.change(2)
    return cluster


def text(cluster: RayCluster) -> str:
    status, reply = cluster.post("/v1/completions", SHORT)
    assert status == 200, reply
    return str(reply["choices"][0]["text"])


def test_a_model_over_two_actors_replies_as_in_one_process(cluster: RayCluster, expected: str) -> None:
    (child,) = cluster.children()
    (shard,) = cluster.processes("luce", "shard")
    words = command_of(child)
    first, second = words[words.index("--target-devices") + 1].split(",")
    assert second.startswith("tcp://") and first != second.rpartition("/")[2]
    assert text(cluster) == expected
    # The pair of this life is with the server alone by now.
    key = Path(words[words.index("--shard-key-file") + 1])
    assert key.stat().st_mode & 0o077 == 0 and key.parent.stat().st_mode & 0o077 == 0
    other = command_of(shard)
    assert not Path(other[other.index("--key-file") + 1]).exists()
    found = cluster.status()
    (replica,), (node,) = found["replicas"], found["nodes"]
    assert replica["devices"] == [first, second] and second.startswith(f"tcp://{node['address']}:")
    assert (replica["node"], replica["luce"], found["differences"]) == (node["address"], luce.__version__, [])


def test_no_command_line_and_no_log_has_a_secret(cluster: RayCluster) -> None:
    (child,) = cluster.children()
    words = command_of(child)
    keys, pair = (Path(words[words.index(flag) + 1]).read_text() for flag in ("--api-key-file", "--shard-key-file"))
    environment = Path(f"/proc/{child.pid}/environ").read_text().split("\0")
    (admin,) = (each.partition("=")[2] for each in environment if each.startswith("LUCE_API_KEY="))
    secrets = [admin, keys.strip().partition(":")[2], pair.splitlines()[1], cluster.token()]
    assert all(len(each) > 30 for each in secrets)
    text(cluster)
    (folder,) = cluster.state.glob("luce/ray/*/folder")
    logs = [path for path in Path(folder.read_text()).glob("session_2*/logs/**/*") if path.is_file()]
    assert any("replica" in path.name for path in logs)
    said = [path.read_text(errors="replace") for path in logs] + [cluster.node_log()]
    said += [" ".join(command_of(each)) for each in cluster.processes()]
    assert any("--api-key-file" in each for each in said)
    assert not [each for each in said if any(secret in each for secret in secrets)]


def test_ray_lets_in_nobody_without_its_token_and_tells_nobody_of_its_use(cluster: RayCluster, tmp_path: Path) -> None:
    other = write_keys(tmp_path / "other", "0" * 64)
    answers = {file: stored(cluster, file) for file in (cluster.folder / "data" / "luce" / "ray-token", other, None)}
    assert [done.returncode for done in answers.values()] == [0, 1, 1]
    assert all("InvalidAuthToken" in answers[file].stderr for file in (other, None))
    own = [each for each in cluster.processes() if {"raylet", "gcs_server"} & {Path(command_of(each)[0]).name}]
    assert len(own) == 2
    for each in own:
        environment = Path(f"/proc/{each.pid}/environ").read_text().split("\0")
        assert {"RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"} <= set(environment)


def stored(cluster: RayCluster, token: Path | None) -> subprocess.CompletedProcess[str]:
    """A question to the control store with a token of this file, or with none."""
    program = "import sys; from ray._raylet import GcsClient; GcsClient(sys.argv[1]).internal_kv_keys(b'', timeout=20)"
    told = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return subprocess.run(
        [PYTHON, "-c", program, f"{cluster.address}:{cluster.head_port}"],
        env={**os.environ, "RAY_AUTH_MODE": "disabled", **told},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("which", ["child", "shard", "actor"])
def test_the_parts_of_a_replica_die_together_and_the_next_life_replies_the_same(
    cluster: RayCluster, expected: str, which: str
) -> None:
    (child,), (shard,) = cluster.children(), cluster.processes("luce", "shard")
    words = command_of(child)
    address, key = (words[words.index(flag) + 1] for flag in ("--target-devices", "--shard-key-file"))
    actor = int(Path(f"/proc/{shard.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"child": child.pid, "shard": shard.pid, "actor": actor}[which], signal.SIGKILL)
    assert within(60, lambda: gone([child, shard]))
    cluster.until_healthy()
    assert text(cluster) == expected
    (child,) = cluster.children()
    words = command_of(child)
    assert words[words.index("--target-devices") + 1] != address
    # The keys of a life that ended without a chance to remove them go with the next one.
    assert not Path(key).exists() and Path(words[words.index("--shard-key-file") + 1]).exists()


def test_replies_are_those_of_a_model_without_ray(copies: RayCluster, expected: str) -> None:
    cluster = copies
    assert streamed(cluster, {**SHORT, "stream": True}) == (expected, [])
    assert text(cluster) == expected
    status, error = cluster.post("/v1/completions", {"prompt": 3})
    assert status == 400 and error["error"]["param"] == "prompt"
    assert cluster.post("/v1/cache/keys?path=/v1/completions", {"prompt": "a"})[0] == 403
    assert cluster.post("/nothing", {})[0] == 404
    # A name with a slash, or of dots, is no other path.
    for name, code in (("a%2Fb", "response_not_found"), ("%2E%2E", "response_not_found"), ("a/b", "unknown_endpoint")):
        status, error = cluster.post(f"/v1/responses/{name}", None)
        assert (status, error["error"]["code"]) == (404, code), error
    # No more of a body is held than a replica would take.
    status, error = cluster.post("/v1/completions", {"prompt": "a" * (1 << 20)})
    assert (status, error["error"]["code"]) == (413, "request_too_large")


def test_nothing_is_computed_for_a_request_without_the_key(copies: RayCluster) -> None:
    before = keys_asked(copies)
    for key in ("", "another key"):
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, error = copies.post(path, SHORT, key)
            assert (status, error["error"]["code"]) == (401, "invalid_api_key")
    assert keys_asked(copies) == before
    text(copies)
    assert keys_asked(copies) == before + 1


def keys_asked(cluster: RayCluster) -> float:
    """How often the children were asked for the keys of a prompt."""
    lines = [line for line in metrics(cluster) if line.startswith("luce_requests_total{") and "/v1/cache/keys" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def metrics(cluster: RayCluster) -> list[str]:
    """The lines of both children; requests without prompts go to each in turn."""
    found = []
    for _ in range(2):
        with cluster.open("/metrics", None) as response:
            found += response.read().decode().splitlines()
    return found


def test_conversations_stay_with_the_replica_that_has_them_cached(copies: RayCluster) -> None:
    assert cached_share(held(copies, 1)) >= 0.9
    # Both replicas have worked.
    assert all(each["blocks"] > 50 for each in copies.status()["replicas"])


def test_requests_with_the_same_beginning_queue_up_at_no_single_replica(copies: RayCluster) -> None:
    body = {**LONG, "prompt": Conversation(copies, 7).beginning, "max_tokens": 200, "stream": False}
    ended, replies, seen = threading.Event(), list[int](), list[list[int]]()

    def load() -> None:
        while not ended.is_set():
            replies.append(copies.post("/v1/completions", body)[0])

    # Sixteen are under way whenever the replicas are looked at, however long that takes. The first ones rightly prefer
    # the replica that has the beginning.
    with ThreadPoolExecutor(16) as threads:
        loads = [threads.submit(load) for _ in range(16)]
        try:
            assert within(SECONDS, lambda: len(replies) >= 16)
            while len(seen) < 3:
                counts = sorted(each["requests"] for each in copies.status().get("replicas", ()))
                seen += [counts] if sum(counts) > 8 else []
        finally:
            ended.set()
        for each in loads:
            each.result()
    assert set(replies) == {200}
    print(f"\nrequests at each replica: {seen}")
    assert all(most <= 2 * least for least, most in seen)


def test_a_client_that_leaves_ends_the_work_of_the_child(copies: RayCluster) -> None:
    with copies.open("/v1/completions", {**LONG, "n": 8}) as response:
        assert next(events(response))
        assert not left(copies)
    began = time.monotonic()
    assert within(60, lambda: left(copies))
    print(f"\nthe work for a client that left ended within {time.monotonic() - began:.2f} s")


def left(cluster: RayCluster) -> bool:
    """Whether a child has noted a client that left its completion."""
    return any("/v1/completions" in line and '"499"' in line for line in metrics(cluster))


def test_what_no_node_can_hold_is_said_and_changes_nothing(copies: RayCluster) -> None:
    cluster = copies
    before = cluster.children()
    cluster.write(replica='devices = ["cuda"]')
    done = cluster.luce("up")
    cluster.write()
    assert done.returncode == 3 and "no node has 1 luce_cuda" in done.stderr
    assert cluster.children() == before and cluster.healthy()


def test_a_child_that_ends_ends_its_replica_and_another_one_comes(copies: RayCluster) -> None:
    cluster = copies
    before, body = cluster.children(), {**LONG, "max_tokens": 1200}
    expected = streamed(cluster, body)
    with cluster.open("/v1/completions", body) as response:
        stream = events(response)
        first = next(stream)
        for child in before:
            os.kill(child.pid, signal.SIGKILL)
        # The stream waits for the next replica, and goes on there, with no token lost and none twice.
        text = "".join(event["choices"][0]["text"] for event in [first, *stream])
        assert (text, list[str]()) == expected
    assert within(60, lambda: gone(before))
    cluster.until_healthy()
    assert len(cluster.children()) == 2 and cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


def test_an_update_fails_and_cuts_no_request(copies: RayCluster) -> None:
    cluster = copies
    before, ended = cluster.children(), threading.Event()
    body = {**LONG, "max_tokens": 60}
    expected, results = streamed(cluster, body), list[tuple[str, list[str]]]()
    running: list[int] = []
    assert cached(cluster, Conversation(cluster, 8)) == 0

    def load() -> None:
        while not ended.is_set():
            results.append(streamed(cluster, body))

    def look() -> None:
        # A question takes a core for seconds, and a replica that is replaced is away for longer than the pause.
        while not ended.wait(1):
            running.extend(cluster.running())

    with ThreadPoolExecutor(3) as threads:
        loads = [threads.submit(load) for _ in range(2)] + [threads.submit(look)]
        try:
            cluster.write("--max-n", "7")
            cluster.up(0)
        finally:
            ended.set()
        for each in loads:
            each.result()
    assert gone(before) and len(cluster.children()) == 2
    assert len(results) > 4 and set(map(str, results)) == {str(expected)}
    # There is a device for a third one: a new one serves before an old one drains.
    assert running and min(running) >= 2, running


def test_an_update_without_a_spare_device_replaces_one_replica_after_the_other(cluster: RayCluster) -> None:
    cluster.change(3)
    before, ended, running = cluster.children(), threading.Event(), list[int]()

    def look() -> None:
        # A question takes a core for seconds, and a replica that is replaced is away for longer than the pause.
        while not ended.wait(1):
            running.extend(cluster.running())

    with ThreadPoolExecutor(1) as threads:
        looks = threads.submit(look)
        try:
            cluster.write("--max-n", "6")
            cluster.up(0)
        finally:
            ended.set()
        looks.result()
    assert gone(before) and len(cluster.children()) == 3
    assert running and min(running) >= 2, running


def cached(cluster: RayCluster, conversation: Conversation) -> int:
    """How many tokens of a prompt come from a prefix cache; shorter ones are not kept on the disk."""
    reply = cluster.post("/v1/completions", {**SHORT, "prompt": 2 * conversation.beginning})[1]
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_replicas_come_and_go_with_the_load_and_no_stream_is_cut(cluster: RayCluster) -> None:
    conversation = Conversation(cluster, 8)
    cached(cluster, conversation)
    cluster.change(1, "parallel = 2\nupscale_delay = 1\ndownscale_delay = 2", most=3)
    # What replicas of an earlier configuration had cached is on the disk, for those that start later.
    assert cached(cluster, conversation) >= 256
    body = {**LONG, "max_tokens": 300}
    expected, results = streamed(cluster, body), list[tuple[str, list[str]]]()
    much, little = threading.Event(), threading.Event()

    def load(ended: threading.Event) -> None:
        while not ended.is_set():
            results.append(streamed(cluster, body))

    def whole() -> None:
        while not much.is_set():
            status, reply = cluster.post("/v1/completions", {**body, "stream": False})
            results.append((reply["choices"][0]["text"], []) if status == 200 else ("", [str(reply)]))

    # Tokens of many streams, each passed on alone, would leave no time for an answer of Ray's.
    with ThreadPoolExecutor(8) as threads:
        loads = [threads.submit(load, little), *(threads.submit(load, much) for _ in range(2))]
        loads += [threads.submit(whole) for _ in range(5)]
        try:
            assert within(SECONDS, lambda: cluster.runs(3))
            much.set()
            # One stream goes on: where its replica is the one to end, that one waits for it.
            assert within(SECONDS, lambda: cluster.runs(1))
        finally:
            much.set()
            little.set()
        for each in loads:
            each.result()
    assert len(cluster.children()) == 1
    assert len(results) > 8 and set(map(str, results)) == {str(expected)}


def test_nothing_of_a_node_outlives_its_raylet(cluster: RayCluster) -> None:
    # The last test of this cluster.
    children = cluster.children()
    workers = [each for each in cluster.processes() if each not in children]
    (raylet,) = [each for each in workers if raylet_of(each)]
    os.kill(raylet.pid, signal.SIGKILL)
    assert within(60, lambda: gone(children))
    # Ray notices as well, and ends what else there is.
    assert within(60, lambda: gone(workers))


def raylet_of(process: Any) -> bool:
    with open(f"/proc/{process.pid}/comm") as name:
        return name.read().strip() == "raylet"
