"""A coordinator is found by mDNS on the loopback interface, which grants nothing."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from luce.cli.served_cluster import served_cluster
from luce.cluster import discovery, member
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.coordinator import Coordinator
from luce.cluster.discovery import Announcement, find
from luce.cluster.join_token import JoinToken, decode_token
from luce.cluster.member import join
from luce.config.resolve import resolve
from luce.errors import DeviceError, UsageError
from tests.support.clusters import Host, coordinator, impostor, needs_keys

Patch = pytest.MonkeyPatch
PIN = bytes(range(32))
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Directories of this test's own."""
    needs_keys()
    pytest.importorskip("zeroconf", reason="finds servers, as the extra cluster does")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinator"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def announce() -> Iterator[Callable[..., Announcement]]:
    """Makes announcements, which leave no thread behind."""
    before, made = set(threading.enumerate()), list[Announcement]()

    def make(pin: bytes, *addresses: str) -> Announcement:
        made.append(Announcement(addresses, pin))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert set(threading.enumerate()) <= before


def found(pin: bytes, seconds: float = 1.0) -> set[tuple[str, ...]]:
    """What a lookup finds, nothing if it fails."""
    try:
        return set(find(pin, seconds))
    except DeviceError:
        return set()


def test_servers_side_by_side_are_told_apart(announce: Callable[..., Announcement]) -> None:
    other = PIN[::-1]
    first, _ = announce(PIN, "127.0.0.1:7443"), announce(other, "127.0.0.1:7444", "127.0.0.2:7444")
    assert next(find(PIN)) == ("127.0.0.1:7443",) and set(next(find(other))) == {"127.0.0.1:7444", "127.0.0.2:7444"}
    renewed = b"n" * 32
    first.renew(renewed)
    assert next(find(renewed)) == ("127.0.0.1:7443",) and found(PIN) == set()
    first.close()
    assert found(renewed) == set()


def test_announcements_of_one_pin_do_not_hide_each_other(announce: Callable[..., Announcement]) -> None:
    first, *_ = [announce(PIN, f"127.0.0.1:{port}") for port in (1, 2, 3)]
    assert found(PIN) == {("127.0.0.1:1",), ("127.0.0.1:2",), ("127.0.0.1:3",)}
    first.close()
    assert found(PIN) == {("127.0.0.1:2",), ("127.0.0.1:3",)}


def test_what_is_announced(announce: Callable[..., Announcement]) -> None:
    info = announce(PIN, "127.0.0.1:7443", "[::1]:7443").info
    assert info.properties == {b"v": b"1", b"id": b"0001020304050607"} and info.type == "_luce._tcp.local."
    name = re.fullmatch(r"(luce-0001020304050607-[0-9a-f]{8})\._luce\._tcp\.local\.", info.name)
    assert name and info.server == f"{name[1]}.local."
    assert socket.gethostname() not in repr(info)


@pytest.mark.parametrize(
    ("properties", "port", "addresses"),
    [
        ({b"v": b"1", b"id": b"0001020304050607"}, 7, ("10.0.0.1:7", "[fe80::1]:7")),
        ({b"v": b"2", b"id": b"0001020304050607"}, 7, ()),
        ({b"v": b"1", b"id": b"0001020304050608"}, 7, ()),
        ({b"v": b"1"}, 7, ()),
        ({b"v": b"1", b"id": b"0001020304050607"}, 0, ()),
        ({b"v": b"1", b"id": None}, None, ()),
    ],
)
def test_answers_that_are_for_another_server(properties: Any, port: Any, addresses: tuple[str, ...]) -> None:
    class Answer:
        def parsed_addresses(self) -> list[str]:
            return ["10.0.0.1", "fe80::1"]

    answer = Answer()
    answer.properties, answer.port = properties, port  # type: ignore[attr-defined]
    assert discovery.announced_addresses(answer, PIN) == addresses


def test_nobody_answers() -> None:
    with pytest.raises(DeviceError) as caught:
        next(find(PIN, 0.3))
    assert str(caught.value) == (
        "no server with this token's key has answered by mDNS within 0.3 s: such traffic may not pass this network, or "
        "the server runs without --cluster-announce; join with a token that has an address: `luce cluster token` "
        "without --lan"
    )


def test_an_answer_whose_addresses_were_lost_is_asked_again(
    announce: Callable[..., Announcement], monkeypatch: Patch
) -> None:
    announce(PIN, "127.0.0.1:7443")
    asker_type = discovery.library_module().Zeroconf
    whole, lost = asker_type.get_service_info, list[str]()

    def loses(asker: Any, service: str, name: str, timeout: float) -> Any:
        lost.append(name)
        return whole(asker, service, name, timeout) if len(lost) > 1 else None

    monkeypatch.setattr(asker_type, "get_service_info", loses)
    assert next(find(PIN)) == ("127.0.0.1:7443",) and len(lost) == 2


def test_a_machine_without_a_network(monkeypatch: Patch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError(19, "No such device")

    monkeypatch.setattr("zeroconf.Zeroconf", fails)
    with pytest.raises(DeviceError, match=r"^cannot ask by mDNS: \[Errno 19\] No such device: .*without --lan$"):
        next(find(PIN))
    with pytest.raises(UsageError, match=r"^cannot announce the server by mDNS: \[Errno 19\] No such device$"):
        Announcement(["127.0.0.1:7443"], PIN)


@pytest.fixture
def home() -> Iterator[Coordinator]:
    """A coordinator that announces itself."""
    settings = resolve({"cluster": "home", "cluster_listen": "127.0.0.1:0", "cluster_announce": True}, env={})
    with served_cluster(settings) as cluster:
        assert cluster is not None
        yield cluster.coordinator


def test_a_host_joins_with_a_token_without_addresses(home: Coordinator, folder: Path, monkeypatch: Patch) -> None:
    token = decode_token(home.new_token(60, lan=True))
    assert token.addresses == ()
    with monkeypatch.context() as own:
        own.setenv("XDG_DATA_HOME", str(folder / "box"))
        files = ClusterFiles("home")
        join(token, files, "box")
        # Later starts need no lookup.
        own.setattr(discovery, "library_module", lambda: pytest.fail("it asks again"))
        host = Host(files, folder).start()
        assert home.wait_for_members(1, 30) == 1
        host.stop()


def test_a_new_key_is_announced(home: Coordinator, folder: Path, monkeypatch: Patch) -> None:
    before = decode_token(home.new_token(60, lan=True))
    home.rotate()
    after = decode_token(home.new_token(60, lan=True))
    assert next(find(after.pin)) == home.addresses and before.pin != after.pin and found(before.pin) == set()
    join(after, ClusterFiles("elsewhere"), "box")


def test_an_impostor_is_found_and_gets_nothing(folder: Path, announce: Callable[..., Announcement]) -> None:
    with impostor(folder) as (address, heard):
        # It claims to be the coordinator of the token, whose key it lacks.
        announce(PIN, address)
        token = JoinToken(1, b"8 bytes!", "home", (), PIN, b"sixteen secrets!", 0)
        with pytest.raises(
            DeviceError,
            match=rf"^cannot join cluster home: {address}: somebody else answers there: key [0-9a-f]{{8}}, the token",
        ):
            join(token, ClusterFiles("elsewhere"), "box")
    assert heard == [b""] and ClusterFiles("elsewhere").read("server.json", dict) is None


def test_an_impostor_keeps_nobody_from_the_right_server(
    folder: Path, announce: Callable[..., Announcement], monkeypatch: Patch
) -> None:
    """Its answer is there first, beside one at which nobody listens and one who says nothing."""
    with coordinator() as made, impostor(folder) as (address, heard), socket.create_server(("127.0.0.1", 0)) as silent:
        token = msgspec.structs.replace(decode_token(made.new_token(60)), addresses=())
        announce(token.pin, address)
        announce(token.pin, "127.0.0.1:1")
        announce(token.pin, f"127.0.0.1:{silent.getsockname()[1]}")
        asked = list[tuple[str, ...]]()

        def answers(pin: bytes) -> Iterator[tuple[str, ...]]:
            # The last one is announced late: not before the silent one has been waited for.
            for addresses in find(pin, 60):
                asked.append(addresses)
                if len(asked) == 3:
                    announce(pin, *made.addresses)
                yield addresses

        monkeypatch.setattr(member, "find", answers)
        files = ClusterFiles("elsewhere")
        join(token, files, "box")
        assert asked[-1] == made.addresses and len(asked) == 4 and (address,) in asked
        (saved,) = files.read("server.json", dict[str, Any])["addresses"]  # type: ignore[index]
        assert saved == made.addresses[0]
    assert heard == [b""]


def test_a_server_that_does_not_announce_itself() -> None:
    with coordinator() as made, pytest.raises(UsageError, match=r"^--lan: the server has to announce itself"):
        made.new_token(60, lan=True)


def test_without_the_library(monkeypatch: Patch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    # Everything else works without it.
    with coordinator() as made:
        token = decode_token(made.new_token(60))
        join(token, ClusterFiles("elsewhere"), "box")
    why = r"^finding a server by mDNS needs the extra cluster: pip install 'luce-llm\[cluster\]'$"
    with pytest.raises(UsageError, match=why):
        next(find(PIN))
    with pytest.raises(UsageError, match=why):
        Coordinator("other", "127.0.0.1:0", announce=True)
    # A coordinator that cannot start leaves nothing behind.
    with coordinator("other"):
        pass


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    """CL-1"""
    code = """
import sys
from luce.cli import cluster, join, serve
from luce.cli.served_cluster import served_cluster
from luce.cluster.coordinator import Coordinator
from luce.config.resolve import resolve
with served_cluster(resolve({"cluster": "home", "cluster_listen": "127.0.0.1:0"}, env={})):
    print("zeroconf" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
