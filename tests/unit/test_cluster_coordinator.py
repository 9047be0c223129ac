"""A coordinator and hosts on the loopback interface: members, placements, keys and commands."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from luce import __version__
from luce.cluster import member as member_module
from luce.cluster import wire
from luce.cluster.admin import TRUST, answering, ask
from luce.cluster.cluster_status import ModelFacts, place_of
from luce.cluster.coordinator import Coordinator
from luce.cluster.gate import member_name
from luce.cluster.join_token import decode_token
from luce.cluster.member import MemberHost, delays
from luce.cluster.member_weights import Storage
from luce.errors import DeviceError, ListenError, ServerError, UsageError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc import tcp
from luce.ipc.supervisor import Peer
from luce.runtime.host import host_memory
from tests.support.cluster_fixtures import Make, folder, home, hosts
from tests.support.clusters import MODEL, Host, coordinator, port_of
from tests.support.daemons import within

__all__ = ["folder", "home", "hosts"]
Patch = pytest.MonkeyPatch


def state(made: Coordinator, name: str = "box") -> str:
    """The state of a member, "" if there is none."""
    return next((member.state for member in made.status().members if member.name == name), "")


def test_a_host_joins_and_its_devices_are_connected(home: Coordinator, folder: Path, hosts: Make) -> None:
    host = hosts(home)
    (host.folder / "another-name.gguf").symlink_to(MODEL)
    assert state(home) == "joining"
    host.start()
    assert home.wait_for_members(1, 30) == 1 and state(home) == "idle"
    with open_gguf(MODEL) as file:
        devices, connects = home.plan(fingerprint(file))
    assert devices == ["member://box/cpu:0"] and list(connects) == [place_of("box")]
    peer = connects[place_of("box")]("shard 1")
    with peer.requests, peer.heartbeat:
        peer.requests.sendall(b"x")
        assert peer.requests.recv(1) == b"x"
        assert within(10, lambda: state(home) == "serving") and host.served == [host.folder / "another-name.gguf"]
        (member,) = home.status().members
        assert (member.file, member.devices, member.luce, member.losses) == ("own", ("cpu:0",), __version__, 0)
        home.remove("box")
        # Out within a second: its connections end, and it cannot come back.
        peer.requests.settimeout(1)
        assert peer.requests.recv(1) == b""
    assert str(host.end()) == "the coordinator has dismissed this machine: removed"
    assert str(host.start().end()) == "the coordinator does not know this machine: join with a new token"
    assert home.status().members == ()


def test_a_member_without_the_file_is_not_used(home: Coordinator, folder: Path, hosts: Make) -> None:
    host = hosts(home).start()
    assert home.wait_for_members(1, 30) == 1
    assert home.plan("0" * 32) == ([], {})
    (member,) = home.status().members
    assert (member.state, member.file) == ("idle", "absent")
    why = f"no model file with fingerprint {'0' * 32} (looked at: {host.folder}), and the server sends none"
    assert member.reason == why


def connect(made: Coordinator, host: Host) -> Peer:
    """A connection to the devices of a host that has started."""
    (host.folder / "model.gguf").symlink_to(MODEL)
    assert made.wait_for_members(1, 30) == 1
    with open_gguf(MODEL) as file:
        _, connects = made.plan(fingerprint(file))
    return connects[place_of("box")]("shard 1")


def test_a_member_that_does_not_connect_is_lost_before_it_has_been_silent_for_long(
    home: Coordinator, hosts: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, find, release, calls = hosts(home).start(), Storage.find, threading.Event(), list[str]()

    def slow(self: Storage, fingerprint: str, streams: bool) -> Any:
        calls.append(fingerprint)
        # First it is asked whether it has the file.
        assert len(calls) == 1 or release.wait(30)
        return find(self, fingerprint, streams)

    assert home.wait_for_members(1, 30) == 1
    monkeypatch.setattr(Storage, "find", slow)
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1.0)
    with pytest.raises(DeviceError, match=r"^shard 1: member box: it does not connect$"):
        connect(home, host)
    # So a load that has failed by it begins again without it.
    assert home.broken(0.0) == (frozenset(), frozenset({"box"}))
    assert home.status().members[0].losses == 1
    release.set()
    assert home.wait_for_members(1, 30) == 1


def test_a_new_placement_ends_the_connections_of_the_last(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    peer = connect(home, host)
    with peer.requests, peer.heartbeat:
        home.plan("0" * 32)
        peer.requests.settimeout(10)
        assert peer.requests.recv(1) == b"" and home.status().epoch == 2


def test_devices_without_layers_are_let_go(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    peer = connect(home, host)
    with peer.requests, peer.heartbeat:
        home.keep({"member://box/cpu:0": range(2, 4)})
        assert home.status().members[0].layers == ("2..3",)
        assert state(home) in ("loading", "serving")
        home.keep({})
        assert home.status().members[0].layers == ()
        peer.requests.settimeout(10)
        assert peer.requests.recv(1) == b"" and state(home) == "idle"


def test_weights_are_held_until_the_next_placement_does_without_them(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    peer = connect(home, host)
    with peer.requests, peer.heartbeat:
        home.keep({"member://box/cpu:0": range(2, 4)})
        # A placement that begins may need them.
        home.plan("0" * 32)
        peer.requests.settimeout(10)
        assert peer.requests.recv(1) == b"" and not host.released
        home.keep({})
        assert within(10, lambda: host.released == [1])
        home.unplaced()
        assert within(10, lambda: host.released == [1, 1])


def test_weights_are_freed_where_the_coordinator_is_lost(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    peer = connect(home, host)
    with peer.requests, peer.heartbeat:
        home.keep({"member://box/cpu:0": range(2, 4)})
        for link in list(home.links.values()):
            link.close()
        assert within(20, lambda: host.released == [1])


def test_the_log_says_which_placement_follows_which_and_why(home: Coordinator, hosts: Make, caplog: Any) -> None:
    hosts(home).start()
    assert home.wait_for_members(1, 30) == 1
    with caplog.at_level(logging.INFO, "luce.cluster"):
        for why, first in (("start", 3), ("command", 5)):
            home.plan("0" * 32, why=why)
            home.keep({"cpu:0": range(first), "member://box/cpu:0": range(first, 8)}, why)
    taken = [r.__dict__["fields"] for r in caplog.records if r.getMessage() == "plan taken"]
    old = "cpu:0 0..2, member://box/cpu:0 3..7"
    assert taken == [
        {"epoch": 1, "why": "start", "old": "none", "new": old},
        {"epoch": 2, "why": "command", "old": old, "new": "cpu:0 0..4, member://box/cpu:0 5..7"},
    ]
    assigned = [r.__dict__["fields"] for r in caplog.records if r.getMessage() == "member assigned"]
    assert assigned[1] == {"member": "box", "epoch": 2, "layers": "5..7"}
    assert home.status().replans == {"start": 1, "command": 1}


def test_the_status_has_what_the_member_and_the_server_know(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    total = host_memory().total
    assert within(30, lambda: bool(home.status().members[0].round_trip_ms))
    (member,) = home.status().members
    assert [memory.total for memory in member.memory] == [total] and member.bytes_per_second is None
    assert home.status().plan is None
    peer = connect(home, host)
    with peer.requests, peer.heartbeat:
        seen = wire.DeviceMemory(5, 9)
        plan = wire.PlanStatus((wire.StageStatus("member://box/cpu:0", "0..7"),))
        device = "member://box/cpu:0"
        home.model_facts = lambda: ModelFacts(plan, {device: seen, "cpu:0": seen}, {device: 125e6})
        assert within(30, lambda: state(home) == "serving")
        (member,) = home.status().members
        assert member.memory == (seen,) and member.bytes_per_second == 125e6 and home.status().plan is plan


def test_a_coordinator_that_starts_again_knows_its_members(hosts: Make) -> None:
    with coordinator() as first:
        port = port_of(first)
        host = hosts(first).start()
        assert first.wait_for_members(1, 30) == 1
        first.plan("0" * 32)
    with coordinator(port=port) as again:
        assert again.wait_for_members(1, 30) == 1 and again.status().epoch == 1
        again.remove("box")
        host.end()


def test_one_server_of_a_cluster(home: Coordinator) -> None:
    with pytest.raises(UsageError, match="another server of this cluster runs here"):
        Coordinator("home", "127.0.0.1:0")
    with pytest.raises(ListenError, match=rf"^--listen 127\.0\.0\.1:{port_of(home)}: "):
        Coordinator("other", f"127.0.0.1:{port_of(home)}")


def test_a_new_key_reaches_the_members_that_are_connected(hosts: Make) -> None:
    with coordinator() as first:
        port = port_of(first)
        host, away = (hosts(first, name) for name in ("box", "den"))
        host.start()
        assert first.wait_for_members(1, 30) == 1
        before = (first.files.path / "coordinator.pem").read_bytes()
        assert first.rotate() == (["box"], ["den"])
        assert (first.files.path / "coordinator.pem").read_bytes() != before
        # The connection goes on.
        assert state(first) == "idle"
    with coordinator(port=port) as again:
        assert again.wait_for_members(1, 30) == 1
        # Only the new key is pinned from then on.
        assert within(10, lambda: len(host.files.read("server.json", dict[str, list[str]])["certificates"]) == 1)
        assert "certificate verify failed" in str(_refusal(away))
        again.remove("box")
        host.end()


def _refusal(host: Host) -> OSError:
    """Why a host cannot connect."""
    server = host.files.read("server.json", dict[str, list[Any]])
    assert server is not None
    certificates = msgspec.convert(server["certificates"], list[bytes], strict=False)
    pinned = member_module.PinnedCoordinator.of(host.files.identity("member.pem"), certificates)
    with pytest.raises(OSError) as caught:
        tcp.connect(server["addresses"][0], pinned, wire.CONTROL + bytes(16))
    return caught.value


def test_another_version_is_not_used_and_is_told_so(
    home: Coordinator, hosts: Make, monkeypatch: Patch, caplog: Any
) -> None:
    monkeypatch.setattr(member_module, "__version__", "99.0")
    hosts(home).start()
    why = f"version 99.0, here {__version__}"
    assert within(30, lambda: f"the coordinator says: this machine is not used: {why}" in caplog.text)
    assert home.wait_for_members(1, 0) == 0
    assert [(member.state, member.reason) for member in home.status().members] == [("idle", why)]


def test_one_process_is_a_member(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
    assert home.wait_for_members(1, 30) == 1
    second = MemberHost(host.files, ("cpu:0",), Storage(), lambda *arguments: None)
    with pytest.raises(UsageError, match=r"^cluster home: another luce join of this cluster runs here$"):
        second.run()
    assert state(home) == "idle"


def test_delays_between_attempts() -> None:
    exact, low = delays(lambda least, most: 1.0), delays(lambda least, most: least)
    assert [next(exact) for _ in range(6)] == [0, 1, 2, 4, 4, 4]
    assert [next(low) for _ in range(3)] == [0, 0.8, 1.6]


def test_a_placement_without_a_lost_member_is_not_wanted_any_more_once_it_is_back(hosts: Make) -> None:
    with coordinator(patience=0.0) as home:
        host = hosts(home)
        (host.folder / "model.gguf").symlink_to(MODEL)
        host.start()
        assert home.wait_for_members(1, 30) == 1
        with open_gguf(MODEL) as file:
            home.plan(fingerprint(file))
        home.keep({"member://box/cpu:0": range(1)})
        assert home.placed == home.present == {"box"} and home.idle == {}
        assert host.host is not None
        host.host.stop()
        host.end()
        assert within(30, lambda: home.wanted == "loss")
        assert home.present == frozenset()
        host.start()
        assert within(30, lambda: state(home) == "loading") and home.take_wanted(0) == ""
        home.want("command")
        assert home.take_wanted(0) == "command" and home.take_wanted(0) == ""


def test_what_is_wanted_while_a_model_finds_no_place(home: Coordinator, hosts: Make) -> None:
    for wanted, still in (("command", "command"), ("leave", "")):
        home.plan("0" * 32)
        home.want(wanted)
        home.unplaced()
        assert home.take_wanted(0) == still
    # A member that has come since the placement was planned.
    home.plan("0" * 32)
    hosts(home).start()
    assert home.wait_for_members(1, 30) == 1
    home.unplaced()
    assert home.take_wanted(0) == "back"


def test_a_host_that_leaves_as_its_connection_ends_is_gone(home: Coordinator, hosts: Make) -> None:
    host, left = hosts(home), threading.Event()
    host.patience = 3600.0

    class Leaving(logging.Handler):
        """Lets it leave as soon as it says that the connection has ended."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "coordinator lost" and host.host is not None:
                host.host.leave()
                left.set()

    host.start()
    assert home.wait_for_members(1, 30) == 1
    handler, log = Leaving(), logging.getLogger("luce.cluster")
    log.addHandler(handler)
    try:
        for link in list(home.links.values()):
            link.close()
        assert left.wait(30) and host.end() is None
    finally:
        log.removeHandler(handler)


def test_drain_by_command(home: Coordinator, hosts: Make) -> None:
    host = hosts(home)
    # Cut off before it is dismissed, it would be lost.
    host.patience = 30.0
    host.start()
    assert home.wait_for_members(1, 30) == 1
    with answering(home, lambda: None):
        assert ask(home.files, wire.AskDrain("box")) == wire.Done("box leaves once other machines have its layers")
        assert host.end() is None and within(10, lambda: state(home) == "gone")
        missing = r"^box: no such member is connected; those that are: none$"
        with pytest.raises(ServerError, match=missing):
            ask(home.files, wire.AskDrain("box"))


def test_commands(home: Coordinator, hosts: Make) -> None:
    asked: list[str] = []
    with answering(home, lambda: asked.append("replan")):
        socket_path = home.files.path / "socket"
        assert socket_path.stat().st_mode & 0o777 == 0o600
        token = ask(home.files, wire.AskToken(60, "attic"))
        assert isinstance(token, wire.Done) and TRUST in token.text
        assert decode_token(token.text.split()[2]).cluster == "home"
        status = ask(home.files, wire.AskStatus())
        assert isinstance(status, wire.Status) and (status.open_tokens, status.members) == (1, ())
        with pytest.raises(ServerError, match=r"^den: no such member; the members: there are none$"):
            ask(home.files, wire.AskRemove("den"))
        host = hosts(home).start()
        assert home.wait_for_members(1, 30) == 1
        rotated = ask(home.files, wire.AskRotate())
        assert isinstance(rotated, wire.Done) and rotated.text == "the coordinator has a new key, which box has"
        assert ask(home.files, wire.AskRemove(member_name("box"))) == wire.Done("box is removed")
        host.end()
        replanned = ask(home.files, wire.AskReplan())
        assert isinstance(replanned, wire.Done) and "is placed anew" in replanned.text and asked == ["replan"]
    assert not socket_path.exists()
    with pytest.raises(ServerError, match=r"^cluster home: no server of it runs on this machine$"):
        ask(home.files, wire.AskStatus())
