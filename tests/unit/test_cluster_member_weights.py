"""Weights that members get of the coordinator, and those of their own that they compare."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from luce.cluster import member_weights, weight_source, wire
from luce.cluster.cluster_status import place_of
from luce.cluster.coordinator import Coordinator
from luce.cluster.member import PinnedCoordinator
from luce.cluster.member_weights import Weights
from luce.cluster.weight_source import WeightSource, WeightStreams
from luce.errors import UnreachableError
from luce.gguf.fingerprint import fingerprint, sampled, tensors_begin
from luce.gguf.reader import open_gguf
from luce.ipc import tcp
from luce.ipc.channel import Channel, ChannelError
from luce.ipc.supervisor import Peer
from tests.support.cluster_fixtures import folder, home
from tests.support.clusters import MODEL, Host, joined, load_of, port_of
from tests.support.daemons import within

__all__ = ["folder", "home"]
Patch = pytest.MonkeyPatch
Make = Callable[[], Host]


@pytest.fixture
def box(home: Coordinator, folder: Path, monkeypatch: Patch) -> Iterator[Host]:
    """A host that has joined, without a model file."""
    host = joined(home, monkeypatch, folder)
    yield host
    host.stop()


def identity_of(path: Path) -> str:
    with open_gguf(path) as file:
        return fingerprint(file)


@contextlib.contextmanager
def placed(home: Coordinator, box: Host, source: WeightSource | None) -> Iterator[Peer]:
    """The connections to the devices of the box, which serves MODEL."""
    if box.thread is None:
        box.start()
    assert home.wait_for_members(1, 30) == 1
    devices, connects = home.plan(identity_of(MODEL), source)
    assert devices == ["member://box/cpu:0"]
    peer = connects[place_of("box")]("shard 1")
    with peer.requests, peer.heartbeat:
        yield peer


def size_of(layer: int) -> int:
    """Bytes of the first layer and the embedding, or of another layer."""
    with open_gguf(MODEL) as file:
        names = [n for n in file.tensors if n.startswith(f"blk.{layer}.") or (n == "token_embd.weight" and layer == 0)]
        return sum(file.tensors[name].nbytes for name in names)


def check_layers(path: Path) -> None:
    """The first layer of a file is that of MODEL, and the file has the fingerprint, and holes."""
    assert identity_of(path) == identity_of(MODEL)
    with open_gguf(path) as own, open_gguf(MODEL) as expected:
        for name in expected.tensors:
            if name.startswith("blk.0.") or name == "token_embd.weight":
                assert np.array_equal(own.raw(name), expected.raw(name)), name
        last = f"blk.{max(int(n.split('.')[1]) for n in expected.tensors if n.startswith('blk.'))}.ffn_up.weight"
        assert not np.array_equal(own.raw(last), expected.raw(last))


def state(home: Coordinator) -> tuple[str, str]:
    (member,) = home.status().members
    return member.state, member.file


def test_a_member_gets_the_tensors_of_its_layers_alone(home: Coordinator, box: Host) -> None:
    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home) == ("serving", "streamed 100%")), box.problems
        check_layers(box.served[0])
        assert box.shares[-1] == 1.0 and box.shares == sorted(box.shares)
        with open_gguf(MODEL) as file:
            heads = sum(end - begin for begin, end in sampled(file.files[0].size, tensors_begin(file, 0)))
        assert size_of(0) <= home.streams.sent <= size_of(0) + heads
    before = home.streams.sent
    # The next placement finds what is there.
    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home)[0] == "serving") and home.streams.sent == before
    check_layers(box.served[1])


def test_a_cut_connection_goes_on_behind_what_is_there(home: Coordinator, box: Host, monkeypatch: Patch) -> None:
    monkeypatch.setattr(member_weights, "RETRY_DELAY", 0.01)
    with placed(home, box, WeightSource(MODEL, rate=1e6)):
        for share in (0.3, 0.6):
            assert within(30, lambda least=share: bool(box.shares) and box.shares[-1] > least)
            home.streams.end("box")
        assert within(30, lambda: state(home)[0] == "serving"), box.problems
        check_layers(box.served[0])
        # Pieces that were on the way are sent again, no others.
        with open_gguf(MODEL) as file:
            largest = max(info.nbytes for info in file.tensors.values())
            heads = sum(end - begin for begin, end in sampled(file.files[0].size, tensors_begin(file, 0)))
        assert home.streams.sent <= size_of(0) + heads + 2 * member_weights.AHEAD * largest


def test_a_member_without_the_file_is_not_used_where_none_is_sent(home: Coordinator, box: Host) -> None:
    box.start()
    assert home.wait_for_members(1, 30) == 1
    assert home.plan(identity_of(MODEL), WeightSource(MODEL, streams=False))[0] == []
    assert state(home) == ("idle", "absent")
    (member,) = home.status().members
    assert "and the server sends none" in member.reason and identity_of(MODEL) in member.reason


def damaged(path: Path) -> str:
    """A copy of MODEL with one byte changed between the samples of the fingerprint; the tensor with it."""
    shutil.copy(MODEL, path)
    with open_gguf(MODEL) as file:
        info = file.tensors["blk.0.ffn_up.weight"]
        read = sampled(file.files[0].size, tensors_begin(file, 0))
        at = next(at for at in range(info.offset, info.offset + info.nbytes) if not any(b <= at < e for b, e in read))
    with open(path, "r+b") as changed:
        changed.seek(at)
        byte = changed.read(1)[0]
        changed.seek(at)
        changed.write(bytes([byte ^ 1]))
    assert identity_of(path) == identity_of(MODEL)
    return info.name


def test_one_changed_byte_of_an_own_file_is_found(home: Coordinator, box: Host) -> None:
    name = damaged(box.folder / "model.gguf")
    box.verify = "once"
    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home) == ("idle", "absent") and bool(box.problems))
    (member,) = home.status().members
    assert f"tensor {name} has SHA-256" in member.reason and member.reason == box.problems[0]
    assert home.broken(0.0) == (frozenset({"box"}), frozenset())
    # It is not asked again for the placement that does without it.
    assert home.plan(identity_of(MODEL), WeightSource(MODEL), without={"box"})[0] == []


def test_an_own_file_is_compared_once(home: Coordinator, box: Host, monkeypatch: Patch) -> None:
    (box.folder / "model.gguf").symlink_to(MODEL)
    box.verify = "once"
    compared: list[str] = []
    check = member_weights.check_sum

    def noted(path: str, name: str, own: bytes, theirs: bytes) -> None:
        compared.append(name)
        check(path, name, own, theirs)

    monkeypatch.setattr(member_weights, "check_sum", noted)
    with placed(home, box, WeightSource(MODEL, streams=False)):
        assert within(30, lambda: state(home) == ("serving", "own")), box.problems
    assert "blk.0.ffn_up.weight" in compared and "blk.1.ffn_up.weight" not in compared
    compared.clear()
    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home)[0] == "serving") and compared == []


def test_a_streamed_tensor_that_arrives_changed_is_not_used(home: Coordinator, box: Host, monkeypatch: Patch) -> None:
    source = WeightSource(MODEL)
    read = source.read

    def changed(part: int, offset: int, size: int) -> np.ndarray:
        data = read(part, offset, size)
        with open_gguf(MODEL) as file:
            info = file.tensors["blk.0.attn_q.weight"]
        if info.offset <= offset < info.offset + info.nbytes and size > 4096:
            data = data.copy()
            data[0] ^= 1
        return data

    monkeypatch.setattr(source, "read", changed)
    with placed(home, box, source):
        assert within(30, lambda: state(home) == ("idle", "absent") and bool(box.problems))
    assert "tensor blk.0.attn_q.weight has SHA-256" in box.problems[0] and not box.served


def test_a_disk_without_room_is_the_member_s_error(home: Coordinator, box: Host) -> None:
    box.limit = 100_000
    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home) == ("idle", "absent") and bool(box.problems))
    assert "--cache-size allows 100000 in all" in box.problems[0]


def test_a_small_disk_is_not_filled(home: Coordinator, box: Host, folder: Path) -> None:
    disk = folder / "cache"
    disk.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounts a small disk, as root: {mounted.stderr.decode().strip()}")
    try:
        # Of which 256 MiB stay free, and another program has the rest.
        (disk / "other").write_bytes(bytes(44 << 20))
        before = shutil.disk_usage(disk).free
        with placed(home, box, WeightSource(MODEL)):
            assert within(30, lambda: state(home) == ("idle", "absent"))
        (member,) = home.status().members
        assert re.search(r"the weights of its layers need \d+ more bytes, 0 are free$", member.reason), member.reason
        assert before - shutil.disk_usage(disk).free < size_of(0) and home.streams.sent < size_of(0)
        (disk / "other").unlink()
        # It is asked again for the next placement.
        peer = home.plan(identity_of(MODEL), WeightSource(MODEL))[1][place_of("box")]("shard 1")
        with peer.requests, peer.heartbeat:
            assert within(30, lambda: state(home)[0] == "serving"), box.problems
        check_layers(box.served[-1])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_only_who_has_layers_of_the_placement_reads_the_file(home: Coordinator, box: Host, monkeypatch: Patch) -> None:
    connect, begun = tcp.connect, list[bytes]()

    def noted(address: str, key: Any, begin: bytes) -> Any:
        begun.append(begin)
        return connect(address, key, begin)

    monkeypatch.setattr(tcp, "connect", noted)

    def ask(token: bytes) -> tuple[tuple[int, int], ...]:
        pinned = PinnedCoordinator.of(
            box.files.identity("member.pem"), [home.files.identity("coordinator.pem").certificate]
        )
        sock = tcp.connect(f"127.0.0.1:{port_of(home)}", pinned, wire.WEIGHTS + token)
        with contextlib.closing(Weights(Channel(sock, wire.Weights), lambda: False)) as weights:
            return weights.layout()

    with placed(home, box, WeightSource(MODEL)):
        assert within(30, lambda: state(home)[0] == "serving")
        token = next(begin[1:] for begin in begun if begin[:1] == wire.WEIGHTS)
        assert ask(token)[0][0] == MODEL.stat().st_size
        with pytest.raises(ChannelError):
            ask(os.urandom(16))
        home.plan("f" * 32, WeightSource(MODEL), without={"box"})
        with pytest.raises(ChannelError):
            ask(token)


def test_impossible_requests_end_the_connection() -> None:
    with contextlib.closing(WeightSource(MODEL)) as source:
        size = MODEL.stat().st_size
        assert isinstance(source.answer(wire.AskBytes(0, size - 1, 1)), wire.FileBytes)
        for part, offset, count in ((1, 0, 1), (-1, 0, 1), (0, size, 1), (0, -1, 1), (0, 0, 0), (0, 0, 5 << 20)):
            with pytest.raises(ChannelError):
                source.answer(wire.AskBytes(part, offset, count))
        with pytest.raises(ChannelError):
            source.answer(wire.AskSum("no such tensor"))
    with contextlib.closing(WeightSource(MODEL, streams=False)) as source, pytest.raises(ChannelError):
        source.answer(wire.AskBytes(0, 0, 1))


def test_a_member_whose_connection_cannot_be_made_gives_up(monkeypatch: Patch) -> None:
    monkeypatch.setattr(member_weights, "RETRY_DELAY", 0.0)
    attempts: list[int] = []

    def connect() -> Weights:
        attempts.append(1)
        raise ConnectionRefusedError("refused")

    with pytest.raises(UnreachableError, match="do not come from the server: refused"):
        member_weights.locate(
            None, member_weights.Storage(), connect, load_of(MODEL, (0, 1)), lambda share: None, lambda: False
        )
    assert len(attempts) == 6


def test_a_removed_member_reads_no_further(home: Coordinator, box: Host) -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(WeightSource(MODEL)) as source:
        (member,) = home.status().members
        home.streams.begin(member.name, cast("ssl.SSLSocket", ours), source)
        home.remove(member.name)
        theirs.settimeout(10)
        assert theirs.recv(1) == b""


def test_members_that_need_the_same_tensor_get_it_one_after_the_other(monkeypatch: Patch) -> None:
    monkeypatch.setattr(weight_source, "TURN_SECONDS", 30.0)
    with contextlib.closing(WeightSource(MODEL)) as source, open_gguf(MODEL) as file, contextlib.ExitStack() as opened:
        streams, size = WeightStreams(), 1024
        info, other = file.tensors["token_embd.weight"], file.tensors["blk.1.ffn_up.weight"]
        opened.callback(streams.close)
        channels = dict[str, Channel[Any]]()
        for name in ("box", "den"):
            ours, theirs = socket.socketpair()
            streams.begin(name, cast("ssl.SSLSocket", ours), source)
            channels[name] = opened.enter_context(contextlib.closing(Channel(theirs, wire.Weights)))

        def ask(name: str, tensor: Any, at: int) -> None:
            channels[name].send(0, wire.AskBytes(tensor.part, tensor.offset + at, size), timeout=10)

        def got(name: str) -> bytes:
            _, answer = channels[name].receive(timeout=10, limit=size)
            assert isinstance(answer, wire.FileBytes)
            return answer.data.tobytes()

        ask("box", info, 0)
        first = got("box")
        ask("den", info, 0)
        # The one that has begun goes on; the other one waits.
        for at in range(size, 4 * size, size):
            ask("box", info, at)
            got("box")
        assert not channels["den"].ready(0.2)
        channels["box"].send(0, wire.AskSum("token_embd.weight"), timeout=10)
        channels["box"].receive(timeout=10)
        assert got("den") == first
        # What nobody else reads is nobody's turn; and a connection that ends, ends the turn.
        ask("box", other, 0)
        got("box")
        ask("box", info, 0)
        assert not channels["box"].ready(0.2)
        channels["den"].close()
        assert got("box") == first


@pytest.mark.parametrize("name", ["TURN_SECONDS", "LONGEST_WAIT"])
def test_nobody_waits_for_long_for_another_member(name: str, monkeypatch: Patch) -> None:
    for limit in ("TURN_SECONDS", "LONGEST_WAIT"):
        monkeypatch.setattr(weight_source, limit, 0.1 if limit == name else 3600.0)
    with contextlib.closing(WeightSource(MODEL)) as source, open_gguf(MODEL) as file:
        info = file.tensors["token_embd.weight"]
        source.wait_turn("box", info.part, info.offset)
        source.wait_turn("den", info.part, info.offset)
        # Closed, nobody waits on.
        monkeypatch.setattr(weight_source, name, 3600.0)
        failed: list[str] = []

        def wait() -> None:
            try:
                source.wait_turn("box", info.part, info.offset)
            except ChannelError as error:
                failed.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        source.close()
        thread.join(30)
        assert failed == ["the model file is read no more"]
