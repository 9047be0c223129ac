"""What clients see of a server's cluster: GET /cluster and the metrics."""

from __future__ import annotations

from pathlib import Path

import msgspec

from luce.cluster.cluster_status import member_status
from luce.cluster.membership import Member
from luce.cluster.wire import MemberStatus, Status
from tests.support.http_server import running
from tests.support.key_files import write_keys


def member(name: str, state: str, trip: float | None) -> MemberStatus:
    shown = member_status(Member(name, b"", "", "idle", 0.0), 1.0, None, (), None, None)
    return msgspec.structs.replace(shown, state=state, round_trip_ms=trip)


def status() -> Status:
    members = (member("box", "serving", 2.0), member("den", "lost", None), member("attic", "serving", 0.5))
    return Status("home", ("10.0.0.1:7443",), 7, 1, 4096, {"start": 1, "loss": 2}, members)


async def test_the_cluster_is_for_admins(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "guest\nroot:root:admin\n")
    async with running(cluster=status, api_key_file=keys) as here:
        assert (await here.get("/cluster"))[0] == 401
        for key, expected in (("guest", 403), ("root", 200)):
            code, body, _ = await here.get("/cluster", headers={"Authorization": f"Bearer {key}"})
            assert code == expected
        assert msgspec.convert(body, Status) == status()


async def test_a_server_without_a_cluster() -> None:
    async with running() as here:
        code, body, _ = await here.get("/cluster")
        assert (code, body["error"]["code"]) == (404, "no_cluster")
        assert "luce_cluster" not in (await here.get("/metrics"))[1]


async def test_the_metrics_of_a_cluster() -> None:
    async with running(cluster=status) as here:
        lines = (await here.get("/metrics"))[1].splitlines()
    assert {
        'luce_cluster_members{state="serving"} 2.0',
        'luce_cluster_members{state="lost"} 1.0',
        'luce_cluster_members{state="idle"} 0.0',
        'luce_member_up{member="box"} 1.0',
        'luce_member_up{member="den"} 0.0',
        'luce_member_rtt_seconds{member="box"} 0.002',
        "luce_cluster_epoch 7.0",
        'luce_replans_total{reason="loss"} 2.0',
        "luce_weights_streamed_bytes_total 4096.0",
    } <= set(lines)
    assert not any(line.startswith('luce_member_rtt_seconds{member="den"') for line in lines)
