"""Daemons that a server of a cluster reaches by address, beside members that have joined."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster_processes import EXPECTED, REFERENCE, ask, greedy, member_of, serve, starting
from tests.support.daemons import key_file, within
from tools.listening_daemon import listener


def test_a_daemon_by_address_stands_beside_a_member(tmp_path: Path) -> None:
    key = key_file(tmp_path / "key")
    with listener(REFERENCE.path, key) as (daemon, _), starting(tmp_path) as start:
        device = f"tcp://127.0.0.1:{daemon}/cpu:0"
        server, port = serve(start, "--devices", device, "--shard-key-file", str(key))
        models = tmp_path / "models"
        models.mkdir()
        (models / "model.gguf").symlink_to(REFERENCE.path)
        invited = server.found(r"luce join (\S+)")
        member = start("member", "join", invited, "--model-dir", str(models), "--devices", "cpu:0")
        assert within(200, lambda: ask(port, "/health")[0] == 200), (server.log, member.log)
        shards = ask(port, "/props")[1]["runtime"]["target_sharding"]
        assert [shard["device"] for shard in shards] == ["cpu:0", device, f"member://{member_of(start)['name']}/cpu:0"]
        assert greedy(port) == EXPECTED
