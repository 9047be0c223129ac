"""Members and coordinators that send what no Luce sends."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from luce import __version__
from luce.cluster import admin, gate, member_weights, weight_source, wire
from luce.cluster.identity import JOIN_PROTOCOL, join_context, member_context
from luce.cluster.join_token import TokenRefusedError
from luce.cluster.member_weights import Storage, Weights
from luce.cluster.weight_source import WeightSource, WeightStreams
from luce.errors import LuceError, ServerError
from luce.ipc import tcp
from luce.ipc.channel import Channel, ChannelError
from tests.support.clusters import MODEL, coordinator, joined, load_of, port_of
from tests.support.daemons import within

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Directories of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinator"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "REFUSAL_DELAY", 0.0)
    monkeypatch.setattr(member_weights, "RETRY_DELAY", 0.0)
    return tmp_path


@pytest.mark.parametrize(
    "message",
    [
        wire.Needs(-1, 0),
        wire.Needs(1, -1),
        wire.Needs(1 << 62, 0),
        wire.AskBytes(-1, 0, 1),
        wire.AskBytes(0, -1, 1),
        wire.AskBytes(0, 0, -1),
        wire.Layout(((-1, 0),)),
        wire.Layout(((1 << 62, 0),)),
        wire.Layout(((1, -1),)),
        wire.Pong((wire.DeviceMemory(-1, None),)),
        wire.Pong((wire.DeviceMemory(None, -1),)),
        wire.Needs("1", 0),  # type: ignore[arg-type]
        wire.Needs(1.5, 0),  # type: ignore[arg-type]
        wire.Needs(True, 0),
    ],
    ids=repr,
)
def test_numbers_that_count_nothing_are_refused(message: Any) -> None:
    near, far = socket.socketpair()
    with (
        contextlib.closing(Channel[Any](near, Any)) as channel,
        contextlib.closing(Channel[Any](far, type(message))) as other,
    ):
        channel.send(0, message, timeout=10)
        with pytest.raises(ChannelError, match="invalid message"):
            other.receive(timeout=10)


@contextlib.contextmanager
def streaming(source: WeightSource | None = None) -> Iterator[tuple[WeightStreams, Any]]:
    """Streams, and a function that opens a connection of a member to them."""
    streams = WeightStreams()
    with contextlib.ExitStack() as opened:
        own = source or WeightSource(MODEL)
        opened.callback(own.close)
        opened.callback(streams.close)

        def begin(member: str = "box") -> Channel[Any]:
            near, far = socket.socketpair()
            streams.begin(member, cast("ssl.SSLSocket", far), own)
            channel: Channel[Any] = Channel(near, wire.Weights)
            opened.callback(channel.close)
            return channel

        yield streams, begin


def test_more_there_than_it_needs() -> None:
    with streaming() as (streams, begin):
        channel = begin()
        channel.send(0, wire.Needs(10, 11), timeout=10)
        with pytest.raises(ChannelError):
            channel.receive(timeout=10)
        assert streams.share("box") is None


def test_a_share_is_that_of_connections_that_last() -> None:
    with streaming() as (streams, begin):
        channel = begin()
        channel.send(0, wire.Needs(10, 5), timeout=10)
        assert within(10, lambda: streams.share("box") == 0.5)
        streams.end("box")
        assert streams.share("box") is None


def test_a_member_has_few_connections_at_a_time() -> None:
    with streaming() as (_, begin):
        other = begin("den")
        channels = [begin() for _ in range(weight_source.MOST_STREAMS + 1)]
        with pytest.raises(ChannelError):
            channels.pop().receive(timeout=10)
        for channel in (other, *channels):
            channel.send(0, wire.AskLayout(), timeout=10)
            assert isinstance(channel.receive(timeout=10)[1], wire.Layout)
        # One that has ended makes room.
        channels.pop().close()

        def answered() -> bool:
            channel = begin()
            with contextlib.suppress(ChannelError):
                channel.send(0, wire.AskLayout(), timeout=10)
                return isinstance(channel.receive(timeout=10)[1], wire.Layout)
            return False

        assert within(10, answered)


def test_a_limited_rate_does_not_delay_the_end() -> None:
    near, far = socket.socketpair()
    with contextlib.closing(Channel[Any](near, wire.Weights)) as channel:
        with coordinator() as home:
            source = WeightSource(MODEL, rate=1e-3)
            home.plan("f" * 32, source)
            home.streams.begin("box", cast("ssl.SSLSocket", far), source)
            for _ in range(2):
                channel.send(0, wire.AskBytes(0, 0, 100), timeout=10)
            assert isinstance(channel.receive(timeout=10)[1], wire.FileBytes)
        # The second one would be sent a day later.
        with pytest.raises(ChannelError):
            channel.receive(timeout=10)


class Canned(Weights):
    """The connection to a coordinator that sends these answers."""

    def __init__(self, *answers: msgspec.Struct) -> None:
        near, far = socket.socketpair()
        super().__init__(Channel(near, wire.Weights), lambda: False)
        self._far: Channel[Any] = Channel(far, wire.ForWeights)
        for answer in answers:
            self._far.send(0, answer, timeout=10)

    def close(self) -> None:
        super().close()
        self._far.close()


def located(*answers: msgspec.Struct) -> None:
    member_weights.locate(
        None, Storage(), lambda: Canned(*answers), load_of(MODEL, (0, 1)), lambda share: None, lambda: False
    )


@pytest.mark.parametrize(
    "files", [(), ((10, 11),), ((1, 0),) * 1001], ids=["none", "tensors behind the end", "too many"]
)
def test_a_layout_that_no_model_has(files: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(LuceError, match="it sent a layout that no model has"):
        located(wire.Layout(files))


def test_a_layout_that_no_disk_holds(folder: Path) -> None:
    with pytest.raises(LuceError, match=f"^{folder}/cache/luce/parts/[0-9a-f]+: File too large"):
        located(wire.Layout((((1 << 62) - 1, 0),)))


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"GGUF" + b"\xff" * 200], ids=["zeros", "cut", "counts"])
def test_a_damaged_head_is_fetched_again(folder: Path, damage: bytes) -> None:
    def fetched() -> Path:
        with contextlib.closing(WeightSource(MODEL)) as source, contextlib.ExitStack() as opened:
            streams = WeightStreams()
            opened.callback(streams.close)

            def connect() -> Weights:
                near, far = socket.socketpair()
                streams.begin("box", cast("ssl.SSLSocket", far), source)
                return Weights(Channel(near, wire.Weights), lambda: False)

            return member_weights.locate(
                None, Storage(), connect, load_of(MODEL, (0, 1)), lambda share: None, lambda: False
            )

    path = fetched()
    whole = path.read_bytes()[:4096]
    with open(path, "r+b") as file:
        file.write(damage.ljust(4096, b"\0"))
    with pytest.raises(LuceError):
        fetched()
    assert fetched().read_bytes()[:4096] == whole


def test_a_device_that_a_member_has_twice(folder: Path, monkeypatch: Patch) -> None:
    with coordinator() as home:
        host = joined(home, monkeypatch, folder)
        context = member_context(host.files.identity("member.pem"), [])
        context.verify_mode = ssl.CERT_NONE

        class Dialled:
            def __init__(self) -> None:
                self.context = context

            def check_peer(self, sock: ssl.SSLSocket) -> None:
                """Everybody is welcome."""

        for devices, fine in ((("cpu:0", "cpu:0"), False), (("cuda:1", "cuda:01"), False), (("cuda:1", "cpu:0"), True)):
            with tcp.connect(f"127.0.0.1:{port_of(home)}", Dialled(), wire.CONTROL + bytes(16)) as sock:
                channel: Channel[Any] = Channel(sock, wire.FromCoordinator)
                channel.send(0, wire.Hello(__version__, devices), timeout=10)
                if fine:
                    assert home.wait_for_members(1, 30) == 1
                    continue
                with pytest.raises(ChannelError):
                    # As a member it would get a Ping.
                    channel.receive(timeout=10)
                assert home.wait_for_members(1, 0) == 0
        host.stop()


@pytest.mark.parametrize("certificate", [b"", b"junk"])
def test_a_member_pins_no_certificate_that_cannot_be_read(folder: Path, monkeypatch: Patch, certificate: bytes) -> None:
    with coordinator() as home:
        host = joined(home, monkeypatch, folder)
        host.start()
        assert home.wait_for_members(1, 30) == 1
        before = host.files.read("server.json", dict[str, Any])
        (link,) = home.links.values()
        link.post(wire.NewPin(certificate))
        # It connects again, with what it knew.
        assert within(30, lambda: len(home.links) > 0 and link not in home.links.values())
        assert home.wait_for_members(1, 30) == 1 and host.files.read("server.json", dict[str, Any]) == before
        host.stop()


def test_refusals_are_counted_by_network() -> None:
    def refuse(join: wire.Join, host: str) -> None:
        raise TokenRefusedError("the token is unknown")

    closed = gate.ClusterGate(join_context, lambda found: False, refuse)

    class Joining(socket.socket):
        """A connection of a host that joins."""

        def selected_alpn_protocol(self) -> str:
            return JOIN_PROTOCOL

        def getpeercert(self, *, binary_form: bool) -> None:
            """It has none."""

    def asked(host: str) -> bool:
        """Whether its token is looked at."""
        near, far = socket.socketpair()
        with near, Joining(fileno=far.detach()) as sock:
            Channel[Any](near, wire.Refused).send(0, wire.Join(b"", b"", b"", "", ""), timeout=10)
            try:
                return not closed.admit(cast("ssl.SSLSocket", sock), host)
            except ConnectionError:
                return False

    assert all(asked(f"2001:db8::{n}") for n in range(5))
    assert not asked("2001:db8::77") and asked("2001:db8:0:1::1") and asked("10.0.0.1")


def test_a_command_that_fails_is_not_the_last_one(monkeypatch: Patch) -> None:
    def defect() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(admin, "ANSWER_SECONDS", 5.0)
    with coordinator() as home, admin.answering(home, defect):
        with pytest.raises(ServerError, match=r"^the command failed: ZeroDivisionError: division by zero$"):
            admin.ask(home.files, wire.AskReplan())
        with pytest.raises(ServerError, match=r"^the command failed: OverflowError: "):
            admin.ask(home.files, wire.AskToken(float("inf"), ""))
        assert isinstance(admin.ask(home.files, wire.AskStatus()), wire.Status)
