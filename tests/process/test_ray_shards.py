"""A replica with a shard in another actor, under Ray: same replies, and they live and die together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import luce
from tests.support.daemons import within
from tests.support.ray_cluster import MODEL, RayCluster, command_of, gone, ray_cluster

pytestmark = pytest.mark.ray

BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    with ray_cluster(folder, replicas=1, devices=2, replica='shards = ["cpu"]') as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> str:
    with luce.load(MODEL, target_device="cpu:0", threads=1, kv_cache_dir="off") as model:
        return "".join(token.text for token in model.generate("Once upon a time", max_tokens=24, temperature=0.0))


def text(cluster: RayCluster) -> str:
    status, reply = cluster.post("/v1/completions", BODY)
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


@pytest.mark.parametrize("which", ["child", "shard", "actor"])
def test_the_parts_of_a_replica_die_together_and_the_next_life_replies_the_same(
    cluster: RayCluster, expected: str, which: str
) -> None:
    (child,), (shard,) = cluster.children(), cluster.processes("luce", "shard")
    address = command_of(child)[command_of(child).index("--target-devices") + 1]
    actor = int(Path(f"/proc/{shard.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"child": child.pid, "shard": shard.pid, "actor": actor}[which], signal.SIGKILL)
    assert within(60, lambda: gone([child, shard]))
    cluster.until_healthy()
    assert text(cluster) == expected
    (child,) = cluster.children()
    assert command_of(child)[command_of(child).index("--target-devices") + 1] != address
