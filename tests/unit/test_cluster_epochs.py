"""What is still on its way when a placement is over: it is closed, and reaches nobody."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from luce.cluster import gate
from luce.cluster.cluster_files import ClusterFiles
from luce.cluster.cluster_status import place_of
from luce.cluster.coordinator import Coordinator
from luce.cluster.join_token import decode_token
from luce.cluster.member import join
from luce.gguf.fingerprint import fingerprint
from luce.gguf.reader import open_gguf
from tests.support.clusters import MODEL, Host, coordinator, port_of
from tests.support.daemons import within

Patch = pytest.MonkeyPatch


class Relay:
    """Passes connections on to a port. What goes over those that there are at `hold` waits for `release`, also their
    end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        #: of each connection whether it passes anything on now
        self.passing: list[threading.Event] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hold(self) -> None:
        """Hold what goes over the connections of a member's devices, which come behind that of control."""
        for event in self.passing[1:]:
            event.clear()

    def release(self) -> None:
        for event in self.passing:
            event.set()

    def close(self) -> None:
        self._ended.set()
        self.release()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            here, _ = self._listener.accept()
            there = socket.create_connection(("127.0.0.1", self._port))
            self.passing.append(threading.Event())
            self.passing[-1].set()
            self._threads.append(threading.Thread(target=self._pass, args=(here, there, self.passing[-1])))
            self._threads[-1].start()

    def _pass(self, here: socket.socket, there: socket.socket, passing: threading.Event) -> None:
        others = {here: there, there: here}
        with here, there, contextlib.suppress(OSError):
            while not self._ended.is_set():
                passing.wait()
                for sock in select.select([here, there], [], [], 0.05)[0]:
                    if not passing.is_set():
                        break
                    if not (data := sock.recv(65536)):
                        return
                    others[sock].sendall(data)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Iterator[Coordinator]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "coordinator"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gate, "REFUSAL_DELAY", 0.0)
    with coordinator() as made:
        yield made


def test_frames_of_an_old_placement_have_no_effect_on_the_next_one(
    home: Coordinator, tmp_path: Path, monkeypatch: Patch
) -> None:
    with contextlib.closing(Relay(port_of(home))) as relay:
        with monkeypatch.context() as own:
            own.setenv("XDG_DATA_HOME", str(tmp_path / "box"))
            files = ClusterFiles("home")
        token = msgspec.structs.replace(decode_token(home.new_token(60)), addresses=(f"127.0.0.1:{relay.port}",))
        join(token, files, "box")
        relay.passing.clear()
        models = tmp_path / "models"
        models.mkdir()
        (models / "model.gguf").symlink_to(MODEL)
        host = Host(files, models).start()
        assert home.wait_for_members(1, 30) == 1
        with open_gguf(MODEL) as file:
            identity = fingerprint(file)
        old = home.plan(identity)[1][place_of("box")]("old")
        old.requests.sendall(b"x")
        assert old.requests.recv(1) == b"x"
        # Answers of the old placement, and its end, are on their way while the next one begins and works.
        relay.hold()
        old.requests.sendall(b"o")
        new = home.plan(identity)[1][place_of("box")]("new")
        home.keep({"member://box/cpu:0": range(1)})
        new.requests.sendall(b"n")
        assert new.requests.recv(1) == b"n"
        relay.release()
        with pytest.raises(OSError), contextlib.closing(old.requests):
            if not old.requests.recv(1):
                raise ConnectionError("closed")
        new.requests.sendall(b"m")
        assert new.requests.recv(1) == b"m"
        assert within(10, lambda: home.status().members[0].state == "serving") and home.status().epoch == 2
        new.requests.close()
        new.heartbeat.close()
        old.heartbeat.close()
        host.stop()
