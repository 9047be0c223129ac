"""A coordinator and hosts on the loopback interface: who gets in, who does not, and what follows."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from luce import __version__
from luce.cluster import gate, wire
from luce.cluster import member as member_module
from luce.cluster.admin import TRUST, answering, ask
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.cluster_status import ModelFacts, place_of
from luce.cluster.coordinator import Coordinator
from luce.cluster.gate import member_name
from luce.cluster.identity import JOIN_PROTOCOL, Identity, coordinator_context, join_context, member_context
from luce.cluster.join_token import JoinToken, decode_token
from luce.cluster.member import MemberHost, delays, join
from luce.cluster.member_weights import Storage
from luce.errors import DeviceError, ListenError, ServerError, UsageError
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from luce.ipc import tcp
from luce.ipc.channel import Channel
from luce.ipc.supervisor import Peer
from luce.runtime.host import host_memory
from tests.support.clusters import MODEL, Host, coordinator, identity, joined, port_of
from tests.support.daemons import key_file, signed_key_file, within

Patch = pytest.MonkeyPatch
Make = Callable[..., Host]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Directories of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinator"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "REFUSAL_DELAY", 0.0)
    return tmp_path


@pytest.fixture
def hosts(folder: Path, monkeypatch: Patch) -> Iterator[Make]:
    """Makes hosts that have joined a coordinator; they leave at the end of the test."""
    made: list[Host] = []

    def make(coordinator: Coordinator, name: str = "box") -> Host:
        made.append(joined(coordinator, monkeypatch, folder, name))
        return made[-1]

    yield make
    for host in made:
        host.stop()


@pytest.fixture
def home(folder: Path) -> Iterator[Coordinator]:
    """A coordinator, which leaves no thread behind."""
    before = set(threading.enumerate())
    with coordinator() as made:
        yield made
    assert within(10, lambda: {t for t in set(threading.enumerate()) - before if t.name.startswith("luce")} == set())


def state(made: Coordinator, name: str = "box") -> str:
    """The state of a member, "" if there is none."""
    return next((member.state for member in made.status().members if member.name == name), "")


def sent(made: Coordinator, request: msgspec.Struct | bytes) -> object:
    """The answer to what a host that joins sends; None if the connection is closed."""
    plain = socket.create_connection(("127.0.0.1", port_of(made)), timeout=30)
    with join_context().wrap_socket(plain) as sock:
        if isinstance(request, bytes):
            sock.sendall(request)
            return sock.recv(1) or None
        channel: Channel[Any] = Channel(sock, wire.Joined | wire.Refused)
        channel.send(0, request, timeout=30)
        try:
            return channel.receive(timeout=30)[1]
        except Exception:
            return None


def request(token: JoinToken, own: bytes, **changes: Any) -> wire.Join:
    return msgspec.structs.replace(wire.Join(token.id, token.secret, own, __version__, "box"), **changes)


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


@pytest.mark.parametrize("what", ["secret", "id", "certificate", "authority", "several", "used", "expired"])
def test_tokens_that_let_nobody_in(what: str, home: Coordinator, folder: Path, caplog: Any, monkeypatch: Patch) -> None:
    token = decode_token(home.new_token(-1 if what == "expired" else 60))
    own, other = (identity(folder / name).certificate for name in ("own", "other"))
    changes: dict[str, Any] = {
        "secret": {"secret": b"?" * 16},
        "id": {"id": b"?" * 8},
        "certificate": {"certificate": b"none"},
        "several": {"certificate": own + other},
    }.get(what, {})
    if what == "used":
        assert isinstance(sent(home, request(token, other)), wire.Joined)
    if what == "authority":
        changes = {"certificate": ssl.PEM_cert_to_DER_cert(key_file(folder / "ca").with_suffix(".crt").read_text())}
    with caplog.at_level(logging.WARNING, "luce.cluster"):
        assert sent(home, request(token, own, **changes)) == wire.Refused()
    (refused,) = (record for record in caplog.records if record.getMessage() == "join refused")
    assert refused.fields["address"] == "127.0.0.1" and refused.fields["reason"]
    assert [member.name for member in home.status().members] == ["box"] * (what == "used")


def test_a_lost_answer_is_repeated_for_the_same_host_alone(home: Coordinator, folder: Path) -> None:
    token = decode_token(home.new_token(60))
    own, other = (identity(folder / name).certificate for name in ("own", "other"))
    for _ in range(2):
        assert sent(home, request(token, own)) == wire.Joined()
    assert sent(home, request(token, other)) == wire.Refused()
    assert len(home.status().members) == 1


def test_a_refused_host_learns_only_that_it_is_refused(home: Coordinator, folder: Path, monkeypatch: Patch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(gate.time, "sleep", waited.append)
    monkeypatch.setattr(gate, "REFUSAL_DELAY", 0.5)
    home.new_token(60)
    files = ClusterFiles("elsewhere")
    token = msgspec.structs.replace(decode_token(home.new_token(60)), secret=b"?" * 16)
    with pytest.raises(DeviceError, match=r"the token is refused; `luce cluster token` on that machine") as caught:
        join(token, files, "box")
    assert waited == [0.5] and caught.value.exit_code == 4


def test_who_guesses_is_not_listened_to(home: Coordinator, folder: Path) -> None:
    token = decode_token(home.new_token(60))
    own = identity(folder / "own").certificate
    for _ in range(5):
        assert sent(home, request(token, own, secret=b"?" * 16)) == wire.Refused()
    # Not even with the right secret.
    assert sent(home, request(token, own)) is None and home.status().members == ()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000), b"J" + bytes(16)])
def test_bytes_that_are_no_request(data: bytes, home: Coordinator, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1.0)
    # A connection that is closed with unread bytes is reset.
    with contextlib.suppress(OSError):
        assert sent(home, data) is None
    assert home.status().members == ()


def test_the_pin_is_compared_before_anything_is_sent(folder: Path, home: Coordinator) -> None:
    token = decode_token(home.new_token(60))
    impostor = identity(folder / "impostor")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor.path)
    context.set_alpn_protocols([JOIN_PROTOCOL])
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as sock:
                heard.append(sock.recv(1))

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        files = ClusterFiles("elsewhere")
        with pytest.raises(DeviceError, match=f"^{address}: somebody else answers there: key [0-9a-f]{{8}}, the token"):
            join(msgspec.structs.replace(token, addresses=(address,)), files, "box")
        thread.join()
    assert heard == [b""] and files.read("server.json", dict) is None


class Dialled:
    """The settings of a peer that checks nothing."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """Everybody is welcome."""


def closes(made: Coordinator, own: Identity, role: bytes, protocol: str = "luce/1") -> bool:
    """Whether the coordinator closes a connection of a host with this key."""
    context = member_context(own, [])
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    try:
        with tcp.connect(f"127.0.0.1:{port_of(made)}", Dialled(context), role + bytes(16)) as sock:
            sock.settimeout(30)
            return sock.recv(1) == b""
    except ssl.SSLError:
        return True


def test_strangers_get_nowhere(home: Coordinator, folder: Path, hosts: Make) -> None:
    stranger = identity(folder / "stranger")
    for role in (wire.CONTROL, b"R", b"W", b"?"):
        assert closes(home, stranger, role)
    # The key of another cluster's member is a stranger's here.
    with coordinator("other") as other:
        host = hosts(other)
        assert closes(home, host.files.identity("member.pem"), wire.CONTROL)


def test_the_key_of_a_member_is_not_that_of_the_coordinator(home: Coordinator, hosts: Make) -> None:
    box, den = (hosts(home, name).files for name in ("box", "den"))
    server = box.read("server.json", dict[str, list[Any]])
    assert server is not None
    pinned = member_module.PinnedCoordinator.of(
        box.identity("member.pem"), msgspec.convert(server["certificates"], list[bytes], strict=False)
    )
    # Another member answers where the coordinator should, and would let this one in.
    other = coordinator_context(den.identity("member.pem"), [box.identity("member.pem").certificate])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            plain, _ = listener.accept()
            with plain, contextlib.suppress(OSError), other.wrap_socket(plain, server_side=True) as sock:
                sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match="certificate verify failed"):
            tcp.connect(f"127.0.0.1:{listener.getsockname()[1]}", pinned, wire.CONTROL + bytes(16))
        thread.join()


def test_a_signed_certificate_is_not_that_of_a_member(folder: Path, caplog: Any) -> None:
    # The handshake would accept what a member's key has signed, if its certificate were one of an authority.
    authority = key_file(folder / "ca")
    der = ssl.PEM_cert_to_DER_cert(authority.with_suffix(".crt").read_text())
    signed = Identity(signed_key_file(folder / "signed", authority), b"")
    files = ClusterFiles("home")
    files.write(
        "members.json",
        {"epoch": 0, "members": [{"name": "box", "certificate": der, "label": "", "proven": True}]},
    )
    with coordinator() as made:
        assert closes(made, signed, wire.CONTROL)
        assert within(10, lambda: any("not that of a member" in r.getMessage() for r in caplog.records))


@pytest.mark.parametrize(
    ("protocol", "certificate", "why"),
    [
        ("luce/1", None, "its certificate is not that of a member"),
        ("luce/1", b"stranger", "its certificate is not that of a member"),
        (None, b"member", "it speaks neither the protocol of members nor that of joining"),
        ("h2", b"member", "it speaks neither the protocol of members nor that of joining"),
        ("luce/1", b"member", ""),
    ],
)
def test_the_gate(protocol: str | None, certificate: bytes | None, why: str) -> None:
    class Sock:
        def selected_alpn_protocol(self) -> str | None:
            return protocol

        def getpeercert(self, *, binary_form: bool) -> bytes | None:
            return certificate

    def nobody(join: wire.Join, host: str) -> None:
        raise AssertionError("it has not asked")

    closed = gate.ClusterGate(join_context, lambda found: found == b"member", nobody)
    if why:
        with pytest.raises(ConnectionError, match=f"^{why}$"):
            closed.admit(Sock(), "10.0.0.1")  # type: ignore[arg-type]
    else:
        assert closed.admit(Sock(), "10.0.0.1")  # type: ignore[arg-type]


def test_a_member_without_a_certificate_and_a_protocol_of_others(home: Coordinator, folder: Path) -> None:
    context = join_context()
    for protocol in ("luce/1", "h2"):
        context.set_alpn_protocols([protocol])
        with tcp.connect(f"127.0.0.1:{port_of(home)}", Dialled(context), wire.CONTROL + bytes(16)) as sock:
            sock.settimeout(30)
            assert sock.recv(1) == b""


def test_a_connection_that_nobody_asked_for_is_closed(home: Coordinator, hosts: Make) -> None:
    host = hosts(home)
    own = host.files.identity("member.pem")
    for role in (b"R", b"W", b"?"):
        assert closes(home, own, role)


def test_a_connection_is_that_of_the_member_that_was_asked(home: Coordinator, hosts: Make) -> None:
    box, den = (hosts(home, name).files.identity("member.pem") for name in ("box", "den"))
    peers = [member_context(own, []) for own in (box, den)]
    for context in peers:
        context.verify_mode = ssl.CERT_NONE
    address = f"127.0.0.1:{port_of(home)}"
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(tcp.connect(address, Dialled(peers[0]), wire.CONTROL + bytes(16)))
        channel: Channel[Any] = Channel(sock, wire.FromCoordinator)

        def hears(kind: type[Any]) -> Any:
            return next(m for _, m in iter(lambda: channel.receive(timeout=30), None) if isinstance(m, kind))

        channel.send(0, wire.Hello(__version__, ("cpu:0",)), timeout=30)
        assert home.wait_for_members(1, 30) == 1
        pool = opened.enter_context(ThreadPoolExecutor(1))
        planned = pool.submit(home.plan, "f" * 32)
        channel.send(0, wire.Found(hears(wire.Find).fingerprint, ""), timeout=30)
        peer = pool.submit(planned.result(30)[1][place_of("box")], "shard 1")
        token = hears(wire.Assign).token
        # With the right token, but the certificate of another member.
        for role in (b"R", b"W"):
            other = opened.enter_context(tcp.connect(address, Dialled(peers[1]), role + token))
            other.settimeout(30)
            assert other.recv(1) == b"" and not peer.done()
        for role in (b"R", b"W"):
            opened.enter_context(tcp.connect(address, Dialled(peers[0]), role + token))
        opened.enter_context(peer.result(30).requests)
        opened.enter_context(peer.result(30).heartbeat)


def connect(made: Coordinator, host: Host) -> Peer:
    """A connection to the devices of a host that has started."""
    (host.folder / "model.gguf").symlink_to(MODEL)
    assert made.wait_for_members(1, 30) == 1
    with open_gguf(MODEL) as file:
        _, connects = made.plan(fingerprint(file))
    return connects[place_of("box")]("shard 1")


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


def test_a_used_token_stays_used_for_a_coordinator_that_starts_again(folder: Path) -> None:
    own, other = (identity(folder / name).certificate for name in ("own", "other"))
    with coordinator() as first:
        token = decode_token(first.new_token(60))
        assert sent(first, request(token, own)) == wire.Joined()
    with coordinator() as again:
        assert sent(again, request(token, other)) == wire.Refused()


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


def test_a_member_compares_the_certificate_of_its_coordinator(folder: Path) -> None:
    own, other = identity(folder / "own"), identity(folder / "other")
    pinned = member_module.PinnedCoordinator.of(own, [own.certificate])

    class Sock:
        def getpeercert(self, *, binary_form: bool) -> bytes:
            return other.certificate

    with pytest.raises(ConnectionError, match="its certificate is not that of the coordinator"):
        pinned.check_peer(Sock())  # type: ignore[arg-type]


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


def test_a_host_that_has_not_joined(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"^this machine has not joined cluster home: give a TOKEN$"):
        MemberHost(ClusterFiles("home"), ("cpu:0",), Storage(), lambda *arguments: None)


def test_a_coordinator_that_is_not_there(folder: Path, home: Coordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    token = msgspec.structs.replace(decode_token(home.new_token(60)), addresses=(address, "nowhere"))
    with pytest.raises(
        DeviceError, match=rf"^cannot join cluster home: {address}: .*refused; nowhere: expected HOST:PORT"
    ):
        join(token, ClusterFiles("elsewhere"), "box")


def test_delays_between_attempts() -> None:
    exact, low = delays(lambda least, most: 1.0), delays(lambda least, most: least)
    assert [next(exact) for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [next(low) for _ in range(3)] == [0, 0.8, 1.6]


def test_a_placement_without_a_lost_member_is_not_wanted_any_more_once_it_is_back(
    home: Coordinator, hosts: Make
) -> None:
    host = hosts(home)
    (host.folder / "model.gguf").symlink_to(MODEL)
    host.start()
    assert home.wait_for_members(1, 30) == 1
    with open_gguf(MODEL) as file:
        home.plan(fingerprint(file))
    home.keep({"member://box/cpu:0": range(1)})
    assert home.placed == home.present == {"box"} and home.idle == frozenset()
    home._membership.patience = 0.0
    assert host.host is not None
    host.host.stop()
    host.end()
    assert within(30, lambda: home._wanted == "loss")
    assert home.present == frozenset()
    host.start()
    assert within(30, lambda: state(home) == "loading") and home.take_wanted(0) == ""
    home.want("command")
    assert home.take_wanted(0) == "command" and home.take_wanted(0) == ""


def test_drain_by_command(home: Coordinator, hosts: Make) -> None:
    host = hosts(home).start()
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


def test_no_secret_is_written_or_logged(home: Coordinator, folder: Path, monkeypatch: Patch, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG):
        text = home.new_token(60)
        token = decode_token(text)
        sent(home, request(token, identity(folder / "own").certificate, secret=b"?" * 16))
        sent(home, request(token, identity(folder / "own").certificate))
    secrets = [text.encode(), token.secret, token.secret.hex().encode(), base64.b64encode(token.secret)]
    kept = [path.read_bytes() for path in home.files.path.iterdir() if path.is_file()]
    logged = repr([record.__dict__ for record in caplog.records]).encode()
    assert len(kept) >= 3 and not any(secret in data for secret in secrets for data in [*kept, logged])
