"""Who gets through a coordinator's port, and who does not."""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from luce import __version__
from luce.cluster import gate, wire
from luce.cluster import member as member_module
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.cluster_status import place_of
from luce.cluster.coordinator import Coordinator
from luce.cluster.identity import Identity, coordinator_context, join_context, member_context
from luce.cluster.join_token import JoinToken, decode_token
from luce.cluster.member import MemberHost, join
from luce.cluster.member_weights import Storage
from luce.errors import DeviceError, UsageError
from luce.ipc import tcp
from luce.ipc.channel import Channel
from luce.ipc.supervisor import Peer
from tests.support.cluster_fixtures import Make, folder, home, hosts
from tests.support.clusters import coordinator, identity, impostor, port_of
from tests.support.daemons import key_file, signed_key_file, within

__all__ = ["folder", "home", "hosts"]
Patch = pytest.MonkeyPatch


def sent(made: Coordinator, request: msgspec.Struct | bytes, source: str = "127.0.0.1") -> object:
    """The answer to what a host that joins sends from an address; None if the connection is closed."""
    plain = socket.create_connection(("127.0.0.1", port_of(made)), timeout=30, source_address=(source, 0))
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
    # Not even with the right secret, however often.
    for _ in range(195):
        assert sent(home, request(token, own)) is None
    assert home.status().members == ()
    # Others are.
    assert sent(home, request(token, own), "127.0.0.2") == wire.Joined() and len(home.status().members) == 1


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000), b"J" + bytes(16)])
def test_bytes_that_are_no_request(data: bytes, home: Coordinator, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT", 1.0)
    # A connection that is closed with unread bytes is reset.
    with contextlib.suppress(OSError):
        assert sent(home, data) is None
    assert home.status().members == ()


def test_the_pin_is_compared_before_anything_is_sent(folder: Path, home: Coordinator) -> None:
    token = decode_token(home.new_token(60))
    with impostor(folder) as (address, heard):
        files = ClusterFiles("elsewhere")
        why = f"^cannot join cluster home: {address}: somebody else answers there: key [0-9a-f]{{8}}, the token"
        with pytest.raises(DeviceError, match=why):
            join(msgspec.structs.replace(token, addresses=(address,)), files, "box")
    assert heard == [b""] and files.read("server.json", dict) is None


class Dialled:
    """The settings of a peer that checks nothing."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """Everybody is welcome."""


def unchecked(own: Identity) -> Dialled:
    """The settings of a host with this key that lets everybody be the coordinator."""
    context = member_context(own, [])
    context.verify_mode = ssl.CERT_NONE
    return Dialled(context)


def closes(made: Coordinator, own: Identity, role: bytes, protocol: str = "luce/1") -> bool:
    """Whether the coordinator closes a connection of a host with this key."""
    dialled = unchecked(own)
    dialled.context.set_alpn_protocols([protocol])
    try:
        with tcp.connect(f"127.0.0.1:{port_of(made)}", dialled, role + bytes(16)) as sock:
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


@contextlib.contextmanager
def asked(home: Coordinator, box: Identity) -> Iterator[tuple[bytes, Future[Peer]]]:
    """The member box, whose control connection this is, is asked for connections to its devices: their token, and what
    the server has once they are there."""
    address = f"127.0.0.1:{port_of(home)}"
    with contextlib.ExitStack() as opened:
        sock = opened.enter_context(tcp.connect(address, unchecked(box), wire.CONTROL + bytes(16)))
        channel: Channel[Any] = Channel(sock, wire.FromCoordinator)

        def hears(kind: type[Any]) -> Any:
            return next(m for _, m in iter(lambda: channel.receive(timeout=30), None) if isinstance(m, kind))

        channel.send(0, wire.Hello(__version__, ("cpu:0",)), timeout=30)
        assert home.wait_for_members(1, 30) == 1
        pool = opened.enter_context(ThreadPoolExecutor(1))
        planned = pool.submit(home.plan, "f" * 32)
        channel.send(0, wire.Found(hears(wire.Find).fingerprint, ""), timeout=30)
        peer = pool.submit(planned.result(30)[1][place_of("box")], "shard 1")
        yield hears(wire.Assign).token, peer
        opened.enter_context(peer.result(30).requests)
        opened.enter_context(peer.result(30).heartbeat)


def over(sock: socket.socket) -> bool:
    """Whether a connection ends without another byte."""
    sock.settimeout(30)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_connection_is_that_of_the_member_that_was_asked(home: Coordinator, hosts: Make, folder: Path) -> None:
    box, den = (hosts(home, name).files.identity("member.pem") for name in ("box", "den"))
    address = f"127.0.0.1:{port_of(home)}"
    with asked(home, box) as (token, peer), contextlib.ExitStack() as opened:
        # With the right token, but the certificate of another member, or of a stranger: no frame is served.
        for own in (den, identity(folder / "stranger")):
            for role in (b"R", b"W"):
                with contextlib.suppress(OSError):
                    other = opened.enter_context(tcp.connect(address, unchecked(own), role + token))
                    other.sendall(b"foreign")
                    assert over(other)
                assert not peer.done()
        requests, heartbeat = (
            opened.enter_context(tcp.connect(address, unchecked(box), role + token)) for role in (b"R", b"W")
        )
        for own_end, server_end in ((requests, peer.result(30).requests), (heartbeat, peer.result(30).heartbeat)):
            own_end.sendall(b"own")
            server_end.settimeout(30)
            assert server_end.recv(7) == b"own"


def test_the_connections_of_a_removed_member_carry_no_further_frame(home: Coordinator, hosts: Make) -> None:
    box = hosts(home).files.identity("member.pem")
    address = f"127.0.0.1:{port_of(home)}"
    with asked(home, box) as (token, peer), contextlib.ExitStack() as opened:
        ends = [opened.enter_context(tcp.connect(address, unchecked(box), role + token)) for role in (b"R", b"W")]
        pairs = [*zip(ends, (peer.result(30).requests, peer.result(30).heartbeat), strict=True)]
        for own_end, server_end in pairs:
            own_end.sendall(b"1")
            assert server_end.recv(1) == b"1"
            server_end.sendall(b"2")
            assert own_end.recv(1) == b"2"
        home.remove("box")
        for own_end, server_end in pairs:
            with contextlib.suppress(OSError):
                own_end.sendall(b"3")
            assert over(server_end)
            with contextlib.suppress(OSError):
                server_end.sendall(b"4")
            assert over(own_end)
        # Nor does it come back with what it knows.
        for role in (wire.CONTROL, b"R", b"W"):
            assert closes(home, box, role)


def test_a_refused_host_is_not_listened_to_any_more(home: Coordinator, folder: Path) -> None:
    token, own = decode_token(home.new_token(60)), identity(folder / "own").certificate
    plain = socket.create_connection(("127.0.0.1", port_of(home)), timeout=30)
    with join_context().wrap_socket(plain) as sock:
        channel: Channel[Any] = Channel(sock, wire.Joined | wire.Refused)
        channel.send(0, request(token, own, secret=b"?" * 16), timeout=30)
        assert channel.receive(timeout=30)[1] == wire.Refused()
        # The right secret comes too late on this connection.
        with contextlib.suppress(OSError):
            channel.send(1, request(token, own), timeout=30)
        assert over(sock)
    assert home.status().members == ()


def test_a_used_token_stays_used_for_a_coordinator_that_starts_again(folder: Path) -> None:
    own, other = (identity(folder / name).certificate for name in ("own", "other"))
    with coordinator() as first:
        token = decode_token(first.new_token(60))
        assert sent(first, request(token, own)) == wire.Joined()
    with coordinator() as again:
        assert sent(again, request(token, other)) == wire.Refused()


def test_a_member_compares_the_certificate_of_its_coordinator(folder: Path) -> None:
    own, other = identity(folder / "own"), identity(folder / "other")
    pinned = member_module.PinnedCoordinator.of(own, [own.certificate])

    class Sock:
        def getpeercert(self, *, binary_form: bool) -> bytes:
            return other.certificate

    with pytest.raises(ConnectionError, match="its certificate is not that of the coordinator"):
        pinned.check_peer(Sock())  # type: ignore[arg-type]


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
